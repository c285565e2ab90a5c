"""Tidemark's topics, as this process needs them: made where they are missing and that is wanted, and fit to be read."""

import structlog

from tidemark.app.settings import Settings
from tidemark.sources.start import Topic, require_uncompacted
from tidemark.sources.topics import Topics, plans

log = structlog.get_logger(__name__)


def ready(settings: Settings, topics: Topics) -> dict[str, Topic]:
    """The topics as they are, by name; `kafka_create_topics` decides whether one that is missing is made.

    Raises `TopicMissing`, `TopicCompacted`, and `Unavailable` where the brokers do not answer.
    """
    wanted = plans(
        settings.kafka_facts_topic,
        settings.kafka_control_topic,
        settings.kafka_dead_letters_topic,
        settings.kafka_partitions,
    )
    if settings.kafka_create_topics:
        for name in topics.create_missing(wanted):
            log.info("Made a topic", topic=name)
    found = topics.describe(plan.name for plan in wanted)
    require_uncompacted(found)
    return found
