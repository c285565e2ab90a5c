"""What is remembered for those who come back: all that they missed, or nothing."""

from hypothesis import given
from hypothesis import strategies as st

from tidemark.app.read_side.replay import BUFFER_SECONDS, BufferedReplay, ReplayBuffer, has_reached
from tidemark.app.read_side.subscription import EventBatch
from tidemark.sinks.postgres.history import DurableMark
from tidemark.sinks.reader.events import Advance, Late, Place
from tidemark.sinks.reader.follow import EventMerge
from tidemark.streaming.values.limits import Evidence

MARK = DurableMark(1, 5)


def advance(writer: str, prev: int, id: int) -> Advance:
    return Advance(writer, 1, prev, id, Evidence(facts=id - prev), prev, id, 1, 1)


def moved(place: Place, *events: Advance | Late) -> EventBatch:
    """What a follower at `place` hands out: the line comes as far as every writer."""
    joining = EventMerge(place)
    for event in events:
        assert [*(joining.add_advance(event) if isinstance(event, Advance) else joining.add_late(event))]
    after = joining.place
    return EventBatch("s", place, Place(max(after.positions.values()), after.positions, after.late), events)


def grown(count: int, replay_buffer: ReplayBuffer | None = None) -> tuple[ReplayBuffer, list[EventBatch]]:
    """One writer, which moves by one ID a slice."""
    replay_buffer = replay_buffer or ReplayBuffer()
    place = Place(10, {"w": 10})
    replay_buffer.begin_stream("s", place)
    slices = []
    for id in range(10, 10 + count):
        slices.append(moved(place, advance("w", id, id + 1)))
        replay_buffer.add(slices[-1])
        place = slices[-1].place_after
    return replay_buffer, slices


def test_who_comes_back_is_given_the_slices_that_it_missed() -> None:
    """From where it stood, as the very objects that others were given."""
    replay_buffer, slices = grown(3)
    for missed, place in enumerate([slices[0].place_before, *(piece.place_after for piece in slices)]):
        found = replay_buffer.batches_after("s", Place(place.linear, {**place.positions}, place.late))
        assert found is not None
        assert found.place is place
        assert found.batches == slices[missed:]


def test_what_is_not_kept_is_read() -> None:
    """Of a stream that is not followed, of before it was, and of too long ago nothing is claimed."""
    clock = [0.0]
    replay_buffer, slices = grown(3, ReplayBuffer(lambda: clock[0]))
    assert replay_buffer.batches_after("other", Place()) is None
    assert replay_buffer.batches_after("s", Place(9, {"w": 9})) is None
    assert replay_buffer.batches_after("s", Place(10, {"w": 10, "gone": 9})) is None
    clock[0] = slices[1].created_at + BUFFER_SECONDS + 1e-9
    replay_buffer.drop_old()
    assert replay_buffer.batches_after("s", slices[1].place_before) is None
    assert replay_buffer.batches_after("s", slices[2].place_before) == BufferedReplay(
        slices[2].place_before, slices[2:]
    )


def test_late_completions_are_missed_too() -> None:
    """Who has the positions and not the late completion, which moves none, is not told that it has all."""
    before = Place(5, {"w": 5}, late=1)
    replay_buffer = ReplayBuffer()
    replay_buffer.begin_stream("s", before)
    late = moved(before, Late(2, "w", 1, 2, 3, 1, "final", 1, 1))
    replay_buffer.add(late)
    assert replay_buffer.batches_after("s", Place(5, {"w": 5}, late=1)) == BufferedReplay(before, [late])
    assert replay_buffer.batches_after("s", Place(5, {"w": 5}, late=0)) is None


def test_mark_stands_for_what_was_handed_out_before_it() -> None:
    """Told again, it stands for no more; and for nothing where one of the streams is not known from there on."""
    replay_buffer, slices = grown(2)
    replay_buffer.add_mark(MARK)
    later = moved(slices[-1].place_after, advance("w", 12, 13))
    replay_buffer.add(later)
    replay_buffer.add_mark(MARK)
    assert replay_buffer.batches_since(MARK, ["s"]) == {"s": BufferedReplay(later.place_before, [later])}
    assert replay_buffer.batches_since(DurableMark(1, 6), ["s"]) == {}
    replay_buffer.begin_stream("new", Place())
    assert replay_buffer.batches_since(MARK, ["s", "new"]) == {}
    replay_buffer.end_stream("s")
    assert replay_buffer.batches_since(MARK, ["s"]) == {}


@given(
    st.lists(st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.booleans()), min_size=1), st.data()
)
def test_from_any_place_every_move_joins(batches: list[tuple[list[str], bool]], data: st.DataObject) -> None:
    """Whoever stands behind any batch, at another sidecar, which may have cut the list at others, is told all the rest,
    joined; or is not told that it is kept, where it stands before the first."""
    replay_buffer, place, moves, events = (
        ReplayBuffer(),
        Place(10, dict.fromkeys("abc", 10)),
        list[Advance](),
        list[Advance](),
    )
    replay_buffer.begin_stream("s", place)
    places = [(place, 0)]
    for batch, cut in batches:
        positions = dict(places[-1][0].positions)
        for writer in batch:
            here = positions[writer]
            positions[writer] = max(positions.values()) + 1
            events.append(advance(writer, here, positions[writer]))
            moves.append(events[-1])
        places.append((Place(max(positions.values()), positions), len(moves)))
        if cut:
            replay_buffer.add(moved(place, *events))
            place, events = places[-1][0], []
    stood, seen = data.draw(st.sampled_from(places))
    found = replay_buffer.batches_after("s", stood)
    assert found is not None
    joining = EventMerge(found.place)
    given = [event for piece in found.batches for event in piece.events]
    told = [new for event in given if isinstance(event, Advance) for new in joining.add_advance(event)]
    assert told == moves[seen : len(moves) - len(events)]
    older = Place(9)
    assert replay_buffer.batches_after("s", older) is None
    assert has_reached(stood, older)
    assert not has_reached(older, stood)
