"""The state machine of a stream, and the batch that advances many streams. Pure: no I/O, no clock, no Spark."""
