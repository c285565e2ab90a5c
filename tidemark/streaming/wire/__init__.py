"""The encodings of records in Kafka, and of runs between the stages of a batch.

This folder has no code for the state of streams.
"""
