"""The process that runs the Spark query: its start, its batches, its metrics and its traces."""
