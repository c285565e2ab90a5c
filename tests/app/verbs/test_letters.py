"""`tidemark dead-letters`: what an operator sees of a rejected record, and what may come again."""

import json

import pytest

from tests.streaming import builders
from tests.streaming.builders import STREAM, Shard, rdata
from tidemark.app.output import json_text
from tidemark.app.verbs import dead_letters
from tidemark.common.errors import BadRecord
from tidemark.sinks.dead_letters import DeadLetter
from tidemark.streaming.core.effects import OperatorOverride
from tidemark.streaming.values.limits import Bounds

FACT = b'{"kind":"RDATA","stream":"events","writer":"a","epoch":1,"prev":2,"id":3,"row":{}}'


def letter(value: bytes | None, key: bytes = b"events", topic: str = "facts", gone: str = "") -> DeadLetter:
    return DeadLetter(0, 7, 1000, "wrong_partition", (topic, 2, 40), "", gone, key, value, (("trace", b"\x00\xff"),))


@pytest.fixture
def stored() -> bytes:
    """Writer a stands at 2 and owes 3; b at 9."""
    shard = Shard()
    shard.feed(builders.join("a", 2), builders.join("b", 2), rdata("a", 5, 3, epoch=1), rdata("b", 9, 2, epoch=1))
    return shard.states[STREAM]


def refusal(it: DeadLetter, stored: bytes | None) -> str:
    with pytest.raises(BadRecord) as caught:
        dead_letters.try_replay(it, "facts", stored, 9.0)
    return str(caught.value)


def test_what_a_replay_would_do_is_shown_before(stored: bytes) -> None:
    """The state machine's own answer for the record as it stands; whatever it says is known afterwards."""
    tried = dead_letters.try_replay(letter(FACT), "facts", stored, 9.0)
    assert [*tried.lines()] == [
        "RDATA of a in epoch 1, rejected as wrong_partition",
        "a moves from 2 to 5: facts 2",
        "the linear position of events moves from 2 to 5",
    ]
    assert not tried.is_contained()
    assert dead_letters.try_replay(letter(FACT), "facts", tried.effects.state, 9.0).is_contained()
    assert tried.override("ada", "mended") == OperatorOverride("a", 1, "REPLAY", 2, 3, "ada", "mended")


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (FACT.replace(b'"prev":2,', b""), "a moves from 2 to 5: facts 2"),
        (FACT.replace(b"RDATA", b"VOID"), "a moves from 2 to 5: facts 1, empty 1"),
        (FACT.replace(b"RDATA", b"POSITION"), "a moves from 2 to 5: facts 1, empty 1"),
        (
            b'{"kind":"RUN","stream":"events","writer":"a","epoch":1,"prev":5,"ids":[6,8],"rows":[[{}],[]]}',
            "no position moves; the linear position of events stays at 2; counted as: applied 2",
        ),
        (
            FACT.replace(b'"epoch":1', b'"epoch":4'),
            "no position moves; the linear position of events stays at 2; counted as: buffered 1",
        ),
    ],
)
def test_every_kind_of_edge_can_come_again(stored: bytes, value: bytes, line: str) -> None:
    """A fact with its neighbour or without, what holds none, many in one record, and one of a writer to come."""
    assert [*dead_letters.try_replay(letter(value), "facts", stored, 9.0).lines()][1] == line


def test_what_the_pipeline_would_defer_is_not_contained(stored: bytes) -> None:
    """By the bounds of the policies: its writer has room for one range above a gap."""
    above = letter(FACT.replace(b'"prev":2,"id":3', b'"prev":7,"id":8'))
    bounds = Bounds(pending=1)
    tried = dead_letters.try_replay(above, "facts", stored, 9.0, bounds)
    assert (tried.is_contained(), tried.is_deferred()) == (False, True)
    assert dead_letters.find_replay_outcome(lambda: tried) == "not seen"
    assert not dead_letters.try_replay(above, "facts", stored, 9.0).is_deferred()


def test_what_would_be_refused_again_is_not_sent(stored: bytes) -> None:
    """A record that is still wrong, a zombie, and one that contradicts what was settled before."""
    assert refusal(letter(b"{not json"), stored).startswith("not_json")
    assert refusal(letter(FACT, key=b"other"), stored).startswith("key_mismatch")
    assert refusal(letter(FACT.replace(b'"epoch":1', b'"epoch":0')), stored).startswith("zombie")
    assert refusal(letter(FACT.replace(b'"id":3', b'"id":4')), stored).startswith("conflict")


@pytest.mark.parametrize(
    "value",
    [
        b'{"kind":"JOIN","stream":"events","writer":"a","epoch":9,"id":1}',
        b'{"kind":"RETIRE","stream":"events","writer":"a","epoch":1,"id":9}',
        b'{"kind":"OPEN","stream":"events","writer":"a","epoch":1,"transactions":[]}',
        b'{"kind":"RDATA","stream":"events","writer":"a","epoch":1,"id":"batch","row":{}}',
    ],
)
def test_what_is_true_at_its_place_alone_never_comes_again(stored: bytes, value: bytes) -> None:
    """A JOIN out of its place would begin a timeline that is none (docs/design.md 3)."""
    assert refusal(letter(value), stored).startswith("not_replayed")


def test_an_act_and_what_is_gone_are_not_replayed(stored: bytes) -> None:
    """The one has a verb that looks again, of the other nothing is left."""
    assert "run its command again" in refusal(letter(FACT, topic="control"), stored)
    missing = "gone: the dead letter has no copy of the record: removed by retention"
    assert refusal(letter(None, gone="removed by retention"), stored) == missing


def test_a_letter_is_shown_whole_and_no_terminal_obeys_it() -> None:
    """Bytes that are no text come in base64, control characters escaped."""
    it = letter(b"\x1b[2J\xff", key=b"\x1b]0;x")
    text = dead_letters.to_text(it, {("facts", 2, 40): 3}, 61.0)
    assert text.splitlines()[:2] == ["reason: wrong_partition", "stream: \N{REPLACEMENT CHARACTER}]0;x"]
    assert "replay_override: 3" in text
    assert "record: facts[2] 40, 60 s ago" in text
    assert "\x1b" not in text + dead_letters.to_table([it], {}, 61.0)
    told = json.loads(json_text(dead_letters.json_fields(it, {})))
    assert (told["value"], told["value_base64"]) == (None, "G1sySv8=")


def test_the_list_has_a_line_for_each() -> None:
    """Its offset is what show and replay want, with the partition before it where that is not 0."""
    assert dead_letters.to_table([letter(FACT)], {("facts", 2, 40): 3}, 61.0).splitlines() == [
        "OFFSET  AGE   REASON           STREAM  RECORD       REPLAYED    DETAIL",
        "7       60 s  wrong_partition  events  facts[2] 40  override 3",
    ]
