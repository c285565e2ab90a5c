"""The room DAG of a homeserver: the reference workload of Tidemark (docs/explanation/rooms.md).

`rules` is pure. The other modules store the rooms in Postgres and read them.
"""
