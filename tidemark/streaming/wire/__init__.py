"""Records and runs as they are encoded in Kafka and between the stages of a batch. No state of a stream."""
