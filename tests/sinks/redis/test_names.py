"""Names of streams in the names of Redis: whatever a stream is called, it has keys of its own that lie together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from tidemark.sinks.redis.client import channel, channel_pattern, hash_tag, key, stream_of

NAMES = st.one_of(st.text("{}<>%:a", min_size=1, max_size=6), st.text(min_size=1, max_size=20))


@given(NAMES)
def test_the_keys_of_a_stream_lie_in_one_slot_and_lead_back_to_it(name: str) -> None:
    """Its tag ends where the name ends and is never empty; its channel matches the sidecar's pattern."""
    inner = hash_tag(name)[1:-1]
    assert inner
    assert "}" not in inner
    assert len({key_slot(key(name, what).encode("utf-8", "replace")) for what in ("positions", "linear", "token")}) == 1
    for database in (0, 1, 13):
        assert matching(channel(name, database)) == [database]
        assert stream_of(channel(name, database)) == name


def matching(name: str) -> list[int]:
    """The databases of Redis whose clients hear this channel."""
    found = []
    for number in (0, 1, 3, 13):
        prefix, suffix = channel_pattern(number).split("*")
        if name.startswith(prefix) and name.endswith(suffix):
            found.append(number)
    return found


@given(NAMES, NAMES)
def test_no_two_streams_share_a_key(one: str, other: str) -> None:
    """Names with escapes in them are escaped themselves."""
    assert (hash_tag(one) == hash_tag(other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("orders", "{orders}"),
        ("a%7Db", "{a%7Db}"),
        ("<a>", "{<a>}"),
        ("}x", "{{>x}"),
        ("{}", "{{<{>}"),
        ("{>", "{{<>}"),
    ],
)
def test_only_braces_are_written_otherwise(name: str, written: str) -> None:
    """The contract for readers in any language, in docs/design.md 6."""
    assert key(name, "linear") == f"tidemark:{written}:linear"
