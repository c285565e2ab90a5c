"""The truth, durable: positions, history and states, written in one transaction for each batch."""
