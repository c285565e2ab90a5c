"""What blocks a position and what settles it: for the sidecar, the command line and the alerts."""
