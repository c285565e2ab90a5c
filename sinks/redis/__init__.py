"""What readers look at: positions in Redis, written by one script for each stream, and made again from Postgres."""
