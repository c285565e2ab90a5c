"""The durable source of truth: positions, history and states, written in one transaction for each batch."""
