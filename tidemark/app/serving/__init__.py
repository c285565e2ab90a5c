"""Listening sockets: the sidecar process, TLS, eviction of connections, and the health endpoints."""
