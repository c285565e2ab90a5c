"""Who holds a stream's linear position below what is allocated, with a gap or without one. Pure.

The line waits for each active writer that has not settled the next ID, and for each that never joined: a gap shows
only where its writer went on. Asked of streams that a batch touched, and read whole by people; costs nothing where the
line has come as far as IDs are given out.
"""

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from tidemark.streaming.core.stream import StreamState  # numpy's, which a service that only reads does not have
    from tidemark.streaming.core.writer_codec import Straggler

HoldReason = Literal["transaction", "gap", "silent", "unknown"]

NAMED = 10  # holders of one stream, the furthest behind
HELD_AFTER = 10.0  # seconds that a line may wait before anybody is told: what a transaction takes is its own business


class Holder(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`reason`: `transaction` (open, as the writer says), `gap` (it went on above open IDs), `silent` (it has told
    nothing beyond `position`) or `unknown` (it never joined).

    `since` (ms): the longest open gap, the first record of an unknown writer, else since when the line is behind; None
    where that is not known. `seen` is the time (ms) of the batch that read the writer's newest record: its last sign of
    life, 0 if none was noted.
    """

    writer: str
    epoch: int
    reason: HoldReason
    position: int
    since: int | None
    seen: int


class Behind(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The line is `ids` below what is allocated; IDs that it has not passed are given out since `since` (ms, by the
    batch that saw them first, or earlier). `holders` are those furthest behind of `count`, unknown writers first.
    """

    ids: int
    since: int | None
    holders: list[Holder]
    count: int


def is_brief(since: int | None, now: float) -> bool:
    """Whether what waits since then (ms) waits at `now` (s) for no longer than a transaction may take."""
    return since is not None and now - since / 1000 < HELD_AFTER


def behind(stream: "StreamState") -> Behind | None:
    """None where the line has come as far as IDs are given out, and no writer is unknown. IDs come out signed."""
    ids = stream.allocated - stream.linear.position
    if ids <= 0 and not stream.unjoined:
        return None
    unknown = sorted((held.since, name, epoch, held.seen) for (name, epoch), held in stream.unjoined.items())
    lowest, count = stream.writers.stragglers(stream.linear.position, NAMED)
    heads = stream.linear.heads
    sinces = [heads[0][1]] if heads else [*(it[0] for it in unknown), *(it.owing for it in lowest if it.owing)]
    since = min(sinces, default=None)
    holders = [Holder(name, epoch, "unknown", 0, first, seen) for first, name, epoch, seen in unknown[:NAMED]]
    holders += [_holder(stream, it, since) for it in lowest]
    return Behind(ids, since, holders[:NAMED], len(unknown) + count)


def _holder(stream: "StreamState", it: "Straggler", since: int | None) -> Holder:
    reason: HoldReason = "gap" if it.owing else "silent"
    if it.name in stream.transactions:
        reason = "transaction"
    return Holder(it.name, it.epoch, reason, stream.direction.signed(it.position), it.owing or since, it.seen)
