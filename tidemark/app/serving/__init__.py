"""Servers on listening sockets: the sidecar process, TLS, eviction of connections, and health endpoints."""
