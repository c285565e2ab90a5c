"""Linear lag in answers: of `tidemark status` and of the sidecar."""

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tidemark.streaming.core.effects import BlockReason, LinearLag

StreamId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]


class LagCauseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A writer that blocks the linear position below the allocated position, with a gap or without one."""

    writer: Name
    epoch: Annotated[int, Meta(ge=0)]
    reason: Annotated[
        BlockReason,
        Meta(
            description="`transaction`: the writer reported an open one; `gap`: it completed IDs above open ones;"
            " `silent`: it has sent nothing beyond `position`; `unknown`: it never joined."
        ),
    ]
    position: Annotated[StreamId | None, Meta(description="Position of the writer; null if it never joined.")]
    since: Annotated[
        datetime | None, Meta(description="Since when it blocks the linear position; null if that was not noted.")
    ]
    last_seen: Annotated[
        datetime | None, Meta(description="When the pipeline read its newest record; null if none was noted.")
    ]


class LinearLagAnswer(msgspec.Struct, frozen=True):
    """The linear position is below what is allocated. `blockers` has the ten lowest of `blocker_count` writers."""

    ids: Annotated[int, Meta(ge=0, description="How far, in IDs.")]
    since: Annotated[
        datetime | None, Meta(description="When IDs beyond it were first seen; null if that was not noted.")
    ]
    blockers: list[LagCauseAnswer]
    blocker_count: Annotated[int, Meta(ge=0)]


def lag_answer(found: LinearLag | None) -> LinearLagAnswer | None:
    if found is None:
        return None
    blockers = [
        LagCauseAnswer(
            writer=it.writer,
            epoch=it.epoch,
            reason=it.reason,
            position=None if it.reason == "unknown" else it.position,
            since=None if it.since is None else moment(it.since),
            last_seen=last_seen(it.seen),
        )
        for it in found.blockers
    ]
    return LinearLagAnswer(found.ids, None if found.since is None else moment(found.since), blockers, found.count)


def last_seen(milliseconds: int) -> datetime | None:
    """None if none of its records was noted."""
    return moment(milliseconds) if milliseconds else None


def moment(milliseconds: int) -> datetime:
    """The time from milliseconds since 1970."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
