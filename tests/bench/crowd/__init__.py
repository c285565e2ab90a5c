"""The processes around a sidecar that is measured: who publishes, who listens, and who asks."""
