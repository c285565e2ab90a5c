"""Commands: their forms, and that nothing else is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.common.errors import BadCommand
from tidemark.streaming.wire.line_protocol import (
    Command,
    ErrorCommand,
    LineSplitter,
    NameCommand,
    PingCommand,
    PositionCommand,
    RdataCommand,
    RelayedCommand,
    ReplicateCommand,
    ServerCommand,
    parse,
)
from tidemark.streaming.wire.records import MAX_ID, is_name

names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=40).filter(
    is_name
)
ids = st.integers(-MAX_ID, MAX_ID)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40)
commands = st.one_of(
    st.builds(ServerCommand, names),
    st.builds(PingCommand, texts),
    st.builds(NameCommand, texts),
    st.builds(ReplicateCommand),
    st.builds(PositionCommand, names, names, ids, ids),
    st.builds(RdataCommand, names, names, ids | st.none(), texts),
    st.builds(ErrorCommand, texts),
    st.builds(RelayedCommand, st.builds("{} {}".format, st.just("USER_IP"), texts)),
)


@given(commands)
def test_what_is_printed_is_parsed_again(command: Command) -> None:
    """Every command is one line that says all of it, whatever its names, and rows with spaces."""
    assert parse(str(command).encode()) == command
    assert "\n" not in str(command)


@pytest.mark.parametrize(
    "line",
    [
        "USER_SYNC worker1 @a:b start 1500000000000",
        "USER_SYNC worker1 @a:b end 1500000000000",
        "USER_SYNC worker1 @a:b start 1500000000000 DEVICE",
        "USER_SYNC Xw9ZpQ @a:b DEVICE start 1500000000000",
        "CLEAR_USER_SYNC worker1",
        "FEDERATION_ACK master 1234",
        "REMOTE_SERVER_UP example.org",
        'USER_IP {"user": "@a:b", "ip": "::1"}',
        "LOCK_RELEASED worker1 name key",
        "NEW_ACTIVE_TASK 17",
        "CANCEL_TASK 17",
    ],
)
def test_relayed_commands_are_kept_letter_by_letter(line: str) -> None:
    """What only passes between clients goes on as it came."""
    assert parse(line.encode()) == RelayedCommand(line)


def test_row_may_hold_whatever_json_may() -> None:
    """U+007F stands in a JSON string as it is, and is no control character there."""
    assert parse(b'RDATA s w 1 {"a":"\x7f"}') == RdataCommand("s", "w", 1, '{"a":"\x7f"}')


@pytest.mark.parametrize("line", [b"", b"  ", b"\r", b"\t"])
def test_blank_lines_say_nothing(line: bytes) -> None:
    """They are no commands, and no mistakes."""
    assert parse(line) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"NAME a\x00b", "control characters"),
        (b"ping 1", "unknown command 'ping'"),
        (b" PING 1", "unknown command ''"),
        (b"HELLO", "unknown command 'HELLO'"),
        (b"GET / HTTP/1.1", "unknown command 'GET'"),
        (b"SERVER", "one name"),
        (b"SERVER a b", "one name"),
        (b"POSITION s w 1", "a stream, a writer, a previous ID"),
        (b"POSITION s w 1 2 3", "a stream, a writer, a previous ID"),
        (b"POSITION s w one 2", "'one' is not a stream ID"),
        (b"POSITION s w 1 9223372036854775808", "not a stream ID"),
        (b"RDATA s w 1", "a stream, a writer, an ID or batch"),
        (b"RDATA s w many {}", "'many' is not a stream ID"),
        (b"USER_SYNC worker1 @a:b begin 1", "USER_SYNC has wrong arguments"),
        (b"FEDERATION_ACK master", "FEDERATION_ACK has wrong arguments"),
        (b"REMOTE_SERVER_UP a b", "REMOTE_SERVER_UP has wrong arguments"),
    ],
)
def test_what_is_no_command_is_refused_with_its_reason(line: bytes, problem: str) -> None:
    """One sentence says what is wrong with the line."""
    with pytest.raises(BadCommand, match=problem):
        parse(line)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_command_or_refused(line: bytes) -> None:
    """Nothing else comes of a line, whatever is in it."""
    try:
        parse(line.replace(b"\n", b""))
    except BadCommand:
        return


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b""))), st.integers(1, 7))
def test_lines_do_not_depend_on_how_they_arrive(lines: list[bytes], size: int) -> None:
    """Cut into pieces of any size, the same lines come out, and the half line at the end does not."""
    splitter = LineSplitter(20)
    found: list[bytes] = []
    data = b"".join(line + b"\n" for line in lines) + b"half"
    for start in range(0, len(data), size):
        found.extend(splitter.split(data[start : start + size]))
    assert found == lines


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_line_beyond_the_limit_is_refused_before_it_ends(end: bytes) -> None:
    """No more than a line's length is ever held."""
    splitter = LineSplitter(10)
    assert list(splitter.split(b"0123456789\n0123456789")) == [b"0123456789"]
    with pytest.raises(BadCommand, match="longer than 10 bytes"):
        list(splitter.split(b"x" + end))
