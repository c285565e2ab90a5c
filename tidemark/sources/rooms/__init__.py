"""The room DAG of a homeserver: the reference workload of Tidemark (docs/explanation/rooms.md).

`rules` and `states` are pure; the other modules keep the rooms in Postgres.
"""
