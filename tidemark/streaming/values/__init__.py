"""Value types of the whole package: intervals of IDs, directions, limits. No I/O, no state."""
