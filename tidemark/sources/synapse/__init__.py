"""A Synapse with workers as a source: its tables, read by the word of its replication channel (docs/synapse.md)."""
