"""What a program of this package asks its shell to do, and the answers. Values only.

A program (a generator) decides and never touches a socket or a clock's wait; a shell (`positions` for threads,
`aio` for asyncio) carries out what it asks. So both forms of the library are one piece of logic.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from psycopg.sql import Composed

from tidemark.sinks.patience import Patience
from tidemark.sinks.reader.events import Advance, Late
from tidemark.sinks.reader.place import Place
from tidemark.streaming.errors import Unavailable

LONGEST_WAIT = 1.0  # seconds between two looks: the line may move without an entry on the list (a writer retires)


@dataclass(frozen=True, slots=True)
class Entry:
    """An item of a stream's list of advances in Redis, as it stands there."""

    name: str
    fields: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a shell can carry out, as often as it likes."""


@dataclass(frozen=True, slots=True)
class Look(Ask):
    """Read all keys of `stream` in one transaction, and what its list holds from `after` on; None: from its start."""

    stream: str
    after: Entry | None


@dataclass(frozen=True, slots=True)
class Newest(Ask):
    """Read all keys of `stream` in one transaction, and the newest entry of its list, to look on from there."""

    stream: str


@dataclass(frozen=True, slots=True)
class Glance(Ask):
    """Read the keys of `stream` in one transaction, without its list."""

    stream: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What a `Look`, `Newest` or `Glance` found. `linear` is None where Redis knows nothing of the stream; `head` is
    the highest ID that any record of it named, None where that is not known.

    `entries` of a `Look` begin behind `after`; `joined` tells whether `after` still stands there (always, without
    an `after`). `more` says that the list goes on. `last` names the newest entry of the list that was read.
    """

    linear: int | None
    positions: dict[str, int]
    late: int = 0
    head: int | None = None
    entries: Sequence[Entry] = ()
    joined: bool = True
    more: bool = False
    last: str = "0-0"


@dataclass(frozen=True, slots=True)
class Doorbell(Ask):
    """Return when the list of `stream` goes on behind the entry named `after`, or after `seconds`. No answer."""

    stream: str
    after: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Recall(Ask):
    """What Postgres knows of `stream` beyond `place`. Answered by `Past`, or None where there is no Postgres to ask."""

    stream: str
    place: Place


@dataclass(frozen=True, slots=True)
class Past:
    """`chains` has every writer that Postgres ever heard of: its position, and those of its newest advances up to
    there that are still kept, oldest first. `late`, oldest first, has all late completions after the place's."""

    chains: Mapping[str, tuple[int, Sequence[Advance]]] = field(default_factory=dict)
    late: Sequence[Late] = ()


@dataclass(frozen=True, slots=True)
class Pause(Ask):
    """Wait `seconds` before something is tried again. No answer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Sql(Ask):
    """Run a statement on the session of that role and give its rows, [] where it gives none.

    `place`: the reader's own database, inside its transaction where one is open; `source`: where the backing table
    is read; `primary`: the server that `source` is a replica of.
    """

    role: "Role"
    statement: Composed


@dataclass(frozen=True, slots=True)
class Begin(Ask):
    """Begin a transaction on the reader's own database. No answer."""


@dataclass(frozen=True, slots=True)
class Commit(Ask):
    """Commit it. No answer. After a failure it may have happened."""


@dataclass(frozen=True, slots=True)
class Reset(Ask):
    """Close all database sessions, and with them the transaction that may be open. No answer."""


Role = Literal["place", "source", "primary"]
Row = dict[str, Any]
Answer = Seen | Past | list[Row] | None


def patiently(ask: Ask) -> Generator[Ask, Answer, Answer]:
    """Ask until it does not fail with `Unavailable`, which the shell throws into the program."""
    patience = Patience()
    while True:
        try:
            answer = yield ask
        except Unavailable as problem:
            yield Pause(patience.pause_after(problem))
        else:
            patience.succeeded()
            return answer
