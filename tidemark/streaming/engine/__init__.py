"""Spark: its JVM, session, executors, checkpoint and the query that calls `core` and `ingest`."""
