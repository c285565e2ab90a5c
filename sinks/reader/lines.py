"""What is known of the IDs that the linear position passes: the evidence of the writers' advances. Pure."""

from collections.abc import Iterator, Mapping

from tidemark.sinks.reader.events import Advance, Line, Reread
from tidemark.sinks.reader.order import beyond


class Lines:
    """Turns moves of the linear position into `Line` events.

    An ID may be passed by the line before its writer's position is there, and by writers that we never heard of while
    we were away. So `known` is claimed only for a range that lies beyond all that stood when we began to watch, that
    every writer has passed, and of whose advances none has lost its evidence.
    """

    def __init__(self, linear: int) -> None:
        self.linear = linear
        self._watched_from: int | None = None
        self._events: list[Advance | Reread] = []

    def note(self, event: Advance | Reread) -> None:
        """A writer's position moved."""
        if beyond(event.id, self.linear):
            self._events.append(event)

    def doubt(self) -> None:
        """Advances may have been missed."""
        self._watched_from = None

    def move(self, linear: int, writers: Mapping[str, int]) -> Iterator[Line]:
        """The line stands at `linear` and the writers at their positions; all their moves so far were noted."""
        if beyond(linear, self.linear):
            touching = [event for event in self._events if beyond(linear, event.prev)]
            known = (
                self._watched_from is not None
                and not beyond(self._watched_from, self.linear)
                and not any(beyond(linear, position) for position in writers.values())
                and not any(isinstance(event, Reread) for event in touching)
            )
            advances = tuple(event for event in touching if isinstance(event, Advance))
            prev, self.linear = self.linear, linear
            self._events = [event for event in self._events if beyond(event.id, linear)]
            yield Line(prev, linear, advances, known)
        if self._watched_from is None:
            self._watched_from = max((linear, *writers.values()), key=abs)
