"""What moved a stream, as JSON: the answers that stand for the events of a follower (`sinks.reader.events`)."""

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tidemark.app.behind import BehindAnswer, Name, StreamId, behind_answer, moment
from tidemark.app.read_side.postgres_reader import Details
from tidemark.app.sidecar.answers import BlockerAnswer, blocker_answer
from tidemark.sinks.reader import events

Count = Annotated[int, Meta(ge=0)]


class AdvanceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="advance"):
    """The position of `writer` moved over `(prev, id]`. The counts are of `(claimed, id]`, the same range but where the
    reader stood in the middle of it."""

    stream: Name
    writer: Name
    epoch: Count
    prev: StreamId
    id: StreamId
    claimed: StreamId
    facts: Annotated[int, Meta(ge=0, description="IDs with a fact.")]
    empty: Annotated[int, Meta(ge=0, description="IDs that their writer declared void, or announced.")]
    unseen: Annotated[int, Meta(ge=0, description="IDs settled by a join: may hold facts that nobody announced.")]
    skipped: Annotated[int, Meta(ge=0, description="IDs that an operator skipped.")]
    linear: Annotated[StreamId, Meta(description="The linear position after the batch.")]
    batch: Count
    time: Annotated[datetime, Meta(description="Of the batch.")]


class RereadAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reread"):
    """`(prev, id]` of `writer` is complete, and its evidence is gone: read the table. Without a writer: of every writer
    but those in `besides`."""

    stream: Name
    writer: Name | None
    prev: StreamId
    id: StreamId
    besides: list[Name]


class LateAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="late"):
    """Completions in `(prev, id]` that came after the range was settled without them: repair what was read."""

    stream: Name
    number: Count
    writer: Name
    epoch: Count
    prev: StreamId
    id: StreamId
    facts: Count
    why: Annotated[
        str,
        Meta(
            description="`skipped` by an operator; the source `regressed`; `final`: the linear position had passed the"
            " ID, or another writer had completed it; `announced` as empty by its own writer."
        ),
    ]
    batch: Count
    time: datetime


class LateLostAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="late-lost"):
    """Late completions numbered `(after, number]` are not listed any more."""

    stream: Name
    after: Count
    number: Count


class LinearMoveAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="linear"):
    """The linear position moved, with all moves of writers before this one or without any."""

    stream: Name
    linear: StreamId


Move = AdvanceAnswer | RereadAnswer | LateAnswer | LateLostAnswer


class AdvancesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`next` is where the next page begins; `complete`: nothing more was published when this was read."""

    stream: Name
    moves: list[Move]
    next: str
    complete: bool


class PutOffAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Records of `writer` found no room, since too much of it is pending: they wait in Kafka and come again as it
    shrinks."""

    writer: Name
    epoch: Count


class RecallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Records of `writer` that were put off and come again. What is `gone` from Kafka does not, and what is open waits
    for the writer's next JOIN."""

    writer: Name
    since: datetime
    gone: Annotated[int, Meta(ge=0, description="How many records that may be, at most.")]
    problem: Annotated[str | None, Meta(description="What hinders it, or why they are gone; for people.")]


class GapsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every open range and writer that never joined, longest first. `total` counts those that were cut off too."""

    stream: Name
    gaps: list[BlockerAnswer]
    behind: Annotated[
        BehindAnswer | None,
        Meta(description="Who holds the linear position below what is allocated, gap or no gap; null: nobody does."),
    ]
    open_transactions: Annotated[
        dict[str, list[str]], Meta(description="Who holds the open IDs of a writer, where it tells.")
    ]
    total: Count
    put_off: list[PutOffAnswer]
    recalled: list[RecallAnswer]
    age_seconds: Annotated[float, Meta(ge=0)]


def gaps_answer(stream: str, details: Details, limit: int, age: float) -> GapsAnswer:
    return GapsAnswer(
        stream=stream,
        gaps=[blocker_answer(gap) for gap in details.gaps[:limit]],
        behind=behind_answer(details.behind),
        open_transactions=dict(sorted(details.transactions.items())),
        total=len(details.gaps),
        put_off=[PutOffAnswer(writer=writer, epoch=epoch) for writer, epoch in details.put_off],
        recalled=[
            RecallAnswer(writer=it.writer, since=it.since, gone=it.gone, problem=it.problem) for it in details.recalls
        ],
        age_seconds=round(max(0.0, age), 3),
    )


def move_answer(stream: str, event: events.Event) -> Move:
    match event:
        case events.Advance():
            return AdvanceAnswer(
                stream=stream,
                writer=event.writer,
                epoch=event.epoch,
                prev=event.prev,
                id=event.id,
                claimed=event.claimed,
                **msgspec.structs.asdict(event.evidence),
                linear=event.linear,
                batch=event.batch,
                time=moment(event.time),
            )
        case events.Reread():
            return RereadAnswer(
                stream=stream, writer=event.writer, prev=event.prev, id=event.id, besides=sorted(event.besides)
            )
        case events.Late():
            return LateAnswer(
                stream=stream,
                number=event.number,
                writer=event.writer,
                epoch=event.epoch,
                prev=event.prev,
                id=event.id,
                facts=event.facts,
                why=event.why,
                batch=event.batch,
                time=moment(event.time),
            )
        case events.LateLost():
            return LateLostAnswer(stream=stream, after=event.after, number=event.number)
        case events.LinearMove():
            raise AssertionError("only writers' moves are followed")
