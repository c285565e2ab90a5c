"""What is true and durable: positions, history and states, written in one transaction for each batch."""
