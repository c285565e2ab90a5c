"""What was said on a channel of each writer's position, by whichever sidecar spoke, and what to say next. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from tidemark.app.lines.announcer import Announcement
from tidemark.app.lines.commands import Position, Rdata
from tidemark.app.lines.rows import Writer
from tidemark.sinks.reader.order import beyond, farther


class Told:
    """`positions`: how far each writer was told already. Whoever hears all of it misses nothing and hears nothing
    twice, although the sidecar that speaks now may stand before or behind the one that spoke first."""

    def __init__(self, positions: Mapping[Writer, int]) -> None:
        self._positions = dict(positions)

    def stand(self, standing: Iterable[Position]) -> list[Position]:
        """Where every writer is, for all who are below; from then on they were told so."""
        said = []
        for position in standing:
            writer = position.stream, position.writer
            id = farther(position.id, self._positions.get(writer, position.id))
            self._positions[writer] = id
            said.append(Position(*writer, id, id))
        return said

    def next(self, announcement: Announcement) -> Sequence[Position | Rdata]:
        """How to say it to those who were told what we know they were told; nothing where they are further."""
        writer = announcement.stream, announcement.writer
        here = self._positions.get(writer, announcement.prev)
        if not beyond(announcement.id, here):
            return ()
        self._positions[writer] = announcement.id
        return announcement.commands if here == announcement.prev else (announcement.fetch,)
