"""The line protocol: positions and rows as lines of text, over TCP or a Redis channel (docs/reference/protocol.md).

The server side runs in the process of the sidecar, on its event loop. `rows` is pure; `hub`, `server` and `channel` do
I/O; `client` is a client.
"""
