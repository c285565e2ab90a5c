"""Publishes positions to Redis for readers, with one script, and restores them from Postgres."""
