"""Linear lag: how far a stream's linear position is below the allocated IDs, and which writers block it. Pure.

The linear position waits for each active writer that has not settled the next ID, and for each writer that never
joined. A writer can block it without a gap: a gap shows only after the writer went on. The cost is near zero for a
stream without linear lag. Needs no numpy: services that only read import this module too.
"""

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from tidemark.streaming.core.stream import StreamState  # needs numpy
    from tidemark.streaming.core.writer_codec import Straggler

BlockReason = Literal["transaction", "gap", "silent", "unknown"]

BLOCKERS_MAX = 10
"""Blockers of a stream that are named, the lowest ones."""

BRIEF_WAIT = 10.0
"""Seconds for which a wait is not reported: a transaction may take that long."""


class LinearBlocker(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A writer that blocks the linear position.

    Attributes:
        reason: `transaction` (the writer reported an open transaction), `gap` (it went on above open IDs), `silent` (it
            has sent nothing beyond `position`) or `unknown` (it never joined).
        position: position of the writer's chain; 0 if it never joined.
        since: time (ms) since when the writer blocks: of its oldest gap, or of the first record of an unknown writer;
            otherwise since when there is a linear lag; None if unknown.
        seen: time (ms) of the batch that read the writer's newest record; 0 if unknown.
    """

    writer: str
    epoch: int
    reason: BlockReason
    position: int
    since: int | None
    seen: int


class LinearLag(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How far the linear position is below the allocated IDs.

    Attributes:
        ids: the distance in IDs.
        since: time (ms) of the batch that first saw allocated IDs beyond the linear position, or earlier; None if
            unknown.
        blockers: up to `BLOCKERS_MAX` writers that block the linear position: unknown writers first, then those that
            have the lowest positions.
        count: number of all such writers.
    """

    ids: int
    since: int | None
    blockers: list[LinearBlocker]
    count: int


def is_brief(since: int | None, now: float) -> bool:
    """True if a wait since `since` (ms) is not worth a report at `now` (s): a transaction may take that long."""
    return since is not None and now - since / 1000 < BRIEF_WAIT


def linear_lag(stream: "StreamState") -> LinearLag | None:
    """Return the linear lag of a stream, with signed IDs. None if there is none, and no writer is unknown."""
    ids = stream.allocated - stream.linear.position
    if ids <= 0 and not stream.unjoined:
        return None
    unknown = sorted((writer.since, name, epoch, writer.seen) for (name, epoch), writer in stream.unjoined.items())
    lowest, count = stream.writers.stragglers(stream.linear.position, BLOCKERS_MAX)
    heads = stream.linear.heads
    sinces = (
        [heads[0][1]]
        if heads
        else [*(first for first, *_ in unknown), *(writer.open_since for writer in lowest if writer.open_since)]
    )
    since = min(sinces, default=None)
    blockers = [
        LinearBlocker(name, epoch, "unknown", 0, first, seen) for first, name, epoch, seen in unknown[:BLOCKERS_MAX]
    ]
    blockers += [_blocker(stream, writer, since) for writer in lowest]
    return LinearLag(ids, since, blockers[:BLOCKERS_MAX], len(unknown) + count)


def _blocker(stream: "StreamState", writer: "Straggler", since: int | None) -> LinearBlocker:
    reason: BlockReason = "gap" if writer.open_since else "silent"
    if writer.name in stream.transactions:
        reason = "transaction"
    position = stream.direction.signed(writer.position)
    return LinearBlocker(writer.name, writer.epoch, reason, position, writer.open_since or since, writer.seen)
