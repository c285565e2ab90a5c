"""Shared by sources, sinks and streaming: errors, Postgres sessions and migrations, Kafka errors. No domain logic."""
