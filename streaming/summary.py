"""A stream for people: what is pending, which gap is the oldest, whom the line waits for. Pure."""

from tidemark.streaming.effects import Blocker, Summary
from tidemark.streaming.positions import Stream


def blockers(stream: Stream) -> list[Blocker]:
    """Everything that holds a position of `stream` back, longest first. IDs come out signed."""
    sign = -1 if stream.direction < 0 else 1
    gaps = [
        Blocker(name, writer.epoch, sign * low, sign * top, since, unknown=False)
        for name, writer in stream.writers.items()
        for chain in (writer.chain, writer.again)
        if chain is not None
        for low, top, since in chain.gaps()
    ]
    strangers = [Blocker(name, epoch, 0, 0, held.since, unknown=True) for (name, epoch), held in stream.held.items()]
    return sorted([*gaps, *strangers], key=lambda blocker: (blocker.since, blocker.writer))


def summarize(stream: Stream) -> Summary:
    found = blockers(stream)
    chains = [writer.chain for writer in stream.writers.values()] + [held.chain for held in stream.held.values()]
    return Summary(
        pending=sum(span.edges for chain in chains for span in chain.pending),
        gaps=sum(not blocker.unknown for blocker in found),
        oldest=next(iter(found), None),
        unknown=sorted(f"{name}/{epoch}" for name, epoch in stream.held),
        completed=len(stream.line.completed),
        awaited=_awaited(stream),
    )


def _awaited(stream: Stream) -> str | None:
    active = {name: writer.floor for name, writer in sorted(stream.writers.items()) if writer.retired is None}
    if stream.held or not active or max(active.values()) <= stream.line.position:
        return None
    return min(active, key=lambda name: active[name])
