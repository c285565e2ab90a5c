"""States are kept in layers, and nobody can tell: what a batch finds and gives is as of one dictionary of all."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.streaming.builders import Record, Shard, join, packets, rdata, sent
from tests.streaming.test_batch_cuts import cut, cuts
from tests.streaming.test_fast_path import logs
from tidemark.streaming.core import effects, store
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.store import NO_STATES, UNREADABLE_STATE, PackedStates, States
from tidemark.streaming.engine.query import pack_by_shard
from tidemark.streaming.values.limits import Bounds

names = st.text(max_size=3) | st.sampled_from(["a", "ab", "é", "\U0001f600", "￿"])
dictionaries = st.dictionaries(names, st.sampled_from([UNREADABLE_STATE, b"1", b"22", b"333"]), max_size=12)


@given(dictionaries, names, st.integers(0, 2))
def test_packed_states_are_found_by_name(given_: dict[str, bytes], other: str, expected: int) -> None:
    packed = PackedStates.of(given_)
    packed.prepare_lookups(expected)
    assert {name: packed.get(name) for name in [*given_, other]} == {**dict.fromkeys([other]), **given_}
    assert dict(packed.items()) == given_
    assert packed.data == PackedStates.of(dict(reversed(given_.items()))).data
    assert packed.unreadable_count == [*given_.values()].count(UNREADABLE_STATE)


@given(dictionaries, dictionaries, dictionaries, names)
def test_the_newest_state_of_a_stream_counts(
    seed: dict[str, bytes], packed: dict[str, bytes], recent: dict[str, bytes], other: str
) -> None:
    """Also for how many of them nothing could be read, and after they were kept, packed anew or not."""
    together = seed | packed | recent
    below = PackedStates.of(seed)
    layered = States(dict(recent), PackedStates.of(packed), below)
    with patch.object(store, "_RECENT_BYTES_MAX", 0):
        packed_anew = States.unpack(States(dict(recent), PackedStates.of(packed), below).pack(), below)
    for found in (layered, States.unpack(layered.pack(), below), packed_anew):
        assert {name: found.get(name) for name in together} == together
        assert (other in found) == (other in together)
        assert found.unreadable_count() == [*together.values()].count(UNREADABLE_STATE)


@settings(max_examples=examples(100))
@given(logs, cuts, st.integers(0, 10), st.sampled_from([0, 100, 1 << 20]))
def test_a_batch_is_the_same_wherever_its_states_lie(
    log: list[Record], where: list[int], reseeded: int, few: int
) -> None:
    """Effects are equal byte for byte, and so is each state, with a new line of batches begun anywhere."""
    shard = Shard()
    seed, data = NO_STATES, None
    with patch.object(store, "_RECENT_BYTES_MAX", few):
        for number, batch in enumerate(cut(log, where)):
            if number == reseeded:
                seed, data = PackedStates.of(shard.states), None
            made = packets(batch)
            wanted = shard.feed_packets(made)
            found = States.unpack(data, seed)
            done = apply_batch(0, found, made, shard.now, shard.bounds)
            data = found.pack()
            assert effects.encode(done) == effects.encode(wanted)
            kept = States.unpack(data, seed)
            assert {name: kept.get(name) for name in shard.states} == shard.states


def test_what_a_batch_does_not_touch_is_neither_kept_nor_passed_on() -> None:
    """Rule 8: of ten thousand streams of the seed one that moves is kept, some hundred bytes."""
    shard = Shard()
    shard.feed(join("w", 0))
    (one,) = shard.states.values()
    seeds = pack_by_shard({f"s{number}": one for number in range(10_000)} | shard.states, 1)
    found = States.unpack(None, PackedStates(seeds[0]))
    done = apply_batch(0, found, packets(sent([rdata("w", 1, epoch=1)], 1)), 2000, Bounds())
    assert [it.linear for it in done.streams] == [1]
    assert len(found.pack()) < 200


def test_streams_of_which_nothing_can_be_read_are_counted_in_the_seed() -> None:
    """Past the bound of them a new stream is marked as uncertain, as it was before the line of batches began anew."""
    seed = PackedStates.of({f"k{number}": UNREADABLE_STATE for number in range(3)})
    for most, doubted in ((3, True), (4, False)):
        found = States.unpack(None, seed)
        done = apply_batch(0, found, packets(sent([join("a", 2)], 0)), 1000, Bounds(unreadable=most))
        assert [move.unseen > 0 for it in done.streams for move in it.advances] == [doubted]
