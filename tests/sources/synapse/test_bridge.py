"""The bridge beside a real Synapse: what it tells is what the tables hold, whatever dies."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_redis import Node
from tests.fix_synapse import READER
from tests.services.synapse import Homeserver
from tests.sources.synapse.site import Follower, SynapseSite
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.servers import KafkaServer
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.synapse.state import SCHEMA, state_session
from tidemark.sources.topics import TopicPlan, Topics


@pytest.fixture
def site(
    homeserver: Homeserver, home: Home, kafka: KafkaServer, prefix: str, database: str, synapse_redis: Node
) -> Iterator[SynapseSite]:
    connection = KafkaConnection(kafka.bootstrap_servers)
    Topics(connection).create_missing([TopicPlan(prefix, 1, 3_600_000)])
    with state_session(database) as session:
        SCHEMA.migrate(session)
    variables = {
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": prefix,
        "TIDEMARK_POSTGRES_DSN": database,
        "TIDEMARK_SYNAPSE_DSN": make_conninfo(homeserver.dsn, user=READER, password=READER),
        "TIDEMARK_SYNAPSE_REDIS_URL": synapse_redis.url,
    }
    follower = Follower(connection, prefix)
    with psycopg.connect(homeserver.dsn, autocommit=True) as sql:
        made = SynapseSite(homeserver, home, variables, follower, sql)
        yield made
        for bridge in made.bridges:
            bridge.kill()
    follower.close()


def test_events_of_two_writers_whatever_dies(site: SynapseSite, synapse_redis: Node) -> None:
    """Workers are killed and come back, Redis is, the bridge is, another takes over: at every moment no event is
    stepped over, and at rest everything is told."""
    rooms = [site.server.room("alice") for _ in range(8)]
    first = site.bridge()
    site.bridge()
    with site.traffic(rooms) as sent:

        def more(count: int) -> None:
            wanted = len(sent) + count
            eventually(lambda: site.checked() and len(sent) >= wanted, 60, site.known)

        eventually(lambda: site.checked() and site.floor, 30, site.known)
        more(20)
        victim = site.server.workers["event1"]
        victim.kill()
        more(4)
        victim.start()
        more(10)
        first.kill()
        more(10)
        synapse_redis.kill()
        synapse_redis.start()
        more(10)
        first.start()
    site.settle()
    assert len({*site.rows().values()} & {"event1", "event2"}) == 2
