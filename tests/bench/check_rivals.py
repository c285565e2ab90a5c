"""The competitors in Java, on what the workload has not: `make languages-test`, for Maven fetches their libraries."""

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.bench.competitors import jvm
from tests.bench.competitors.task import CompetitorFailed, Task, ask, measure
from tests.bench.rate import RateLimits
from tests.bench.topic import create
from tidemark.sources.kafka import KafkaConnection

PARTITIONS = 4


@pytest.fixture(scope="session")
def rivals(java: str, jars: Path) -> jvm.BuiltPrograms:
    return jvm.build(java, jars / "rivals")


def told(kind: str, writer: str, stream: str = "events", **fields: Any) -> tuple[str, bytes]:
    return stream, json.dumps({"kind": kind, "stream": stream, "writer": writer, **fields}).encode()


def edge(writer: str, prev: int, id_: int, kind: str = "RDATA", epoch: int = 1) -> tuple[str, bytes]:
    return told(kind, writer, epoch=epoch, prev=prev, id=id_, row={"id": 99, "writer": "row", "ids": [7]})


ROWS: list[list[Any]] = [[{"prev": 50}], [], [{}, {}]]
RECORDS = [
    told("JOIN", "early", epoch=1, id=0),
    *(edge("early", 7, 9), edge("early", 3, 5), edge("early", 5, 7), edge("early", 1, 3)),
    *(edge("early", 20, 30), edge("early", 25, 30), edge("early", 30, 40), edge("early", 3, 5)),
    edge("early", 0, 1),
    told("JOIN", "run", epoch=1, id=10),
    told("RUN", "run", epoch=1, prev=14, ids=[15, 20, 22], rows=ROWS),
    told("RUN", "run", epoch=1, prev=10, ids=[11, 14, 15], rows=ROWS),
    told("RUN", "run", epoch=1, prev=22, ids=[], rows=[]),
    *(edge("run", 22, 24, "VOID"), edge("run", 24, 31, "POSITION")),
    told("JOIN", "again", epoch=3, id=4),
    *(edge("again", 4, 6, epoch=3), edge("again", 6, 8, epoch=2)),
    told("JOIN", "again", epoch=4, id=12),
    edge("again", 12, 13, epoch=4),
    told("RETIRE", "again", epoch=4, id=17),
    *(told("RDATA", "plain", "orders", id=1, row={}), told("RDATA", "plain", "orders", id="batch", row={})),
    *(told("RDATA", "plain", "orders", id=3, row={}), told("RDATA", "plain", "orders", id=2, row={"a": [1]})),
    *(told("RDATA", "back", "backfill", id=-1, row={}), told("RDATA", "back", "backfill", id=-2, prev=-1, row={})),
    *(told("RUN", "back", "backfill", prev=-3, ids=[-5, -6], rows=[[], []]), told("RDATA", "back", "backfill", id=-3)),
    *(("orders", garbage) for garbage in (b"", b"{", b"[1]", b"null", b"7", b'{"kind":"RDATA"}', b'{"kind":"NEW"}')),
    *(("orders", garbage) for garbage in (b"\xff\xfe", b'{"kind":"RDATA","stream":"orders","writer":"plain","id":{}}')),
]
TRUTH = {
    "events": {"early": 9, "run": 31, "again": 17},
    "orders": {"plain": 3},
    "backfill": {"back": 6},
}


def sent(connection: KafkaConnection, topic: str) -> None:
    create(connection, topic, PARTITIONS)
    producer = Producer(connection.producer_settings())
    for stream, value in RECORDS:
        producer.produce(topic, value, stream.encode())
    assert producer.flush(30) == 0


def task(connection: KafkaConnection, topic: str, directory: Path) -> Task:
    servers = connection.client_settings()["bootstrap.servers"]
    limits = RateLimits(0, len(RECORDS), 1)
    return Task(servers, topic, PARTITIONS, len(RECORDS), 1, limits, str(directory / topic), "")


@pytest.mark.parametrize("name", jvm.PROGRAMS)
def test_positions_follow_from_every_kind_of_record(
    rivals: jvm.BuiltPrograms, connection: KafkaConnection, tmp_path: Path, name: str
) -> None:
    """Early, doubled, overlapping, voided, run-length, of an old epoch, backward: each counts once, and no garbage."""
    sent(connection, name)
    answer, samples = ask(name, rivals.command(name), task(connection, name, tmp_path))
    assert answer.positions == TRUTH
    assert answer.marks[-1].records == len(RECORDS)
    assert samples.taken[-1].cpu > 0


def test_wrong_positions_give_no_figure(rivals: jvm.BuiltPrograms, connection: KafkaConnection, tmp_path: Path) -> None:
    """The error names the stream that differs."""
    sent(connection, "wrong")
    truth = TRUTH | {"orders": {"plain": 4}}
    with pytest.raises(CompetitorFailed, match=r"loop-java ends at wrong positions: of orders .*3.* truth .*4"):
        measure("loop-java", rivals.command("loop-java"), task(connection, "wrong", tmp_path), truth)


def test_program_that_fails_says_why(rivals: jvm.BuiltPrograms, connection: KafkaConnection, tmp_path: Path) -> None:
    """With the end of what it wrote to standard error."""
    nowhere = task(KafkaConnection("nowhere.invalid:1"), "nowhere", tmp_path)
    with pytest.raises(CompetitorFailed, match="No resolvable bootstrap urls"):
        measure("loop-java", rivals.command("loop-java"), nowhere, TRUTH)
