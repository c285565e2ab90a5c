"""From messages in Kafka to the runs of a batch: consumer, compiled decoder, compaction, and the Spark data source."""
