"""The line protocol: positions and rows as one command a line, over TCP and over a channel of Redis (docs/protocol.md).

Runs in the sidecar's process, on its event loop. `commands`, `conversation`, `announcer` and `rows` are pure;
`hub`, `server`, `channel` and `speaker` hold the sockets; `listen` is a client.
"""
