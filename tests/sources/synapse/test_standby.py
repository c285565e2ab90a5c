"""A real standby of Synapse's database that lags and is promoted while workers write before the bridge is back."""

from collections.abc import Iterator
from functools import partial

import psycopg
import pytest

from tests.fix_servers import own_postgres
from tests.sources.relay.world import Core
from tidemark.app.stack.postgres import PostgresReplica, PostgresServer
from tidemark.sources.synapse import state, tables, timelines
from tidemark.sources.synapse.evidence import HeadSamples
from tidemark.sources.synapse.state import SynapseServer
from tidemark.sources.synapse.streams import BridgedStream, StreamPublisher
from tidemark.sources.synapse.tables import STREAMS
from tidemark.sources.transactions import flush_wal, read_server_history
from tidemark.streaming.wire.line_protocol import PositionCommand

pytestmark = pytest.mark.postgres

WRITERS = ("misc1", "misc2")
TABLES = """
    create sequence push_rules_stream_sequence;
    create table push_rules_stream (stream_id bigint, instance_name text, user_id text);
    create sequence cache_invalidation_stream_seq;
    create table cache_invalidation_stream_by_instance (
        stream_id bigint, instance_name text, cache_func text, keys text[], invalidation_ts bigint
    );
"""
VALUES = {
    "push_rules": "'@alice:one.test'",
    "caches": "'cs_cache_fake', null, (extract(epoch from clock_timestamp()) * 1000)::bigint",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with own_postgres(tmp_path_factory.mktemp("homeserver")) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(TABLES)
        yield server


class Bridged:
    """One stream, told by one bridge after the other; its workers write as `write` says."""

    def __init__(self, dsn: str, own: psycopg.Connection, name: str) -> None:
        self._stream = STREAMS[name]
        self._dsn = dsn
        self._own = own
        self._sent = 0
        self.core = Core(name)
        self.connect()

    def reconnect(self) -> None:
        self.synapse = psycopg.connect(self._dsn, autocommit=True)

    def connect(self) -> None:
        self.reconnect()
        found = read_server_history(self.synapse, "here", self._stream.queries[0].name)
        server = SynapseServer(found.database, flush_wal(self.synapse), "one.test")
        head = tables.read_head(self.synapse, self._stream)
        table = partial(tables.read_marks, self.synapse, self._stream)
        known = timelines.load_progress(self._own, self._stream, self._stream.name, server, head, table)
        of = BridgedStream(self._stream, self._stream.name, WRITERS)
        self.publisher = StreamPublisher(of, server, known, WRITERS, head, HeadSamples(self._stream.name))

    def write(self, count: int) -> list[int]:
        rows = self.synapse.execute(
            f"insert into {self._stream.queries[0].name} select nextval('{self._stream.sequence}'), %s,"
            f" {VALUES[self._stream.name]} from generate_series(1, %s) returning stream_id".encode(),
            [WRITERS[count % 2], count],
        ).fetchall()
        return [id for (id,) in rows]

    def follow(self) -> None:
        """Both workers say that they are as far as the sequence."""
        head = tables.read_head(self.synapse, self._stream)
        for name in WRITERS:
            self.publisher.receive(PositionCommand(self._stream.name, name, head, head))
        self.publisher.decider.observe(head, frozenset())
        for _ in range(3):
            self.publisher.publish(self.synapse, self._own)
        self.publisher.audit(self.synapse, self._own)
        unsent = state.read_outbox(self._own, {self._stream.name: self._sent})
        self.core.take([each.value for each in unsent])
        self._sent = max([self._sent, *(each.number for each in unsent)])


@pytest.mark.parametrize("name", ["caches", "push_rules"])
def test_standby_that_lagged(server: PostgresServer, database: str, name: str) -> None:
    """It lacks 8 facts that were published, and workers write more before the bridge is back, past all that it knew:
    those in place of others are late, the rest is told. The timeline begins where rows prove that both agree; rows that
    prove nothing are all told again."""
    with state.state_session(database) as session:
        state.SCHEMA.migrate(session)
    with psycopg.connect(database, autocommit=True) as own:
        bridged = Bridged(server.dsn(), own, name)
        bridged.write(1)
        bridged.follow()
        kept = bridged.write(17)
        bridged.follow()
        standby = PostgresReplica(server)
        standby.copy(as_standby=True)
        standby.start()
        standby.wait_until_streaming(is_synchronous=False)
        standby.disconnect()
        lost = bridged.write(8)
        bridged.follow()
        reached = bridged.core.line
        assert reached == lost[-1]
        bridged.synapse.close()
        standby.promote()
        standby.replace_origin()
        server.start()
        bridged.reconnect()
        again = [*bridged.write(5), *bridged.write(36)]
        bridged.synapse.close()
        given_out_again = [id for id in again if id <= reached]
        bridged.connect()
        bridged.follow()
        core = bridged.core
        at = kept[-1] if name == "caches" else kept[0] - 1
        assert [id for id, _ in core.timelines] == [at]
        assert core.late_ids == {id for id in [*kept, *given_out_again] if id > at}
        assert {*again} <= core.facts.keys()
        assert (core.line, core.rejected) == (again[-1], {})
        bridged.synapse.close()
