"""The local stack: real Kafka, Postgres and Redis servers from packages alone, for trying Tidemark and for its tests.

Not for production: one broker, no replication, loopback addresses only.
"""
