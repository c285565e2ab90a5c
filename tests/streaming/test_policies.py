"""Which policy counts for a stream, and that bounds of its own change no batch that is replayed."""

from hypothesis import given
from hypothesis import strategies as st

from tests.streaming.builders import STREAM, Shard, join, rdata
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.store import States
from tidemark.streaming.values.limits import DAY_MS, POLICY_SETTINGS, Bounds, Policies

NAMES = st.text("ab*", min_size=1, max_size=4)
GIVEN = st.dictionaries(NAMES, st.dictionaries(st.sampled_from(["pending_bound", "gap_seconds"]), st.integers(1, 9)))


def slowly(policies: Policies, stream: str, setting: str) -> int | None:
    """The definition: of those that fit the longest that says it, the name itself before all. A stream that is called
    like a beginning is taken for it."""
    begins = stream.removesuffix("*")
    fits = [name for name in policies.by_name if name == stream or (name[-1] == "*" and begins.startswith(name[:-1]))]
    said = sorted((name == stream, len(name), name) for name in fits if setting in policies.by_name[name])
    return policies.by_name[said[-1][2]][setting] if said else POLICY_SETTINGS[setting].default


@given(GIVEN, NAMES)
def test_the_most_particular_policy_counts_for_each_setting(given: dict[str, dict[str, int]], stream: str) -> None:
    """A name that ends with a star is also the beginning of others. Bounds are found in the same way."""
    policies = Policies(given)
    for setting in ("pending_bound", "gap_seconds"):
        assert policies.value(stream, setting) == slowly(policies, stream, setting)
    assert policies.bounds().for_stream(stream).pending == policies.value(stream, "pending_bound")


def test_a_setting_that_is_not_known_is_left_alone() -> None:
    """A newer version wrote it, and an older one took over again."""
    policies = Policies({"a": {"colour": 3, "retirement_days": 2}}, {"retirement_days": 9})
    assert policies.bounds().for_stream("a") == Bounds(retirement_ms=2 * DAY_MS)
    assert policies.bounds().for_stream("b").retirement_ms == 9 * DAY_MS


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_stream_keeps_to_bounds_of_its_own(own: int, others: int) -> None:
    """Of the same records one puts off what the other holds; fed again, each does the same, byte for byte."""
    bounds = Policies({STREAM: {"pending_bound": own}}, {"pending_bound": others}).bounds()
    records = [join("w", 0), *(rdata("w", id, epoch=1) for id in (3, 5, 7, 9))]
    done = Shard(bounds=bounds).feed(*records)
    assert done == Shard(bounds=Bounds(pending=own)).feed(*records)
    assert done == Shard(bounds=bounds).feed(*records)
    assert done.summary.max_span_count == min(own, 4)


def test_bounds_of_a_shard_are_those_of_all() -> None:
    """How many streams may wait unread is nobody's own."""
    assert Policies({"*": {"pending_bound": 3}}).bounds().unreadable == Bounds().unreadable
    assert apply_batch(0, States(), [], 0, Policies({"a": {"pending_bound": 3}}).bounds()).streams == []
