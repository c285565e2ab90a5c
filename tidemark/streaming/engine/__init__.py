"""Spark: its JVM, session, executors and checkpoint, and the query that calls `core` and `ingest`."""
