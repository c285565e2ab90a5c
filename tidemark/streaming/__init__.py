"""The ordering of stream IDs: from Kafka records to position advances.

Layers, each importing only those below: engine; core and ingest; wire; values.
"""
