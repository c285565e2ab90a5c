"""How an epoch begins, and how what is open is settled without a record of its own. Pure; changes what it is given."""

from tidemark.streaming.chain import NOTHING, Chain, How
from tidemark.streaming.changes import Changes, LateRange, Regress
from tidemark.streaming.intervals import EMPTY, Intervals
from tidemark.streaming.line import Line
from tidemark.streaming.writers import Held, Incarnation, Mark, Writer


def begin(
    writers: dict[str, Writer], held: dict[Incarnation, Held], line: Line, mark: Mark, changes: Changes
) -> tuple[Writer, int | None]:
    """Start the epoch of a JOIN. Gives the writer, and the ID of a RETIRE that waited for this JOIN.

    What earlier epochs completed up to the JOIN stays as evidence; what they left open there is settled by it.
    What they completed beyond it was taken back with the writer's database (DESIGN 3): it is late, and IDs that
    were complete beyond the JOIN may come again, so that the line forgets them and waits for them.
    """
    writer = writers.setdefault(mark.writer, Writer(mark.epoch, Chain()))
    chain, position = writer.chain, writer.chain.position
    taken_back = [(writer.epoch, span) for span in chain.cut_above(mark.id)]
    retire, early = None, None
    for incarnation in sorted(key for key in held if key[0] == mark.writer and key[1] <= mark.epoch):
        before = held.pop(incarnation)
        if incarnation[1] < mark.epoch:
            taken_back.extend((incarnation[1], span) for span in before.chain.cut_above(mark.id))
        else:
            retire, early = before.retire, before.chain
            taken_back.extend((mark.epoch, span) for span in before.chain.within(mark.id, position))
        chain.adopt(before.chain)
        writer.doubt |= before.doubt
    writer.epoch, writer.retired, writer.late, writer.regressed, writer.again = mark.epoch, None, EMPTY, 0, None
    if mark.id < position:
        writer.late, writer.regressed = Intervals.of([(mark.id, position)]), position
        writer.again = Chain(mark.id)
        if early is not None:
            writer.again.adopt(early)
    if taken_back or mark.id < position:
        changes.regressed.append(Regress(mark.writer, mark.epoch, mark.id, position))
        changes.counts["forgotten"] += line.forget_above(mark.id)
    for of_epoch, span in taken_back:
        late = LateRange(mark.writer, of_epoch, span.prev, span.id, span.evidence.facts, "regressed")
        changes.late.append(late)
    settle(writer, 0, mark, "joined", changes)
    writer.doubt = False
    return writer, retire


def settle(writer: Writer, prev: int, mark: Mark, how: How, changes: Changes) -> Intervals:
    """Settle what is open in `(prev, mark.id]`; gives it. What an operator settles is late from then on."""
    open_ = Intervals.of(writer.chain.missing(prev, mark.id))
    refused = mark.id if writer.doubt else writer.chain.refused
    for low, high in open_:
        writer.chain.settle(low, high, mark.evidence(low, high, refused), 0, how, changes.now)
    if writer.again is not None:
        for low, high in writer.again.missing(prev, mark.id):
            writer.again.settle(low, high, NOTHING, 0, how, changes.now)
        writer.caught_up()
    if mark.forced:
        writer.late = writer.late.union(open_)
    changes.touch(mark.writer, mark.time)
    return open_
