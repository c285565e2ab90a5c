"""Who holds a linear position back, as `tidemark status` and the sidecar tell programs."""

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tidemark.streaming.core.effects import BlockReason, LinearLag

StreamId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]


class HolderAnswer(msgspec.Struct, frozen=True, kw_only=True):
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


class BehindAnswer(msgspec.Struct, frozen=True):
    """The linear position is below what is allocated. Of `holders` writers the ten furthest behind are named."""

    ids: Annotated[int, Meta(ge=0, description="How far, in IDs.")]
    since: Annotated[
        datetime | None, Meta(description="When IDs beyond it were first seen; null where that was not noted.")
    ]
    held_by: list[HolderAnswer]
    holders: Annotated[int, Meta(ge=0)]


def behind_answer(found: LinearLag | None) -> BehindAnswer | None:
    if found is None:
        return None
    held_by = [
        HolderAnswer(
            writer=it.writer,
            epoch=it.epoch,
            reason=it.reason,
            position=None if it.reason == "unknown" else it.position,
            since=None if it.since is None else moment(it.since),
            last_seen=last_seen(it.seen),
        )
        for it in found.blockers
    ]
    return BehindAnswer(found.ids, None if found.since is None else moment(found.since), held_by, found.count)


def last_seen(milliseconds: int) -> datetime | None:
    """None where none of its records was noted."""
    return moment(milliseconds) if milliseconds else None


def moment(milliseconds: int) -> datetime:
    """Of milliseconds since 1970."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
