"""`tidemark produce` on a real broker."""

import json

import pytest
from click.testing import CliRunner

from tidemark.app.cli import main
from tidemark.app.stack.processes import KafkaServer
from tidemark.app.verbs.kafka_records import ProduceResult, produce_lines
from tidemark.common.errors import TopicMissing
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics, topic_plans
from tidemark.streaming.wire.records import Topic

FACT = b'{"kind":"RDATA","stream":"orders","writer":"shop","id":%d,"row":{}}\n'
RUN = b'{"kind":"RUN","stream":"orders","writer":"shop","prev":0,"ids":[1,4],"rows":[[{}],[]]}\n'
SKIP = b'{"kind":"SKIP","stream":"orders","writer":"shop","prev":3,"id":4,"by":"ann","why":"lost"}\n'


@pytest.fixture
def connection(kafka: KafkaServer, prefix: str) -> KafkaConnection:
    """A broker with this test's three topics on it."""
    connection = KafkaConnection(kafka.bootstrap_servers)
    Topics(connection).create_missing(topic_plans(f"{prefix}.facts", f"{prefix}.control", f"{prefix}.dead", 4))
    return connection


def test_good_lines_are_sent_and_bad_ones_named_by_number(connection: KafkaConnection, prefix: str) -> None:
    """A bad line stops none of the others; blank lines are no lines; the last record's place is told."""
    refused: list[str] = []
    lines = [FACT % 1, b"\n", b"{not json}\n", SKIP, RUN]
    produced = produce_lines(connection, f"{prefix}.facts", Topic.FACTS, lines, refused.append)
    assert (produced.sent_count, produced.invalid_count) == (2, 2)
    assert [text.split(":")[:2] for text in refused] == [["line 3", " not_json"], ["line 4", " wrong_topic"]]
    assert produced.last_record is not None
    partition, offset = produced.last_record
    assert offset == 1
    assert Topics(connection).end_offsets({f"{prefix}.facts": 4})[f"{prefix}.facts", partition] == 2


def test_an_operators_act_goes_to_the_control_topic_and_a_fact_does_not(
    connection: KafkaConnection, prefix: str
) -> None:
    """Each topic takes what belongs on it."""
    refused: list[str] = []
    produced = produce_lines(connection, f"{prefix}.control", Topic.CONTROL, [SKIP, FACT % 1], refused.append)
    assert produced == ProduceResult(sent_count=1, invalid_count=1, last_record=(0, 0))
    assert "wrong_topic" in refused[0]


def test_a_missing_topic_is_said_and_not_made(connection: KafkaConnection, prefix: str) -> None:
    """A typing error in a topic's name must not leave a topic behind."""
    with pytest.raises(TopicMissing):
        produce_lines(connection, f"{prefix}.typo", Topic.FACTS, [FACT % 1], print)
    with pytest.raises(TopicMissing):
        Topics(connection).describe([f"{prefix}.typo"])


def test_topics_and_produce_have_a_result_for_programs(connection: KafkaConnection, prefix: str) -> None:
    """Number of partitions of each topic; number of records, and where the last one is. Reasons are on standard
    error."""
    names = {"FACTS": "facts", "CONTROL": "control", "DEAD_LETTERS": "dead"}
    variables = {f"TIDEMARK_KAFKA_{name}_TOPIC": f"{prefix}.{topic}" for name, topic in names.items()}
    cli = CliRunner(env={"TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": connection.bootstrap, **variables})
    topics = json.loads(cli.invoke(main, ["topics", "--json"]).stdout)["topics"]
    assert {"topic": f"{prefix}.facts", "partitions": 4} in topics
    done = cli.invoke(main, ["produce", "--json"], input=FACT % 1 + b"{not json}\n")
    assert done.exit_code == 1
    assert done.stderr.startswith("line 2: not_json")
    produced = json.loads(done.stdout)
    assert produced["last"].keys() == {"partition", "offset"}
    assert produced | {"last": None} == {"topic": f"{prefix}.facts", "sent": 1, "refused": 1, "last": None}
    none = json.loads(cli.invoke(main, ["produce", "--json"], input=b"").stdout)
    assert none == {"topic": f"{prefix}.facts", "sent": 0, "refused": 0, "last": None}


def test_the_summary_says_how_many_and_where() -> None:
    """One record is not "1 records", and no record has no place."""
    assert ProduceResult(1, 0, (2, 5)).summary("facts") == "1 record sent to facts, the last to partition 2 at offset 5"
    assert ProduceResult(0, 1, None).summary("facts") == "0 records sent to facts"
