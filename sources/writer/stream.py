"""What a writer writes to: a stream, its sequence, and whether its IDs go up or down."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tidemark.streaming.errors import BadSetting
from tidemark.streaming.wire import is_name

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Stream:
    """`sequence` (may have a schema: `shop.orders_id_seq`) is `<name>_id_seq` where it is not given."""

    name: str
    sequence: str = ""
    direction: Direction = "forward"

    def __post_init__(self) -> None:
        if not self.sequence:
            object.__setattr__(self, "sequence", f"{self.name}_id_seq")

    @property
    def sign(self) -> int:
        return 1 if self.direction == "forward" else -1


def named(streams: Iterable[str | Stream], instance: str, direction: Direction) -> tuple[Stream, ...]:
    """The streams, those given by name alone in this direction. Raises `BadSetting` for a name that Kafka may not see.

    Checked here, because a writer of a bad name would only find its facts among the dead letters.
    """
    found = tuple(
        each if isinstance(each, Stream) else Stream(each, direction=direction)
        for each in ([streams] if isinstance(streams, str) else streams)
    )
    for what, name in [("instance", instance), *(("stream", each.name) for each in found)]:
        if not is_name(name):
            raise BadSetting(what, f"{name[:256]!r} is not 1 to 255 characters without white space or controls")
    if len({each.name for each in found}) < len(found) or not found:
        raise BadSetting("streams", "name each stream once, and at least one")
    return found
