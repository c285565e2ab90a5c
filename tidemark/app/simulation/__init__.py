"""A play on real servers: processes that write, processes that read, and who directs them."""
