"""`tidemark force`: what an operator is shown and refused before anything is sent."""

import pytest
from click.testing import CliRunner

from tests.streaming import builders
from tests.streaming.builders import STREAM, Shard, rdata
from tidemark.app import force
from tidemark.app.cli import main
from tidemark.streaming.errors import BadRecord
from tidemark.streaming.records import LIVING, Join, Marker, Retire, Skip


@pytest.fixture
def stored() -> bytes:
    """Writer a of epoch 7 stands at 2 and owes 3 and 4; b stands at 6."""
    shard = Shard()
    shard.feed(
        builders.join("a", 2, epoch=7), builders.join("b", 2), rdata("a", 5, 4, epoch=7), rdata("b", 6, 2, epoch=1)
    )
    return shard.states[STREAM]


def skip(prev: int, id: int, writer: str = "a", epoch: int = LIVING, *, beyond: bool = False) -> Skip:
    return Skip(
        stream=STREAM, writer=writer, epoch=epoch, prev=prev, id=id, beyond=beyond, by="ada", why="host is gone"
    )


def retire(writer: str) -> Retire:
    return Retire(stream=STREAM, writer=writer, id=0, by="ada", why="host is gone")


def shown(stored: bytes, act: Marker) -> list[str]:
    return [*force.told(stored, force.attempt(stored, act, 1000))]


def refusal(stored: bytes, act: Marker) -> str:
    with pytest.raises(BadRecord) as caught:
        force.attempt(stored, act, 1000)
    return str(caught.value)


def test_what_an_act_would_do_is_shown_with_the_epoch_that_it_means(stored: bytes) -> None:
    """The state machine's own answer: who moves over what, and the line."""
    assert shown(stored, skip(2, 4)) == [
        "SKIP of a in epoch 7, by ada: host is gone",
        "a moves from 2 to 5: facts 1, skipped 2",
        "the line of events moves from 2 to 6",
    ]
    join = Join(stream=STREAM, writer="b", epoch=2, id=6, by="ada", why="host is gone")
    assert shown(stored, join)[1:] == ["nothing moves; the line of events stays at 2"]


def test_what_is_taken_back_is_shown() -> None:
    """From where the line waits for the writer again, and up to where it completes too late for its position."""
    shard = Shard()
    shard.feed(builders.join("a", -2), builders.skip("a", -2, -2_000_000_000, beyond=True))
    act = Join(stream=STREAM, writer="a", epoch=LIVING, id=-2, by="ada", why="a zero too many")
    assert shown(shard.states[STREAM], act) == [
        "JOIN of a in epoch 1, by ada: a zero too many",
        "a is waited for again from -2 on; what it completes up to -2000000000 is late",
    ]


def test_a_writer_retires_where_it_stands(stored: bytes) -> None:
    """Without an ID nothing is settled; where something is open, that must be said."""
    assert shown(stored, retire("b"))[0] == "RETIRE of b in epoch 1, by ada: host is gone"
    assert "completed what lies beyond" in refusal(stored, retire("a"))


def test_an_id_beyond_what_is_allocated_is_refused_unless_that_is_said(stored: bytes) -> None:
    """A mistyped ID is told here and not among the dead letters."""
    assert "--beyond" in refusal(stored, skip(2, 2_000_000_000))
    assert "a moves from 2 to 9: facts 1, skipped 6" in shown(stored, skip(2, 9, beyond=True))


def test_what_is_asked_wrongly_is_refused_with_what_to_do(stored: bytes) -> None:
    """One line for each mistake."""
    assert "no such writer" in refusal(stored, skip(2, 4, writer="zoe"))
    assert "that epoch is over" in refusal(stored, skip(2, 4, epoch=6))
    assert "on the other side of 0" in refusal(stored, skip(-2, -4))
    assert "not beyond prev" in refusal(stored, skip(4, 4))


@pytest.mark.parametrize("verb", ["skip", "retire", "join"])
def test_who_and_why_are_asked_for(verb: str) -> None:
    """Wrong usage is exit code 2, before any server is asked."""
    prev = ["--prev", "-2"] if verb == "skip" else []
    done = CliRunner().invoke(main, ["force", verb, STREAM, "a", *prev, "--id", "-4", "--by", "ada"])
    assert (done.exit_code, "Missing option '--why'" in done.output) == (2, True)
