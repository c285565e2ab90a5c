"""`tidemark skip`, `retire`, `join`: what an operator is shown and refused before anything is sent."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.streaming import builders
from tests.streaming.builders import STREAM, Shard, rdata
from tidemark.app.cli import main
from tidemark.app.verbs import overrides
from tidemark.app.verbs.overrides import IdRange
from tidemark.common.errors import BadRecord
from tidemark.streaming.values.limits import Policies
from tidemark.streaming.wire.records import CURRENT_EPOCH, DatabaseStart, Join, OverridableRecord, Retire, Skip


@pytest.fixture
def stored() -> bytes:
    """Writer a of epoch 7 stands at 2 and owes 3 and 4; b stands at 6."""
    shard = Shard()
    shard.feed(
        builders.join("a", 2, epoch=7), builders.join("b", 2), rdata("a", 5, 4, epoch=7), rdata("b", 6, 2, epoch=1)
    )
    return shard.states[STREAM]


def skip(prev: int, id: int, writer: str = "a", epoch: int = CURRENT_EPOCH, *, beyond: bool = False) -> Skip:
    return Skip(
        stream=STREAM, writer=writer, epoch=epoch, prev=prev, id=id, beyond=beyond, by="ada", why="host is gone"
    )


def retire(writer: str) -> Retire:
    return Retire(stream=STREAM, writer=writer, id=0, by="ada", why="host is gone")


def shown(stored: bytes, act: OverridableRecord) -> list[str]:
    return [*overrides.try_override(stored, act, 1000.0).lines()]


def refusal(stored: bytes, act: OverridableRecord) -> str:
    with pytest.raises(BadRecord) as caught:
        overrides.try_override(stored, act, 1000.0)
    return str(caught.value)


def test_what_an_act_would_do_is_shown_with_the_epoch_that_it_means(stored: bytes) -> None:
    """The state machine's own answer: who moves over what, and the line."""
    assert shown(stored, skip(2, 4)) == [
        "SKIP of a (epoch 7), by ada: host is gone",
        "a moves from 2 to 5: facts 1, skipped 2",
        "the linear position of events moves from 2 to 6",
    ]
    join = Join(stream=STREAM, writer="b", epoch=2, id=6, by="ada", why="host is gone")
    assert shown(stored, join)[1:] == ["no position moves; the linear position of events stays at 2"]


def test_what_is_taken_back_is_shown() -> None:
    """From where the line waits for the writer again, and up to where it completes too late for its position."""
    shard = Shard()
    shard.feed(builders.join("a", -2), builders.skip("a", -2, -2_000_000_000, beyond=True))
    act = Join(stream=STREAM, writer="a", epoch=CURRENT_EPOCH, id=-2, by="ada", why="a zero too many")
    assert shown(shard.states[STREAM], act) == [
        "JOIN of a (epoch 1), by ada: a zero too many",
        "IDs of a beyond -2 are open again; completions up to -2000000000 are late",
    ]


def test_a_writer_retires_where_it_stands(stored: bytes) -> None:
    """Without an ID nothing is settled; where something is open, that must be said."""
    assert shown(stored, retire("b"))[0] == "RETIRE of b (epoch 1), by ada: host is gone"
    assert "settles its open IDs" in refusal(stored, retire("a"))


def test_an_id_beyond_what_is_allocated_is_refused_unless_that_is_said(stored: bytes) -> None:
    """A mistyped ID is told here and not among the dead letters."""
    assert "--beyond" in refusal(stored, skip(2, 2_000_000_000))
    assert "a moves from 2 to 9: facts 1, skipped 6" in shown(stored, skip(2, 9, beyond=True))


def test_what_is_asked_wrongly_is_refused_with_what_to_do(stored: bytes) -> None:
    """One line for each mistake."""
    assert "no such writer" in refusal(stored, skip(2, 4, writer="zoe"))
    assert "that epoch has ended" in refusal(stored, skip(2, 4, epoch=6))
    assert "wrong sign" in refusal(stored, skip(-2, -4))
    assert "not beyond prev" in refusal(stored, skip(4, 4))


def test_only_what_is_open_can_be_skipped(stored: bytes) -> None:
    """An ID that is complete is no gap; of a range that goes beyond one, what is open is named."""
    assert "no ID of the writer is open in that range" in refusal(stored, skip(4, 5))
    assert overrides.try_override(stored, skip(0, 5), 1000.0).settled_ranges() == [(2, 4)]


def test_what_waits_and_what_would_be_lost_is_said_before(stored: bytes) -> None:
    """The IDs whose facts rest on the operator's word alone, who owes them, and when it was last heard of."""
    assert [*overrides.try_override(stored, skip(2, 4), 1000.0).warnings()] == [
        "a: silent, last record 16 min ago; 1 complete ID pending, 1 with facts",
        "Tidemark cannot verify that IDs 3..4 of a are empty.",
        "A row of such an ID that is committed later is late (`tidemark late list`): readers have passed it.",
    ]
    (warning,) = overrides.try_override(stored, retire("b"), 1000.0).warnings()
    assert warning.startswith("The linear position no longer waits for b")


def test_what_is_settled_of_a_stranger_is_said() -> None:
    """All that it did not complete itself, up to the ID that is given."""
    shard = Shard()
    shard.feed(builders.join("a", 0), rdata("b", -7, -6, epoch=4), rdata("b", -4, -2, epoch=4))
    act = Retire(stream=STREAM, writer="b", id=-7, by="ada", why="garbage")
    assert overrides.try_override(shard.states[STREAM], act, 300.0).settled_ranges() == [(0, -2), (-4, -6)]


@pytest.mark.parametrize("act", [skip(2, 4), retire("b")])
def test_a_writer_that_lives_is_left_alone_unless_that_is_overruled(stored: bytes, act: OverridableRecord) -> None:
    """Whether it owes anything or not: heard of within a minute, or with a transaction that it says to be open."""
    assert [*overrides.try_override(stored, act, 61.0).objections()] == []
    (objection,) = overrides.try_override(stored, act, 59.0).objections()
    assert f"{act.writer} is alive, last record 58 s ago, and may still complete its IDs" in objection
    hourly = Policies({"*": {"silent_seconds": 3600}})
    assert "is alive, last record 16 min ago" in "".join(
        overrides.try_override(stored, act, 1000.0, hourly).objections()
    )


@pytest.mark.parametrize("act", [retire("aa"), Join(stream=STREAM, writer="aa", id=2, by="ada", why="it sends none")])
def test_a_name_that_no_record_has_named_is_refused_unless_that_is_overruled(
    stored: bytes, act: OverridableRecord
) -> None:
    """A mistyped JOIN would hold the line for ever, and a mistyped RETIRE would leave the right one as it is."""
    (objection,) = overrides.try_override(stored, act, 1000.0).objections()
    assert objection.startswith("events has no writer aa: ")


def test_an_open_transaction_is_ended_and_not_skipped() -> None:
    """However long ago its writer spoke last."""
    shard = Shard()
    shard.feed(builders.join("a", 2), rdata("a", 5, 4, epoch=1), builders.opened("a", "pid 7: insert"))
    (objection,) = overrides.try_override(shard.states[STREAM], skip(2, 4), 9000.0).objections()
    assert "a has an open transaction" in objection


def test_who_cannot_retire_without_an_id_is_told_what_is_in_the_way() -> None:
    """It is alive; it has completed what lies above something open, and with which ID that is settled; or it has
    retired."""
    shard = Shard()
    shard.feed(builders.join("a", 2), builders.join("b", 2), rdata("a", 5, 4, epoch=1), rdata("b", 9, 8, epoch=1))

    def refused(act: OverridableRecord, now: float) -> str:
        with pytest.raises(BadRecord) as problem:
            overrides.try_override(shard.states[STREAM], act, now)
        return str(problem.value)

    settles = "--id=5 settles its open IDs"
    assert f"a is alive, last record 29 s ago: stop the writer first; then {settles}" in refused(retire("a"), 30.0)
    assert refused(retire("a"), 300.0).endswith(f"conflict: a has open IDs below ID 5: {settles}")
    at_5, at_9 = (Retire(stream=STREAM, writer="a", id=id, by="ada", why="gone") for id in (5, 9))
    assert overrides.try_override(shard.states[STREAM], at_5, 300.0).settled_ranges() == [(2, 4)]
    shard.feed(builders.retire("a", 5))
    assert refused(at_9, 300.0).endswith("a has already retired, at position 5")


def test_a_worker_of_synapse_retires_by_its_bridge_unless_that_is_overruled() -> None:
    """Which looks what it has written; an operator would skip that, and the bridge go on waiting."""
    (objection,) = overrides.bridge_objections(retire("event1"), {STREAM})
    assert "use `tidemark synapse retire`" in objection
    assert [
        *overrides.bridge_objections(retire("event1"), {"others"}),
        *overrides.bridge_objections(skip(2, 4), {STREAM}),
    ] == []


def test_a_stranger_that_lives_is_not_thrown_out_unless_that_is_overruled() -> None:
    """By its name, or with all that never joined."""
    shard = Shard()
    shard.feed(builders.join("a", 0), rdata("b", 7, 6, epoch=4))
    for writer in ("b", "*"):
        act = Retire(stream=STREAM, writer=writer, id=7, by="ada", why="garbage")
        assert ["b is alive" in it for it in overrides.try_override(shard.states[STREAM], act, 30.0).objections()] == [
            True
        ]
        assert [*overrides.try_override(shard.states[STREAM], act, 300.0).objections()] == []


def fence(
    stored: bytes, now: float, id: int | None = None, epoch: int | None = None, writer: str = "a"
) -> overrides.Trial:
    """As `tidemark fence` tries it."""
    fields = {"stream": STREAM, "writer": writer, "epoch": epoch, "id": id, "by": "ada", "why": "its host is lost"}
    return overrides.try_override(stored, overrides.make_override_record("FENCE", stored, fields), now)


def test_a_fence_ends_the_epoch_where_the_writer_stands(stored: bytes) -> None:
    """It settles what is open below, and says from which epoch on the writer counts again; what comes of the old one
    is refused from then on."""
    tried = fence(stored, 1000.0)
    assert (tried.record.epoch, tried.record.id, tried.settled_ranges(), [*tried.dangers()]) == (8, 5, [(2, 4)], [])
    assert [*tried.warnings()][2:] == [
        "Records of a in an epoch below 8 are rejected from now on.",
        "The writer's next start needs an epoch above 8; the linear position waits for that start.",
    ]
    assert fence(stored, 1000.0, epoch=99).record.epoch == 99


def test_a_fence_never_begins_a_timeline(stored: bytes) -> None:
    """Rule 10: below what the writer completed it is refused, and of one that lives, which may complete more before the
    pipeline reads it."""
    (danger,) = fence(stored, 1000.0, id=4).dangers()
    assert "a new timeline would begin" in danger
    (danger,) = fence(stored, 30.0).dangers()
    assert "a is alive" in danger
    by_hand = Join(stream=STREAM, writer="a", epoch=9, id=4, by="ada", why="typed")
    assert len([*overrides.try_override(stored, by_hand, 30.0).dangers()]) == 2


def test_what_a_relay_tells_is_not_fenced() -> None:
    """It goes on in its epoch, so all that its database appends would be refused for ever."""
    shard = Shard()
    shard.feed(replace(builders.join("a", 2), timeline=DatabaseStart("db", "t1")))
    (danger,) = fence(shard.states[STREAM], 1000.0).dangers()
    assert "a relay sends the records of" in danger


def test_only_an_epoch_that_lives_can_be_ended(stored: bytes) -> None:
    """A stranger has none, and an epoch below ends nothing."""
    for wrong, why in (
        (("zoe", None), "writer zoe never joined or has retired"),
        (("a", 7), "a is in epoch 7: give a higher --epoch"),
    ):
        with pytest.raises(BadRecord, match=why):
            fence(stored, 1000.0, writer=wrong[0], epoch=wrong[1])


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, words)
    return done.exit_code, done.output


@pytest.mark.parametrize("words", [("skip", STREAM, "a", "3..4"), ("retire", STREAM, "a"), ("join", STREAM, "a")])
def test_who_and_why_are_asked_for(words: Sequence[str]) -> None:
    """Wrong usage is exit code 2, before any server is asked."""
    code, output = run(*words, "--id", "4") if words[0] != "skip" else run(*words)
    assert (code, "Missing option '--by'" in output) == (2, True)


@pytest.mark.parametrize(
    "words", [("skip", STREAM, "a", "3..4"), ("dead-letters", "replay", "7"), ("late", "resolve", STREAM, "7")]
)
@pytest.mark.parametrize("by", ["", " ", "a\0b"])
def test_nobody_is_no_answer(words: Sequence[str], by: str) -> None:
    """Rule 1: every verb that changes something asks who answers for it."""
    code, output = run(*words, "--by", by, "--why", "gone")
    assert (code, "give one line of text" in output) == (2, True)


@pytest.mark.parametrize("ids", ["4..3", "0..3", "0", "-3..4", "3...4", "3-4", "x", "3..", "99999999999999999999"])
def test_what_is_no_range_of_ids_is_wrong_usage(ids: str) -> None:
    """Both ends on one side of 0, the nearer one first."""
    code, output = run("skip", "--by", "ada", "--why", "gone", "--", STREAM, "a", ids)
    assert (code, "is not a range of IDs such as 8..11" in output) == (2, True)


def test_a_range_says_its_first_and_its_last_id() -> None:
    """As status and gaps show it; one ID is a range too, and backward streams count down."""
    read = [IdRange().convert(it, None, None) for it in ("8..11", "8", "-8..-11", "1")]
    assert read == [(7, 11), (7, 8), (-7, -11), (0, 1)]
