"""The relay: reads the outbox that `tidemark.append` fills in a service's database, and sends facts to Kafka
(docs/design.md 4b).
"""
