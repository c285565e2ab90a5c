"""What a JOIN shows: that its writer's database went back, or that it is a repetition (docs/design.md 3). Pure."""

from zlib import crc32

import msgspec

from tidemark.streaming.core.outcome import Sign
from tidemark.streaming.core.writers import HeldWriters, Mark, WriterState

_NONE_HELD = HeldWriters()


def evidence_of(mark: Mark) -> int:
    """What a JOIN says, in 32 bits and never 0: a JOIN that is sent again says the same.

    Without `told`, which a relay that repeats the JOIN reads anew.
    """
    return crc32(msgspec.msgpack.encode((mark.id, mark.unseen, mark.timeline))) or 1


def went_back(
    writer: WriterState | None, held: HeldWriters, mark: Mark, timeline: int, database: str | None
) -> Sign | None:
    """What in a JOIN shows that IDs beyond `mark.stands` may be given out again, if it was not said before.

    A JOIN below the linear position, or below another writer's position, shows nothing: it read what was allocated
    before the others went on. Nor does the JOIN of a writer that had not joined in this timeline: it went back with the
    others.

    Args:
        writer: the writer that joins, as it was; None if it never joined.
        held: incarnations that have not joined.
        timeline: the stream's.
        database: the history that the stream's newest JOIN named; None if it is not known.
    """
    if _has_another_database(mark, database):
        return "database"
    earlier = (held[it].chain for it in held.of(mark.writer) if it[1] < mark.epoch)
    if any(chain.pending_beyond(mark.stands) for chain in earlier):
        return "position"
    if writer is None or writer.timeline < timeline:
        return None
    if mark.stands < writer.reach:
        return "position"
    return "start" if _has_another_start(writer, mark) else None


def is_repeated(writer: WriterState, mark: Mark, timeline: int, database: str | None) -> bool:
    """Whether a JOIN is of the epoch in which its writer lives and contradicts nothing that the epoch's JOIN said.

    Two starts that share an epoch show that the database went back: epochs rise (docs/design.md 4). If the evidence of
    the epoch's JOIN is not known (an operator began the epoch, nobody joined, or an older Tidemark wrote the state),
    only another database or another start contradicts it.
    """
    if mark.epoch != writer.epoch:
        return False
    if mark.forced or writer.joined == evidence_of(mark):
        return True
    if writer.joined:
        return writer.timeline == timeline and went_back(writer, _NONE_HELD, mark, timeline, database) is None
    if mark.timeline is None or mark.timeline.start == writer.start:
        return True
    return not (_has_another_database(mark, database) or _has_another_start(writer, mark))


def _has_another_database(mark: Mark, database: str | None) -> bool:
    return (
        mark.timeline is not None
        and None not in (database, mark.timeline.database)
        and database != (mark.timeline.database)
    )


def _has_another_start(writer: WriterState, mark: Mark) -> bool:
    """Whether the start is neither the writer's last one nor the one that follows it, in an epoch of its own."""
    if mark.timeline is None or writer.start in (None, mark.timeline.start):
        return False
    is_next = writer.start == mark.timeline.after
    return not is_next or (mark.epoch == writer.epoch and writer.joined != 0)
