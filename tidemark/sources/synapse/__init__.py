"""Synapse with workers as a source: its tables and its replication channel (docs/how-to/synapse.md)."""
