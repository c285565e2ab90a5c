"""Which rows go out with which move: examples, then wild plays through the pipeline's own state machine."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import msgspec
import pytest

from tests.play.cast import Cast
from tests.play.simulation import Simulation
from tests.play.test_core_agrees import NO_BOUNDS, WILD
from tests.streaming.builders import IN_FACTS, packed
from tidemark.app.lines.rows import Announcement, Announcer, RowBuffer, Writer
from tidemark.sinks.reader import events
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.store import States
from tidemark.streaming.values.direction import is_beyond
from tidemark.streaming.values.limits import Evidence
from tidemark.streaming.wire.line_protocol import PositionCommand, RdataCommand
from tidemark.streaming.wire.records import Join, Rdata, Record, Retire, Topic, Void, encode, encode_row, read

BIG = 1 << 30


class RowsPlay:
    """Stream `s` and writer `w`, told in few words."""

    def __init__(self, *, whole: bool = True, limit: int = BIG) -> None:
        announced: dict[Writer, int] = {}
        self.rows = RowBuffer(limit, announced)
        self.announcer = Announcer(self.rows, announced, timeout_seconds=1.0)
        self.rows.begin_read({0: whole, 1: whole}, {})
        self.now = 0.0

    def read(self, *records: Record, partition: int = 0) -> list[str]:
        told: list[Announcement] = []
        for record in records:
            if writer := self.rows.add(partition, record):
                told.extend(self.announcer.retry([writer], self.now))
        return texts(told)

    def move(self, prev: int, id: int, epoch: int = 0, **evidence: int) -> list[str]:
        counted = Evidence(**(evidence or {"facts": abs(id - prev)}))
        moved = events.Advance("w", epoch, prev, id, counted, prev, id, 1, 1)
        return texts(self.announcer.add_advance("s", moved, self.now))

    def wait(self, seconds: float) -> list[str]:
        self.now += seconds
        return texts(self.announcer.announce_timed_out(self.now))


def texts(told: Iterable[Announcement]) -> list[str]:
    return [str(command) for announcement in told for command in announcement.commands]


def fact(id: int, prev: int | None = None, epoch: int = 0, text: str = "") -> Record:
    start = msgspec.UNSET if prev is None else prev
    return Rdata(stream="s", writer="w", epoch=epoch, prev=start, id=id, row=encode_row(text or id))


def part(text: str, epoch: int = 0) -> Record:
    return Rdata(stream="s", writer="w", epoch=epoch, id="batch", row=encode_row(text))


def void(prev: int, id: int, epoch: int = 0) -> Record:
    return Void(stream="s", writer="w", epoch=epoch, prev=prev, id=id)


def join(id: int, epoch: int, *, unseen: bool = False) -> Record:
    return Join(stream="s", writer="w", epoch=epoch, id=id, unseen=unseen)


def standing(at: int = 0, **more: int) -> RowsPlay:
    """Clients stand at `at`."""
    play = RowsPlay(**more)  # type: ignore[arg-type]
    assert texts(play.announcer.catch_up("s", {"w": at})) == [f"POSITION s w {at} {at}"]
    return play


def test_rows_go_out_in_order_when_the_position_passes_them() -> None:
    """They came out of order, and are held back until then; the last number moves clients to the end."""
    play = standing()
    assert play.read(fact(2), fact(1), fact(4)) == []
    assert play.move(0, 2) == ["RDATA s w 1 1", "RDATA s w 2 2"]


def test_several_rows_of_a_fact_have_the_token_batch_but_for_the_last() -> None:
    """A client moves only on the number."""
    play = standing()
    play.read(part("a"), part("b"), fact(1, text="c"))
    assert play.move(0, 1) == ['RDATA s w batch "a"', 'RDATA s w batch "b"', 'RDATA s w 1 "c"']


def test_empty_tail_is_told_by_a_position() -> None:
    """What is void before a fact needs no word; what is void behind the last one does."""
    play = standing()
    play.read(void(0, 1), fact(2), void(2, 5))
    assert play.move(0, 5, facts=1, empty=4) == ["RDATA s w 2 2", "POSITION s w 2 5"]


def test_all_empty_is_one_position_without_waiting_for_kafka() -> None:
    """Its `prev` is the writer's own, so that nobody fetches."""
    assert standing(3).move(3, 9, empty=6) == ["POSITION s w 3 9"]


def test_rows_that_are_late_are_waited_for_a_moment() -> None:
    """Then clients fetch, and rows that still come are dropped; later moves wait their turn."""
    play = standing()
    assert play.move(0, 1) == play.move(1, 2) == []
    assert play.read(fact(1)) == ["RDATA s w 1 1"]
    assert play.wait(0.9) == []
    assert play.wait(0.1) == ["POSITION s w 2 2"]
    assert play.read(fact(2)) == []
    play.read(fact(3))
    assert play.move(2, 3) == ["RDATA s w 3 3"]


def test_what_waits_is_passed_by_where_the_writer_stands() -> None:
    """As when following began anew meanwhile: nothing that was published stays unsaid, nothing is said twice."""
    play = standing()
    assert play.move(0, 1) == play.move(1, 3) == []
    assert texts(play.announcer.catch_up("s", {"w": 2})) == ["POSITION s w 3 3"]
    assert play.read(fact(1)) == play.move(1, 3) == play.wait(2.0) == []


def test_new_writer_is_introduced_before_its_rows() -> None:
    """Clients drop rows of what they were never told a position of."""
    play = RowsPlay()
    play.read(fact(1))
    assert play.move(0, 1) == ["POSITION s w 0 0", "RDATA s w 1 1"]


@pytest.mark.parametrize("evidence", [{"facts": 1, "unseen": 1}, {"facts": 1, "skipped": 1}, {"unseen": 2}])
def test_ids_settled_without_their_rows_make_clients_fetch(evidence: dict[str, int]) -> None:
    """A row that came for such an ID is never sent: the pipeline did not count it."""
    play = standing()
    play.read(fact(1), fact(2))
    assert play.move(0, 2, **evidence) == ["POSITION s w 2 2"]


def test_zombie_has_no_say() -> None:
    """What an epoch sends after its successor joined is not sent on: here its ID was settled as empty."""
    play = standing(1)
    play.read(join(1, 1), fact(2, 1, 1), join(4, 2), fact(3, 2, 1, "zombie"), fact(5, 4, 2))
    assert play.move(1, 5, 2, facts=2, empty=2) == ["RDATA s w 2 2", "RDATA s w 5 5"]


def test_zombie_of_an_epoch_we_never_saw_join_makes_clients_fetch() -> None:
    """We began to read behind the JOIN: which of two claims counts cannot be told, so none is sent."""
    play = standing(1, whole=False)
    play.read(fact(3, 1, 1, "zombie"))
    assert play.move(1, 3, 2) == []
    assert play.wait(1.0) == ["POSITION s w 3 3"]


def test_writer_that_was_set_back_sends_its_new_rows() -> None:
    """What the old epoch completed beyond the JOIN was taken back: the ID comes again with another row."""
    play = standing(4)
    play.read(join(4, 1), fact(6, 5, 1, "old"), join(5, 2), fact(6, 5, 2, "new"))
    assert play.move(4, 6, 2, facts=1, empty=1) == ['RDATA s w 6 "new"']


def test_duplicate_is_sent_once() -> None:
    """Also the leftover of a crash, whose edge is one ID wide, and one whose ID was passed long ago."""
    play = standing()
    play.read(fact(2, 0), fact(2, 0), fact(2, 1))
    assert play.move(0, 2, facts=1, empty=1) == ["RDATA s w 2 2"]
    play.read(fact(2, 0), fact(3))
    assert play.move(2, 3) == ["RDATA s w 3 3"]


def test_fact_that_began_before_we_read_is_fetched() -> None:
    """Its first rows may be missing; from the next fact on nothing is."""
    play = standing(whole=False)
    play.read(fact(1, text="perhaps not all"), part("a"), fact(2, text="b"))
    assert play.move(0, 1) == ["POSITION s w 1 1"]
    assert play.move(1, 2) == ['RDATA s w batch "a"', 'RDATA s w 2 "b"']


def test_new_beginning_forgets_what_was_read() -> None:
    """What came before a hole in the reading and after it are no neighbours."""
    play = standing()
    play.read(part("a"))
    play.rows.begin_read({0: False}, {})
    play.read(fact(1))
    assert play.move(0, 1) == ["POSITION s w 1 1"]


def test_number_that_was_sent_twice_does_not_stand_for_all_rows() -> None:
    """The first time was before we read: what comes is the last of several rows, perhaps."""
    play = standing(4, whole=False)
    play.rows.begin_read({0: False}, {"s": 6})
    play.read(void(4, 5), fact(6), fact(7))
    assert play.move(4, 6, facts=1, empty=1) == ["POSITION s w 6 6"]
    assert play.move(6, 7) == ["RDATA s w 7 7"]


def test_another_partition_is_not_believed() -> None:
    """A stream lives in one; what comes from another is a mistake that the pipeline refuses."""
    play = standing()
    play.read(fact(1, text="right"))
    play.read(fact(2, text="wrong"), partition=1)
    assert play.move(0, 1) == ['RDATA s w 1 "right"']
    assert play.move(1, 2) == []


def test_count_that_differs_makes_clients_fetch() -> None:
    """The pipeline counted another number of facts than lie here: something was not seen as it saw it."""
    play = standing()
    play.read(fact(1), fact(2))
    assert play.move(0, 2, facts=1, empty=1) == ["POSITION s w 2 2"]


def test_row_with_newlines_goes_out_in_one_line() -> None:
    """JSON may be laid out over lines on Kafka, and never is in the protocol."""
    play = standing()
    laid_out = read(
        b'{"kind":"RDATA","stream":"s","writer":"w","id":1,"row":{"a b":\r\n [1,\n "\\n"]}}', b"s", Topic.FACTS
    )
    play.read(laid_out)
    assert play.move(0, 1) == ['RDATA s w 1 {"a b":[1,"\\n"]}']


def test_backward_stream_counts_away_from_zero() -> None:
    """IDs keep their sign."""
    play = standing()
    play.read(fact(-2), fact(-1), void(-2, -4))
    assert play.move(0, -4, facts=2, empty=2) == ["RDATA s w -1 -1", "RDATA s w -2 -2", "POSITION s w -2 -4"]


def test_past_the_bound_rows_are_dropped_and_said_to_be() -> None:
    """Memory stays within the bound, clients fetch what was dropped, and later rows go out again."""
    play = standing(limit=50_000)
    for id in range(2, 200):  # 1 is missing
        play.read(fact(id, text="x" * 1000))
        assert play.rows.size_bytes <= 50_000
    assert play.rows.dropped_count
    play.read(fact(1))
    assert play.move(0, 199) == ["POSITION s w 199 199"]
    play.read(fact(200))
    assert play.move(199, 200) == ["RDATA s w 200 200"]
    assert play.rows.size_bytes < 2_000


def test_retirement_settles_what_is_open() -> None:
    """As a JOIN does: up to its ID everything that did not come is empty."""
    play = standing()
    play.read(fact(2, 1), Retire(stream="s", writer="w", epoch=0, id=4))
    assert play.move(0, 4, facts=1, empty=3) == ["RDATA s w 2 2", "POSITION s w 2 4"]


# -- plays


class Wild:
    """A simulation, the pipeline's state machine, and a reader that is somewhere behind or ahead of it."""

    def __init__(self, seed: int, limit: int) -> None:
        self.draw = Random(seed)
        self.simulation = Simulation(seed, Cast(streams=3, writers=3, rate=150.0, habits=WILD))
        self.records: list[Record] = []
        self.facts: dict[Writer, dict[int, Sequence[str]]] = defaultdict(dict)
        self.counted: dict[str, int] = defaultdict(int)
        self._states: dict[str, bytes] = {}
        self._epochs: dict[Writer, int] = {}
        announced: dict[Writer, int] = {}
        self._rows = RowBuffer(limit, announced)
        self._announcer = Announcer(self._rows, announced, timeout_seconds=1.0)
        self._stands: dict[Writer, int] = {}
        self._read: int | None = None
        self._published = 0
        self._heads: dict[str, int] = {}

    def begin(self) -> None:
        """Start to read where the pipeline is."""
        self._read = self._published
        self._rows.begin_read({0: self._read == 0}, self._heads)

    def write(self, records: list[Record]) -> None:
        """Kafka has them."""
        tagged = list(self._tagged(records))
        self.records += tagged
        self._remember(tagged)

    def publish(self, now: float) -> None:
        """The pipeline has read everything, and publishes what it moved."""
        new = self.records[self._published :]
        packets = packed(
            (self._published + number, 1, IN_FACTS, record.stream.encode(), encode(record))
            for number, record in enumerate(new)
        )
        self._published = len(self.records)
        effects = apply_batch(0, States(self._states), packets, round(now * 1000), NO_BOUNDS) if new else None
        for stream in effects.streams if effects else []:
            self._heads[stream.stream] = stream.allocated
            for moved in stream.advances:
                how = moved.evidence
                told = events.Advance(moved.writer, moved.epoch, moved.prev, moved.id, how, moved.prev, 0, 1, 1)
                self._check(self._announcer.add_advance(stream.stream, told, now))

    def read(self, now: float, upto: int) -> None:
        """The reader comes as far as `upto`."""
        if self._read is None:
            return
        for record in self.records[self._read : upto]:
            if writer := self._rows.add(0, record):
                self._check(self._announcer.retry([writer], now))
        self._read = max(self._read, upto)
        self._check(self._announcer.announce_timed_out(now))

    def _tagged(self, records: list[Record]) -> Iterator[Record]:
        """The rows of each fact say whose they are; those of a fact come one after the other."""
        for at, record in enumerate(records):
            if isinstance(record, Rdata):
                last = next(it for it in records[at:] if isinstance(it, Rdata) and it.id != "batch")
                part = {"of": [last.writer, last.epoch, last.id], "row": bytes(record.row).decode()}
                yield msgspec.structs.replace(record, row=encode_row(part))
            else:
                yield record

    def _remember(self, records: Iterable[Record]) -> None:
        batches: dict[Writer, list[str]] = defaultdict(list)
        for record in records:
            writer = record.stream, record.writer
            if isinstance(record, Join):
                self._epochs[writer] = max(record.epoch, self._epochs.get(writer, 0))
            if not isinstance(record, Rdata):
                continue
            batches[writer].append(bytes(record.row).decode())
            if isinstance(record.id, int):
                rows = batches.pop(writer)
                if record.epoch >= self._epochs.get(writer, 0):
                    self.facts[writer].setdefault(record.id, rows)

    def _check(self, told: Iterable[Announcement]) -> None:
        for announcement in told:
            writer = announcement.stream, announcement.writer
            assert self._stands.get(writer, announcement.prev) == announcement.prev, "announcements join"
            self._stands[writer] = announcement.id
            self.counted[announcement.kind] += 1
            true = {
                id: rows
                for id, rows in self.facts[writer].items()
                if is_beyond(id, announcement.prev) and not is_beyond(id, announcement.id)
            }
            if announcement.kind != "fetch":
                assert sent(announcement.commands) == dict(sorted(true.items(), key=lambda item: abs(item[0])))
            last = announcement.commands[-1]
            assert last.id == announcement.id


def sent(commands: Sequence[PositionCommand | RdataCommand]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    rows: list[str] = []
    for command in commands:
        if isinstance(command, RdataCommand):
            rows.append(command.row)
            if command.id is not None:
                found[command.id], rows = rows, []
        else:
            assert not rows
    return found


@pytest.mark.parametrize("seed", range(6))
def test_reader_that_is_ahead_sends_every_row_once(seed: int) -> None:
    """Writers crash, roll back, send twice and out of order, zombies speak: every fact goes out with all its rows, in
    order, once; nothing is to be fetched, and nothing is held in the end."""
    wild = Wild(seed, BIG)
    wild.begin()
    now = 0.0
    while now < 15.0:
        now += wild.draw.choice([0.01, 0.1, 1.0])
        played(wild, wild.simulation.step(now), now, ahead=True)
    played(wild, wild.simulation.drain(), now, ahead=True)
    assert wild.counted["rows"] > 20
    assert wild.counted["fetch"] == 0


@pytest.mark.parametrize("seed", range(6))
def test_reader_that_lags_and_forgets_never_sends_a_wrong_row(seed: int) -> None:
    """It begins in the middle, is late, begins anew and meets its bound: what it does not have in full is fetched, and
    what it sends is exactly what the pipeline counted."""
    wild = Wild(seed, 100_000)
    wild.begin()
    now = 0.0
    while now < 15.0:
        now += wild.draw.choice([0.01, 0.1, 0.5])
        if wild.draw.random() < 0.1:
            wild.begin()
        played(wild, wild.simulation.step(now), now, ahead=wild.draw.random() < 0.8)
    played(wild, wild.simulation.drain(), now, ahead=True)
    assert min(wild.counted["rows"], wild.counted["fetch"]) > 5, wild.counted


def played(wild: Wild, records: list[Record], now: float, *, ahead: bool) -> None:
    wild.write(records)
    if ahead:
        wild.read(now, len(wild.records))
    wild.publish(now)
    wild.read(now, wild.draw.randint(0, len(wild.records)))
