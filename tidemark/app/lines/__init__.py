"""The line protocol: positions and rows as lines of text, over TCP or a Redis channel (docs/reference/protocol.md).

Runs in the sidecar's process, on its event loop. `commands`, `conversation`, `announcer` and `rows` are pure;
`hub`, `server`, `channel` and `speaker` hold the sockets; `listen` is a client.
"""
