"""The local stack: real Kafka, Postgres and Redis servers from installed packages, to try and to test Tidemark.

Not for production: one broker, no replication, loopback addresses only.
"""
