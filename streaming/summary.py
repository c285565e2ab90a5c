"""A stream for people: what is pending, which gap is the oldest, whom the line waits for. Pure."""

from streaming.effects import Blocker, Summary
from streaming.positions import Stream


def summarize(stream: Stream) -> Summary:
    """IDs come out signed."""
    sign = -1 if stream.direction < 0 else 1
    blockers = [
        Blocker(name, writer.epoch, sign * low, sign * top, since, unknown=False)
        for name, writer in stream.writers.items()
        for low, top, since in writer.chain.gaps()
    ]
    strangers = [Blocker(name, epoch, 0, 0, held.since, unknown=True) for (name, epoch), held in stream.held.items()]
    chains = [writer.chain for writer in stream.writers.values()] + [held.chain for held in stream.held.values()]
    return Summary(
        pending=sum(span.edges for chain in chains for span in chain.pending),
        gaps=len(blockers),
        oldest=min([*blockers, *strangers], key=lambda blocker: (blocker.since, blocker.writer), default=None),
        unknown=sorted(f"{name}/{epoch}" for name, epoch in stream.held),
        completed=len(stream.line.completed),
    )
