"""What one record does to a state of a small world, and what it may do (docs/design.md 2 and 3)."""

from collections import Counter
from dataclasses import dataclass, field

from tests.streaming.builders import CONTROL, EDGES, FACTS, STREAM, Record, packets, sent
from tests.streaming.small_world import WRITERS, Size, World
from tidemark.streaming.core.batch import StreamBatch
from tidemark.streaming.core.chain import Chain
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.core.store import AcceptedRecord, StreamInput
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writers import WriterState
from tidemark.streaming.values.limits import Bounds, Evidence
from tidemark.streaming.wire.runs import Marker, RunColumns

NOW = 1000  # of every batch, so that states differ by what happened and not by when
BOUNDS = Bounds()
Totals = Counter[tuple[str, ...]]


class Broken(AssertionError):
    """Something that must hold does not; the text ends with the records that led there."""


@dataclass(frozen=True)
class Standing:
    """What a state says: the line, and of each writer its position, how far its chain is in the timeline, and the spans
    that wait, as `(prev, id, evidence)`.
    """

    linear: int
    positions: dict[str, int]
    chains: dict[str, int]
    spans: dict[str, list[tuple[int, int, Evidence]]]

    @property
    def brief(self) -> tuple[int, ...]:
        """The line and the positions."""
        return self.linear, *self.positions.values()

    def has_settled(self, name: str, id: int) -> bool:
        return id <= self.positions[name] or any(prev < id <= high for prev, high, _ in self.spans[name])

    @classmethod
    def of(cls, stream: StreamState) -> "Standing":
        found = {name: stream.writers.get(name) or WriterState(0, Chain()) for name in WRITERS}
        return cls(
            stream.linear.position,
            {name: it.position for name, it in found.items()},
            {name: it.chain.position for name, it in found.items()},
            {name: [(span.prev, span.id, span.evidence) for span in it.chain.pending] for name, it in found.items()},
        )


@dataclass(frozen=True)
class Fed:
    """What a batch did."""

    core: bytes
    effects: StreamEffects
    rejected: tuple[str, ...]

    @property
    def totals(self) -> Totals:
        """All that must not depend on how records are cut into batches."""
        found: Totals = Counter({("outcome", outcome): count for outcome, count in self.effects.counts.items()})
        found.update(("rejected", reason) for reason in self.rejected)
        for move in self.effects.advances:
            for how in ("facts", "empty", "unseen", "skipped"):
                found[how, move.writer] += getattr(move, how)
        for late in self.effects.late:
            found["late", late.writer, late.why] += late.facts
        found.update(("timeline", it.writer, it.why) for it in self.effects.timelines)
        return +found


@dataclass
class Core:
    """The state machine, asked each thing once.

    `briefs` numbers the line and positions of each state. Of the ranges that writers declared empty it is made to
    forget those that are passed: they tell contradictions only, of which writers that keep the contract send none.
    """

    fed: dict[tuple[bytes, Record], bytes] = field(default_factory=dict)
    standings: dict[bytes, Standing] = field(default_factory=lambda: {b"": Standing.of(StreamState())})
    briefs: dict[bytes, int] = field(default_factory=lambda: {b"": 0})
    facts: dict[tuple[Record, int], list[AcceptedRecord]] = field(default_factory=dict)
    _numbers: dict[tuple[int, ...], int] = field(default_factory=lambda: {(0, 0, 0): 0}, init=False)

    def batch(self, core: bytes, records: tuple[Record, ...]) -> Fed:
        batch = StreamBatch(STREAM, core or None, NOW, BOUNDS)
        inbox = StreamInput(RunColumns.of([]))
        for offset, record in enumerate(records):
            if record.control:
                inbox.control.extend(((CONTROL, 0), it) for it in self._facts(record, offset) if isinstance(it, Marker))
            else:
                inbox.rows_and_markers[FACTS, 0].extend(self._facts(record, offset))
        batch.feed(inbox)
        for writer in batch.stream.writers.values():
            writer.chain.empty_ranges = writer.chain.empty_ranges.above(writer.position)
            writer.last_seen = 0  # for people: no position depends on it
        for held in batch.stream.unjoined.values():
            held.last_seen = 0
        effects = batch.finish()
        core = batch.encoded.whole
        if core not in self.standings:
            stands = self.standings[core] = Standing.of(batch.stream)
            self.briefs[core] = self._numbers.setdefault(stands.brief, len(self._numbers))
        return Fed(core, effects, tuple(sorted(refusal.reason for _, _, refusal in batch.rejections)))

    def _facts(self, record: Record, offset: int) -> list[AcceptedRecord]:
        key = record, offset
        if (known := self.facts.get(key)) is None:
            (packet,) = packets(sent([record], offset))
            known = self.facts[key] = [*packet.runs, *packet.markers]
        return known


@dataclass(frozen=True)
class Look:
    """One record, fed alone: what it may do and what it may not."""

    size: Size
    world: World
    heard: int
    record: Record
    before: Standing
    after: Standing

    def check(self, fed: Fed) -> None:
        """What concerns the record and the state alone. Raises Broken."""
        self._joins(fed)
        self._counts(fed)
        self._begins_a_timeline(fed)
        if self.world.acts < self.size.acts:
            self._must(self.world.history > 1 or self.record.kind in EDGES or not fed.effects.late, "a skip is late")
        elif self.record.kind == "JOIN" and self.world.history > 1:
            self._takes_back(fed)
        else:
            self._proves(fed)

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            raise Broken(f"{what}: {self.before} -> {self.after}")

    def _joins(self, fed: Fed) -> None:
        """Rules 2 and 3."""
        before, after = self.before.positions, self.after.positions
        self._must(self.before.linear <= self.after.linear, "the line goes back")
        self._must(all(before[name] <= after[name] for name in WRITERS), "a position goes back")
        moved = {name: (before[name], after[name]) for name in WRITERS if before[name] != after[name]}
        told = {move.writer: (move.prev, move.id) for move in fed.effects.advances}
        self._must(told == moved, "the advances are not what moved")

    def passes_nothing_open(self) -> None:
        """Rule 1: nothing that is in flight, and nothing that will be given out.

        Where nothing tells that a database went back, this cannot be had (docs/decisions/0006-timelines.md).
        """
        world, before, after = self.world, self.before, self.after
        if not self.size.told and world.history > 1:
            return
        for id in range(max(before.linear, world.heard_of) + 1, after.linear + 1):
            self._must(world.may_be_passed(id), "the line passes what will be given out")
        for name, id in world.in_flight():
            if dict(world.running())[name].is_signed(id):
                continue
            self._must(not before.linear < id <= after.linear, f"the line passes {id}, which {name} has in flight")
            passed = before.positions[name] < id <= after.positions[name]
            self._must(not passed, f"{name}'s position passes {id}, which it has in flight")
        for name, process in world.running():
            if before.positions[name] < after.positions[name] and not world.has_gone_back_behind(process):
                strange = range(max(before.positions[name], world.head) + 1, after.positions[name] + 1)
                self._must(all(map(process.is_signed, strange)), f"{name}'s position passes what will be given out")

    def _counts(self, fed: Fed) -> None:
        """Rules 5 and 10: applied; or where the database went back late, if it was passed before, or others have it."""
        record, counts, late = self.record, fed.effects.counts, fed.effects.late
        edge, completes = record.kind in EDGES, record.kind in ("RDATA", "VOID")
        outcome = "applied"
        if (self.world.history > 1 or self.world.acts < self.size.acts) and edge:
            passed = self.before.has_settled(record.writer, record.id)
            if passed or (completes and (record.id <= self.before.linear or (late and self._is_lost))):
                outcome = "late" if completes else "duplicate"
            elif not self.size.told and late:
                outcome = "late"
        self._must(not fed.rejected, f"a {record.kind} is rejected")
        if record.control and "duplicate" in counts:
            outcome = "duplicate"
        kept = {outcome: count for outcome, count in counts.items() if outcome != "forgotten"}
        self._must(kept == {outcome: 1}, f"a {record.kind} is not {outcome}")
        if edge:
            told = [(it.writer, it.facts) for it in late if it.prev < record.id <= it.id]
            expected = [(record.writer, int(record.kind == "RDATA"))] if outcome == "late" else []
            self._must(told == expected and len(late) == len(told), "what is late is not what is told")

    @property
    def _is_lost(self) -> bool:
        """Its writer has not joined since the database went back."""
        return self.world.has_gone_back_behind(dict(self.world.running())[self.record.writer])

    def _begins_a_timeline(self, fed: Fed) -> None:
        """Where the name of the database's history shows it, and nowhere else."""
        if self.size.told:
            begun = 0 < self.heard < self.world.heard
            self._must(len(fed.effects.timelines) == begun, f"{'no' if begun else 'a'} timeline begins")

    def _takes_back(self, fed: Fed) -> None:
        """What waited beyond the JOIN is late where it may have facts, as many as those."""
        late = [(it.writer, it.prev, it.id, it.facts) for it in fed.effects.late]
        expected = []
        for name in WRITERS:
            if name == self.record.writer or fed.effects.timelines:
                for prev, id, evidence in self.before.spans[name]:
                    low = max(prev, self.record.id)
                    if low < id and (evidence.facts or evidence.unseen):
                        expected.append((name, low, id, min(evidence.facts, id - low)))
        self._must(sorted(late) == sorted(expected), f"late is not {expected}")
        for move in fed.effects.advances:
            self._must(max(move.evidence.counts) <= move.id - move.prev, "an advance has more than its width")

    def _proves(self, fed: Fed) -> None:
        """Every count of an advance, and of a span that waits: those of its parts, and the record's own."""
        record, own = self.record, self._own_evidence(fed)
        told = dict.fromkeys(WRITERS, Evidence())
        for move in fed.effects.advances:
            told[move.writer] = move.evidence
        for name in WRITERS:
            settled = [(self.before.positions[name], self.after.positions[name], told[name]), *self.after.spans[name]]
            for prev, id, evidence in settled:
                parts = [span[2] for span in self.before.spans[name] if prev < span[1] <= id]
                expected = sum(parts, Evidence())
                if name == record.writer and prev < record.id <= id:
                    expected += own
                self._must(evidence == expected.at_most(id - prev), f"({prev}, {id}] of {name} was {expected}")

    def _own_evidence(self, fed: Fed) -> Evidence:
        record = self.record
        if fed.effects.counts.get("late") and not (self._is_lost or record.id > self.before.positions[record.writer]):
            return Evidence()
        if record.kind == "RDATA":
            return Evidence(facts=1)
        if record.kind == "VOID":
            return Evidence(empty=1)
        low = self.before.positions[record.writer]
        width = record.id - (max(record.prev, low) if record.kind == "POSITION" else low)
        if record.kind != "POSITION":
            width -= sum(
                min(id, record.id) - prev for prev, id, _ in self.before.spans[record.writer] if prev < record.id
            )
        return Evidence(empty=width)
