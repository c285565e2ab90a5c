"""What is published of every stream, read once for all who ask; the sidecar and the line protocol stand above it."""
