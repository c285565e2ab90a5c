"""Edges put in order by compiled code: in one pass from where they came to their groups, and then along their chains.

A shortcut for what `link` asks numpy for where there is little.
"""

from typing import Final

from tidemark.streaming.ingest.edges import Edges
from tidemark.streaming.ingest.jit_cache import compiled, kept
from tidemark.streaming.values.intervals import Ids

MOST_STEPS: Final = 32
"""Back that an edge is taken on average. Edges that come in the order in which they complete need one or two."""


@compiled(inline=True)
def _put(to: Edges, place: int, it: Edges, at: int) -> None:
    to.incarnations[place] = it.incarnations[at]
    to.prevs[place] = it.prevs[at]
    to.ids[place] = it.ids[at]
    to.kinds[place] = it.kinds[at]
    to.offsets[place] = it.offsets[at]
    to.times[place] = it.times[at]


@kept
@compiled()
def arrange(edges: Edges, found: Edges, begins: Ids, hand: Edges) -> bool:
    """Put into `found` the edges by group and `prev`, those of one `prev` as they came; False where they come in such
    disorder that others do it faster. `begins` are zeros, two more than there are groups; `hand` has room for one edge.
    """
    count = len(edges.ids)
    for at in range(count):
        begins[edges.incarnations[at] + 2] += 1
    for group in range(2, len(begins)):
        begins[group] += begins[group - 1]
    for at in range(count):
        group = edges.incarnations[at] + 1
        _put(found, begins[group], edges, at)
        begins[group] += 1
    left = MOST_STEPS * count
    for at in range(1, count):
        group, prev, place = found.incarnations[at], found.prevs[at], at
        if found.incarnations[at - 1] != group or found.prevs[at - 1] <= prev:
            continue
        _put(hand, 0, found, at)
        while place > 0 and found.incarnations[place - 1] == group and found.prevs[place - 1] > prev:
            _put(found, place, found, place - 1)
            place -= 1
        _put(found, place, hand, 0)
        left -= at - place
        if left < 0:
            return False
    return True
