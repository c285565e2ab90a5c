"""Positions for readers, in Redis, written by one script for each stream, and made again from Postgres."""
