"""The ordering of stream IDs: from Kafka records to position advances.

Layers, from top to bottom: engine; core and ingest; wire; values. A layer imports only lower layers.
"""
