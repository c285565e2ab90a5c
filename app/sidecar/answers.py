"""What the sidecar answers: the types of its JSON, from which `/openapi.json` is made.

IDs are signed 64-bit integers: a client that reads JSON numbers as floating point loses those beyond 2^53. Field
descriptions in `Meta` are the public documentation.
"""

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

StreamId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Age = Annotated[float, Meta(ge=0, description="Seconds since this was read from a server.")]
State = Annotated[
    Literal["known", "recovering"],
    Meta(description="`recovering`: the stream exists, and where it stands is not known yet. It is never told as 0."),
]
Source = Annotated[
    Literal["redis", "postgres", "memory"],
    Meta(description="Who said so; `memory`: this process, from an earlier answer, because neither server answers."),
]


class Blocker(msgspec.Struct, frozen=True, kw_only=True):
    """`writer` owes the IDs in `(low, top]`; without a range, it never joined and so holds back the line."""

    writer: Name
    epoch: Annotated[int, Meta(ge=0)]
    low: StreamId | None
    top: StreamId | None
    since: Annotated[datetime, Meta(description="When this gap was first seen.")]


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stream stands. What comes from Postgres alone is null while it was never reached: `epochs`, `retired`,
    `pending`, `blockers`."""

    stream: Name
    state: State
    linear: Annotated[StreamId | None, Meta(description="Every ID up to here is complete, whoever wrote it.")]
    vector: Annotated[
        dict[str, StreamId], Meta(description="Writer to position: every ID of the writer up to there is complete.")
    ]
    token: Annotated[str | None, Meta(description="Both in one text: m7~web.9.")]
    epochs: dict[str, int] | None
    retired: list[str] | None
    pending: Annotated[int | None, Meta(description="Completed IDs held back by a gap.")]
    blockers: Annotated[list[Blocker] | None, Meta(description="Who holds a position back now, longest first.")]
    source: Source | None
    age_seconds: Age | None
    details_age_seconds: Age | None


class Streams(msgspec.Struct, frozen=True):
    streams: list[Stream]


class Health(msgspec.Struct, frozen=True):
    """`problems` are for people. Ready with problems: one server is away and the other one answers."""

    ready: bool
    problems: list[str]


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error, as of RFC 9457."""

    type: Annotated[str, Meta(description="What went wrong, for programs.")]
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: Annotated[str, Meta(description="What went wrong here and what to do, for people.")]
    stream: Annotated[Stream | None, Meta(description="Where the stream stands, where that helps.")] = None
