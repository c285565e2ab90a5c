"""The picture of docs/explanation/rooms.md: one room by depth and by arrival. `make docs` draws it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources.rooms.dags import ROOM, an_event
from tests.sources.rooms.memory import MemoryRooms
from tidemark.sources.rooms.rules import RoomEvent

PICTURE = Path(__file__).parents[3] / "docs" / "pictures" / "room.svg"

_STEP, _ROW, _RADIUS, _LEFT = 84, 46, 17, 60
_LANES = {"A": 1, "B": 1, "C": 0, "D": 2, "E": 1, "F": 0, "G": 1}
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #334155; text-anchor: middle }
  .title { font-size: 15px; font-weight: 600; text-anchor: start }
  .name { font-weight: 600 }
  .edge { stroke: #94a3b8; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  circle { fill: #e0f2fe; stroke: #0284c7; stroke-width: 1.5 }
  .history { fill: #fef3c7; stroke: #d97706 }
  .end { stroke-width: 4 }
  .missing { fill: white; stroke: #94a3b8; stroke-dasharray: 4 3 }
  rect { fill: white }
  @media (prefers-color-scheme: dark) {
    text { fill: #e2e8f0 }
    rect { fill: #0f172a }
    circle { fill: #0c4a6e; stroke: #38bdf8 }
    .history { fill: #78350f; stroke: #fbbf24 }
    .missing { fill: #0f172a; stroke: #94a3b8 }
  }
"""


def make_room() -> tuple[MemoryRooms, list[RoomEvent]]:
    """A room and its events in order of depth. C and D are a fork, and E merges it. F arrives late, and forks after C.
    B is fetched as history. A is not stored yet."""
    a = an_event("A")
    b = an_event("B", a)
    c, d = an_event("C", b), an_event("D", b)
    e = an_event("E", c, d)
    f = an_event("F", c)
    g = an_event("G", e)
    rooms = MemoryRooms()
    for event in (c, d, e, g, f):
        rooms.persist(event, state_ids_before=[])
    rooms.persist(b, "backfill", [])
    return rooms, [a, b, c, d, e, f, g]


def draw() -> str:
    rooms, events = make_room()
    depths = {event.id: (_LEFT + (event.depth - 1) * _STEP, 60 + _LANES[event.id] * _ROW) for event in events}
    orders = {id: -1 - place for place, id in enumerate(rooms.history)} | {
        id: 1 + place for place, id in enumerate(rooms.live)
    }
    ranks = {id: place for place, id in enumerate(sorted(orders, key=lambda id: orders[id]))}
    arrivals = {id: (_LEFT + place * _STEP, 285) for id, place in ranks.items()}
    width, height = _LEFT * 2 + _STEP * 5, 360
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="A room by depth and by arrival">',
        f"<style>{_STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#94a3b8"/></marker>',
        f'<rect width="{width}" height="{height}"/>',
        '<text class="title" x="20" y="24">by depth: how history is read, from right to left</text>',
        *_edges(events, depths, bend=0),
        *_nodes(rooms, depths),
        *(f'<text x="{_LEFT + depth * _STEP}" y="198">{depth + 1}</text>' for depth in range(5)),
        '<text class="title" x="20" y="232">by arrival: how sync reads, from left to right</text>',
        *_edges([event for event in events if event.id in arrivals], arrivals, bend=38),
        *_nodes(rooms, arrivals),
        *(f'<text x="{x}" y="{y + 50}">{orders[id]}</text>' for id, (x, y) in arrivals.items()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _edges(events: list[RoomEvent], at: Mapping[str, tuple[int, int]], bend: int) -> Iterator[str]:
    """Lines from each event to its prev events."""
    for event in events:
        for prev in event.prevs:
            if prev not in at:
                continue
            (x, y), (to, level) = at[event.id], at[prev]
            along, across = to - x, level - y
            length = (along**2 + across**2) ** 0.5
            dx, dy = along / length * _RADIUS, across / length * _RADIUS
            high = bend if abs(along) > _STEP or along > 0 else 0
            begin = f"{x + dx:.0f} {y + dy - (high and _RADIUS * 0.8):.0f}"
            end = f"{to - dx * 1.15:.0f} {level - dy * 1.15 - (high and _RADIUS * 0.8):.0f}"
            yield f'<path class="edge" d="M{begin}Q{(x + to) / 2:.0f} {(y + level) / 2 - high:.0f} {end}"/>'


def _nodes(rooms: MemoryRooms, at: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    for id, (x, y) in at.items():
        kinds = {
            "history": id in rooms.history,
            "end": id in rooms.rooms[ROOM].forward_extremities,
            "missing": id in rooms.rooms[ROOM].backward_extremities,
        }
        classes = " ".join(kind for kind, applies in kinds.items() if applies)
        yield f'<circle class="{classes}" cx="{x}" cy="{y}" r="{_RADIUS}"/>'
        yield f'<text class="name" x="{x}" y="{y + 5}">{id}</text>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw())
