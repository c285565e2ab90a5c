"""The room DAG of a homeserver, small and correct: the reference workload of Tidemark (docs/explanation/rooms.md).

`rules`, `states` and `model` are pure; `memory` is a server's rooms without a database.
"""
