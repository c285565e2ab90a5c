"""The process that runs the Spark query: checks at the start, batches, supervision, metrics and traces."""
