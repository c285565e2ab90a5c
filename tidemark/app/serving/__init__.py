"""Listening sockets: the sidecar as a process, TLS, eviction of idle connections, and the health endpoints."""
