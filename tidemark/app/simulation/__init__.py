"""A simulation on real servers: processes that write, processes that read, injected faults, and a verification."""
