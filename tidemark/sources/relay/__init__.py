"""The relay: what `tidemark.append` left in a service's database, decided and sent to Kafka (docs/design.md 4b)."""
