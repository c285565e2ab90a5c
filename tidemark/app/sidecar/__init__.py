"""The sidecar: published positions over HTTP, for programs in any language (docs/design.md 7).

Stateless: any number may run. One process with one event loop; threads query Postgres.
"""
