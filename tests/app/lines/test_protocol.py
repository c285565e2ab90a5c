"""The keep-alive, by a clock of the test's own."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from tidemark.app.lines.server import (
    Disconnect,
    KeepAlive,
    Reaction,
    RelayCommand,
    SendCommand,
    SendPositions,
    ServerSession,
)

KEEP = KeepAlive(interval_seconds=5.0, timeout_seconds=15.0)


def begun() -> ServerSession:
    made = ServerSession(KEEP, lambda: 1500000000.25, 0.0)
    made.mark_sent(0.0)
    return made


def texts(acts: Iterable[Reaction]) -> list[str]:
    return [str(act.command) if isinstance(act, SendCommand | RelayCommand) else type(act).__name__ for act in acts]


def test_server_begins_with_its_name_and_a_ping() -> None:
    """SERVER comes first, then PING with the time in ms."""
    assert texts(begun().begin("one")) == ["SERVER one", "PING 1500000000250"]


def test_ping_only_where_nothing_else_was_said() -> None:
    """Something is sent at least every 5 s, and a PING only where there is nothing else."""
    talk = begun()
    assert texts(talk.tick(3.9, 1.0)) == []
    assert texts(talk.tick(4.0, 1.0)) == ["PING 1500000000250"]
    talk.mark_sent(4.0)
    assert texts(talk.tick(7.0, 1.0)) == []
    talk.mark_sent(7.0)
    assert texts(talk.tick(10.0, 1.0)) == []
    assert texts(talk.tick(11.0, 1.0)) == ["PING 1500000000250"]


def test_no_time_out_before_the_first_ping() -> None:
    """A person with nc may be silent for as long as they like."""
    talk = begun()
    assert texts(talk.receive(b"REPLICATE", 1.0)) == ["SendPositions"]
    talk.mark_sent(99990.0)
    assert texts(talk.tick(99991.0, 1.0)) == []


def test_silence_after_a_ping_ends_the_connection() -> None:
    """Who sent a PING and then nothing for 15 s is gone; any line, a blank one too, is a sign of life."""
    talk = begun()
    assert texts(talk.receive(b"PING 1", 1.0)) == []
    assert texts(talk.receive(b"", 10.0)) == []
    talk.mark_sent(24.0)
    assert texts(talk.tick(24.9, 1.0)) == []
    (leave,) = talk.tick(25.0, 1.0)
    assert isinstance(leave, Disconnect)
    assert leave.reason == "silent"
    assert texts(talk.tick(99.0, 1.0)) == texts(talk.receive(b"REPLICATE", 99.0)) == []


def test_what_clients_may_not_say_ends_the_connection() -> None:
    """The server's own commands, and what is none, are answered with ERROR, and then it is over."""
    for line in (b"RDATA s w 1 {}", b"POSITION s w 1 1", b"SERVER me", b"nonsense", b"\xff"):
        talk = begun()
        said = texts(talk.receive(line, 1.0))
        assert said[0].startswith("ERROR ")
        assert said[1:] == ["Disconnect"]
        assert texts(talk.receive(b"REPLICATE", 2.0)) == []


def test_error_of_the_client_is_the_last_word() -> None:
    """It says ERROR and goes: nothing is answered."""
    assert texts(begun().receive(b"ERROR I am lost", 1.0)) == ["Disconnect"]


def test_name_is_for_people() -> None:
    """It is kept for the log, and changes nothing else."""
    talk = begun()
    assert texts(talk.receive(b"NAME my worker", 1.0)) == []
    assert talk.name == "my worker"


@given(st.lists(st.tuples(st.floats(0, 6), st.sampled_from([b"PING 1", b"", b"NAME x", b"REPLICATE", b"USER_IP a"]))))
def test_never_silent_and_never_impatient(lines: list[tuple[float, bytes]]) -> None:
    """Whatever a client says, as long as it says something in time: we speak every 5 s, and never leave."""
    talk, now, said = begun(), 0.0, 0.0
    for pause, line in lines:
        until = now + pause
        while now + 1.0 <= until:
            now += 1.0
            acts = list(talk.tick(now, 1.0))
            assert not any(isinstance(act, Disconnect) for act in acts)
            if acts:
                said = now
                talk.mark_sent(now)
            assert now - said < KEEP.interval_seconds
        now = until
        assert all(isinstance(act, SendPositions | RelayCommand) for act in talk.receive(line, now))
