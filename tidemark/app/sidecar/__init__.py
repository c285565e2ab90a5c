"""The sidecar: what is published of every stream, over HTTP, for everything that is not Python (docs/design.md 7).

Stateless: any number may run. One process, one event loop; Postgres is asked on threads.
"""
