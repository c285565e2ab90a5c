"""Explains the state of streams: what blocks positions and the remedy, the condition of the pipeline, the lag of
readers, and a replay of recorded records."""
