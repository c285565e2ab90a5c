"""Rows from a real Kafka to real connections, with the pipeline's moves made by the test."""

import itertools
import threading

import pytest

from tests.app.lines.given import FactsTopic, LineClient, client, served
from tests.fix_servers import away
from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.lines import hub
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.stack.processes import KafkaServer
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import RecordProducer
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.streaming.wire.records import Join, Rdata, Record, encode, encode_row


class FactsOfTest:
    """The facts of one test."""

    def __init__(self, connection: KafkaConnection, name: str) -> None:
        Topics(connection).create_missing([TopicPlan(name, 2, 3_600_000)])
        self.facts = FactsTopic(connection, name)
        self._producer = RecordProducer(connection, name, give_up_after=60)

    def send(self, *records: Record) -> None:
        for record in records:
            self._producer.send(record.stream, encode(record))
        assert self._producer.flush(60) == 0


@pytest.fixture
def topic(kafka: KafkaServer, prefix: str) -> FactsOfTest:
    return FactsOfTest(KafkaConnection(kafka.bootstrap_servers), prefix)


def fact(id: int, writer: str = "w", epoch: int = 1, name: str = "s") -> Record:
    return Rdata(stream=name, writer=writer, epoch=epoch, id=id, row=encode_row({"of": id}))


def part(text: str) -> Record:
    return Rdata(stream="s", writer="w", epoch=1, id="batch", row=encode_row(text))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves wait for their rows however busy the machine is."""
    monkeypatch.setattr(hub, "ROW_TIMEOUT_SECONDS", 5.0)


def flowing(one: LineClient, topic: FactsOfTest, pipeline: Pipeline, first: int = 1) -> int:
    """Until rows are read, each fact is to be fetched; gives the ID of the first whose row came."""
    for id in itertools.count(first):
        topic.send(fact(id))
        pipeline.move("w", id - 1, id)
        while (line := one.said()) is not None and line != f"POSITION s w {id} {id}":
            if line == f'RDATA s w {id} {{"of":{id}}}':
                return id
    raise AssertionError


@pytest.mark.usefixtures("patient")
def test_rows_follow_their_positions(pipeline: Pipeline, servers: ReadSideConfig, topic: FactsOfTest) -> None:
    """Rows are held until their IDs are passed, then sent in stream order, several of a fact as a batch; what is empty
    behind them is a POSITION, and what a zombie said is not sent."""
    with served(servers, facts=topic.facts) as address, client(address, "PING 1", "REPLICATE") as one:
        at = flowing(one, topic, pipeline)
        topic.send(fact(at + 2), part("a"), fact(at + 1))
        assert one.quiet(0.3)
        pipeline.move("w", at, at + 2)
        assert one.lines(3) == [
            'RDATA s w batch "a"',
            f'RDATA s w {at + 1} {{"of":{at + 1}}}',
            f'RDATA s w {at + 2} {{"of":{at + 2}}}',
        ]
        topic.send(Join(stream="s", writer="w", epoch=2, id=at + 4), fact(at + 3), fact(at + 5, epoch=2))
        pipeline.move("w", at + 2, at + 5, epoch=2, facts=1, empty=2)
        assert one.said() == f'RDATA s w {at + 5} {{"of":{at + 5}}}'
        pipeline.move("w", at + 5, at + 9, empty=4)
        assert one.said() == f"POSITION s w {at + 5} {at + 9}"
        assert one.quiet(0.1)


@pytest.mark.usefixtures("patient")
def test_backward_stream_keeps_its_sign(pipeline: Pipeline, servers: ReadSideConfig, topic: FactsOfTest) -> None:
    """IDs go down from -1, in the order in which they were given out."""
    pipeline.publish(stream("back", advance("w", 0, -1), linear=-1))
    with served(servers, facts=topic.facts) as address, client(address, "REPLICATE") as one:
        assert one.said() == "POSITION back w -1 -1"
        flowing(one, topic, pipeline)
        topic.send(fact(-3, name="back"), fact(-2, name="back"))
        pipeline.publish(stream("back", advance("w", -1, -3), linear=-3))
        assert one.lines(2) == ['RDATA back w -2 {"of":-2}', 'RDATA back w -3 {"of":-3}']


def test_rows_are_read_only_while_somebody_listens(
    pipeline: Pipeline, servers: ReadSideConfig, topic: FactsOfTest
) -> None:
    """With the last client that asked the reading ends; for the next one it begins anew where the pipeline is."""
    with served(servers, facts=topic.facts) as address:
        eventually(lambda: not reading())  # also of servers that were here before
        with client(address, "REPLICATE") as one:
            at = flowing(one, topic, pipeline)
            assert reading()
        eventually(lambda: not reading())
        with client(address, "REPLICATE") as one:
            assert one.said() == f"POSITION s w {at} {at}"
            flowing(one, topic, pipeline, at + 1)


def reading() -> bool:
    return any(thread.name.startswith("tail") for thread in threading.enumerate())


def test_broker_that_goes_and_comes_back(
    pipeline: Pipeline, servers: ReadSideConfig, topic: FactsOfTest, kafka: KafkaServer
) -> None:
    """Without Kafka clients are told to fetch; when it is back, rows come again."""
    with served(servers, facts=topic.facts) as address, client(address, "REPLICATE") as one:
        at = flowing(one, topic, pipeline)
        with away(kafka):
            pipeline.move("w", at, at + 1)
            assert one.said() == f"POSITION s w {at + 1} {at + 1}"
        flowing(one, topic, pipeline, at + 2)
