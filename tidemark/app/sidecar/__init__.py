"""The sidecar: published positions over HTTP, for programs in any language (docs/design.md 7).

The sidecar is stateless, so any number of sidecars may run. Each has one event loop, and threads that query Postgres.
"""
