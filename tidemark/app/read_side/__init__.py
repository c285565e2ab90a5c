"""The read side: what is published of every stream, read once for all; below the sidecar and the line protocol."""
