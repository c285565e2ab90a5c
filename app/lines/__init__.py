"""The line protocol: positions and rows as one command a line, over TCP and over a channel of Redis (docs/protocol.md).

Runs in the sidecar's process, on its event loop. `commands`, `splitter`, `conversation`, `announcer`, `rows` and
`unannounced` are pure; `hub`, `server`, `channel` and `speaker` hold the sockets.
"""
