"""Listening sockets: the sidecar process, TLS, eviction of idle connections, and the health endpoints."""
