"""The encodings of records in Kafka, and of runs between the stages of a batch. No state of a stream."""
