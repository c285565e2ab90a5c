"""Finds the causes that block positions, and their remedies, for the sidecar, the command line and the alerts."""
