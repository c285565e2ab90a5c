"""One reading for those who stand at nearly the same place."""

from hypothesis import given
from hypothesis import strategies as st

from tidemark.app.read_side.resumption import lowest
from tidemark.sinks.reader.events import Place

NAMES = ("a", "b", "c")


@st.composite
def places(draw: st.DrawFn) -> list[Place]:
    sign = draw(st.sampled_from((1, -1)))
    ids = st.integers(0, 9).map(lambda id: sign * id)
    one = st.builds(Place, ids, st.dictionaries(st.sampled_from(NAMES), ids), st.integers(0, 3))
    return draw(st.lists(one, min_size=1, max_size=5))


@given(places())
def test_lowest_place_is_behind_all_of_them(given: list[Place]) -> None:
    """Whoever stands at one of them has nothing to read before it, of any writer, known or not; and no place is
    farther that is behind all."""
    found = lowest(given)
    for name in (*NAMES, "unknown"):
        stands = [abs(it.positions.get(name, it.linear)) for it in given]
        assert abs(found.positions.get(name, found.linear)) == min(stands)
    assert found.late == min(it.late for it in given)
