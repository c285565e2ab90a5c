"""Databases that go back: a new timeline, in which the line waits for IDs that are given out again."""

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.examples import examples
from tests.streaming.builders import Record, Shard, forced, join, position, rdata, retire, skip, void
from tests.streaming.protocol import Database
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.values.limits import Bounds, Reason
from tidemark.streaming.wire.records import DatabaseStart

WRITERS = ("a", "b", "c")
writers = st.sampled_from(WRITERS)


def begun(done: StreamEffects) -> list[tuple[str, int, int, str]]:
    return [(it.writer, it.id, it.number, it.why) for it in done.timelines]


def late(done: StreamEffects) -> list[tuple[str, int, int, str]]:
    return [(it.writer, it.prev, it.id, it.why) for it in done.late]


@pytest.fixture
def shard() -> Shard:
    """The line is at 3; b has completed 5 and not 4, a idles at 0."""
    shard = Shard()
    shard.feed(join("a", 0, timeline=DatabaseStart("db/1", "a1")), join("b", 0, timeline=DatabaseStart("db/1", "b1")))
    shard.feed(*(rdata("b", id, epoch=1) for id in (1, 2, 3)), rdata("b", 5, 4, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 0, "b": 3}, 3)
    return shard


@pytest.mark.parametrize(
    ("timeline", "why"), [(DatabaseStart("db/2", "a2", "a1"), "database"), (DatabaseStart("db/1", "a9", "a0"), "start")]
)
def test_an_idle_writer_that_joins_first_tells_that_the_database_went_back(
    shard: Shard, timeline: DatabaseStart, why: str
) -> None:
    """What b completed beyond the JOIN is forgotten, and late: the line must not go by it over a's 4 and 5."""
    done = shard.feed(join("a", 3, 2, timeline=timeline))
    assert begun(done) == [("a", 3, 2, why)]
    assert late(done) == [("b", 4, 5, "regressed")]
    assert [(it.writer, it.top, it.how) for it in done.closed] == [("b", 4, "joined")]
    shard.feed(rdata("a", 4, 3, epoch=2))
    assert (shard.positions, shard.linear) == ({"a": 4, "b": 3}, 4)
    shard.feed(rdata("a", 5, 4, epoch=2))
    assert shard.linear == 5


def test_the_others_follow_into_the_timeline_without_beginning_another(shard: Shard) -> None:
    """b joins below what it had completed: that is known since a's JOIN."""
    shard.feed(join("a", 2, 2, timeline=DatabaseStart("db/2", "a2", "a1")), rdata("a", 3, 2, epoch=2))
    assert (shard.positions, shard.linear) == ({"a": 3, "b": 3}, 3)
    done = shard.feed(join("b", 4, 2, timeline=DatabaseStart("db/2", "b2", "b0")))
    assert begun(done) == []
    assert shard.positions == {"a": 3, "b": 4}
    done = shard.feed(join("b", 6, 3, timeline=DatabaseStart("db/2", "b3", "b0")))
    assert begun(done) == [("b", 6, 3, "start")]


def test_a_failover_that_lost_nothing_takes_nothing_back(shard: Shard) -> None:
    """It is told, and that is all: nothing was completed beyond the JOIN."""
    done = shard.feed(rdata("b", 4, 3, epoch=1), join("a", 5, 2, timeline=DatabaseStart("db/2", "a2", "a1")))
    assert (begun(done), late(done)) == ([("a", 5, 2, "database")], [])
    assert (shard.positions, shard.linear) == ({"a": 5, "b": 5}, 5)


def test_what_was_under_way_in_the_lost_history_moves_no_line(shard: Shard) -> None:
    """Rule 1: b's 4 arrives behind the JOIN that began the timeline, in which a may have 4 in flight."""
    shard.feed(join("a", 3, 2, timeline=DatabaseStart("db/2", "a2", "a1")), rdata("b", 4, 3, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 3, "b": 4}, 3)
    done = shard.feed(rdata("a", 4, 3, epoch=2))
    assert (done.counts, late(done), shard.linear) == ({"applied": 1}, [], 4)


def test_one_batch_holds_an_id_of_both_histories(shard: Shard) -> None:
    """Wherever it is cut: the one that is lost does not make the other late."""
    shard.feed(join("a", 3, 2, timeline=DatabaseStart("db/2", "a2", "a1")))
    done = shard.feed(rdata("b", 4, 3, epoch=1), rdata("a", 4, 3, epoch=2))
    assert (done.counts, shard.linear) == ({"applied": 2}, 4)


def test_writers_of_the_lost_history_alone_move_no_line(shard: Shard) -> None:
    """Rule 1: a, which began the timeline, retires; what b announced tells nothing of it, until b joins again."""
    a2 = DatabaseStart("db/2", "a2", "a1")
    shard.feed(join("a", 3, 2, timeline=a2), retire("a", 3, 2), position("b", 3, 6, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 3, "b": 6}, 3)
    shard.feed(join("b", 3, 2, timeline=DatabaseStart("db/2", "b2", "b1")), rdata("b", 4, 3, epoch=2))
    assert shard.linear == 4


def test_when_all_have_retired_the_lost_history_moves_no_line(shard: Shard) -> None:
    """Rule 1: b retired at 6 before the database went back to 3, whence the next writer gives out 4."""
    shard.feed(position("b", 5, 6, epoch=1), void("b", 3, 4, epoch=1), rdata("b", 5, 4, epoch=1), retire("b", 6))
    shard.feed(join("a", 3, 2, timeline=DatabaseStart("db/2", "a2", "a1")), retire("a", 3, 2))
    assert (shard.positions, shard.linear) == ({"a": 3, "b": 6}, 5)


def test_a_join_below_the_line_is_legal(shard: Shard) -> None:
    """It read the head before the others went on."""
    done = shard.feed(join("c", 1, timeline=DatabaseStart("db/1", "c1")), position("c", 1, 3, epoch=1))
    assert (begun(done), late(done)) == ([], [])


@pytest.mark.parametrize("voided", [True, False])
def test_an_id_that_two_restores_of_one_image_give_out_twice_is_late_twice(*, voided: bool) -> None:
    """Rule 10: the image knows what was published before it was made (4), and nothing of the timeline that the first
    restore began. Its facts are others, with the same IDs, and no duplicates of those of that timeline."""
    shard, image = Shard(), DatabaseStart("db", "s1")
    shard.feed(join("shop", 0, timeline=image), *(rdata("shop", id, epoch=1) for id in (1, 2, 3)))
    shard.feed(void("shop", 3, 4, epoch=1) if voided else join("web", 0, timeline=image))
    for epoch, start in (2, "s2"), (3, "s3"):
        restored = [
            join(name, 3, epoch, timeline=DatabaseStart("db", start, "s1"), published=4) for name in ("shop", "web")
        ]
        done = shard.feed(*restored, rdata("shop", 4, 3, epoch=epoch))
        assert shard.feed(rdata("shop", 4, 3, epoch=epoch)).counts == {"duplicate": 1}
    assert late(done) == [("shop", 3, 4, "regressed")]
    assert (shard.positions["shop"], shard.linear) == (4, 4)


def test_ids_that_were_published_are_late_when_they_come_again(shard: Shard) -> None:
    """No position moves back; the line waits below it for what is in flight again."""
    done = shard.feed(join("b", 1, 2), rdata("b", 2, 1, epoch=2))
    assert begun(done) == [("b", 1, 2, "position")]
    assert sorted(late(done)) == [("b", 1, 2, "regressed"), ("b", 4, 5, "regressed")]
    assert (shard.positions, shard.linear) == ({"a": 0, "b": 3}, 3)
    (move,) = shard.feed(rdata("b", 4, 2, epoch=2)).advances
    assert (move.prev, move.id, move.facts) == (3, 4, 1)


def test_what_came_again_is_late_again_where_the_database_goes_back_once_more(shard: Shard) -> None:
    """Its ID was published in the first timeline, and no evidence of it is told twice."""
    shard.feed(join("a", 1, 2, timeline=DatabaseStart("db/2", "a2", "a1")))
    again = rdata("b", 3, epoch=1)
    assert late(shard.feed(again)) == [("b", 2, 3, "regressed")]
    assert shard.feed(again).counts == {"duplicate": 1}
    shard.feed(join("a", 1, 3, timeline=DatabaseStart("db/3", "a3", "a2")))
    assert late(shard.feed(again)) == [("b", 2, 3, "regressed")]
    (move,) = shard.feed(join("b", 5, 2)).advances
    assert (move.prev, move.id, move.facts) == (3, 5, 0)


def test_what_holds_no_fact_is_not_late_where_the_database_goes_back(shard: Shard) -> None:
    """Voids and announcements are nothing to read again."""
    shard.feed(void("b", 6, 7, epoch=1), position("b", 8, 9, epoch=1))
    done = shard.feed(join("a", 1, 2, timeline=DatabaseStart("db/2", "a2", "a1")))
    assert late(done) == [("b", 4, 5, "regressed")]
    shard.feed(join("b", 1, 2), rdata("b", 2, 1, epoch=2), void("b", 2, 3, epoch=2))
    assert late(shard.feed(join("a", 1, 3, timeline=DatabaseStart("db/3", "a3", "a2")))) == []


def test_what_an_operator_skipped_beside_a_fact_is_not_late_with_it(shard: Shard) -> None:
    """Nobody completed it, and it may be as wide as a slip of the pen."""
    shard.feed(skip("b", 5, 2_000_000_000, beyond=True))
    done = shard.feed(join("a", 1, 2, timeline=DatabaseStart("db/2", "a2", "a1")))
    assert late(done) == [("b", 4, 5, "regressed")]


def test_a_name_that_only_the_lost_history_knew_does_not_hold_the_line_of_a_relay() -> None:
    """It never joins again; but each ID that is given out is somebody's fact, or void, and the line goes by those."""
    shard, first, second = Shard(), DatabaseStart("db", "s1"), DatabaseStart("db", "s2", "s1")
    shard.feed(join("shop", 0, timeline=first), join("pod", 0, timeline=first), rdata("pod", 1, epoch=1))
    shard.feed(position("shop", 0, 1, epoch=1), rdata("shop", 2, epoch=1), position("pod", 1, 2, epoch=1))
    done = shard.feed(join("shop", 1, 2, timeline=second, published=1), rdata("shop", 2, epoch=2))
    assert begun(done) == [("shop", 1, 2, "position")]
    assert late(done) == [("shop", 1, 2, "regressed")]
    shard.feed(rdata("shop", 3, epoch=2), void("shop", 3, 4, epoch=2), rdata("shop", 5, epoch=2))
    assert (shard.positions, shard.linear) == ({"shop": 5, "pod": 2}, 5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([position("b", 1, 3, epoch=1)], [position("b", 1, 3, epoch=2)]),
        ([position("b", 1, 2, epoch=1), position("b", 2, 3, epoch=1)], [rdata("b", 3, 1, epoch=2)]),
        ([position("b", 1, 3, epoch=1)], [rdata("b", 3, 0, epoch=2)]),
    ],
)
def test_edges_of_the_new_timeline_may_lie_across_what_the_old_one_left(
    before: list[Record], after: list[Record]
) -> None:
    """Up to `told` it stays settled, and the relay, which knows nothing of it, cuts its edges elsewhere."""
    shard, first, second = Shard(), DatabaseStart("db", "s1"), DatabaseStart("db", "s2", "s1")
    shard.feed(join("a", 0, timeline=first), join("b", 0, timeline=first), *before)
    assert shard.positions == {"a": 0, "b": 0}
    done = shard.feed(*(join(name, 0, 2, timeline=second, published=2) for name in "ab"), void("a", 0, 3, epoch=2))
    assert begun(done) == [("b", 2, 2, "position")]
    completed = [] if after[0].prev == 0 else [void("b", 0, 1, epoch=2)]
    shard.feed(*completed, *after)
    assert not shard.rejected
    assert (shard.positions, shard.linear) == ({"a": 3, "b": 3}, 3)


def test_an_edge_across_the_new_timeline_s_own_is_a_conflict(shard: Shard) -> None:
    """What was completed since the database went back is nobody's past."""
    shard.feed(*(join(name, 2, 2, timeline=DatabaseStart("db", "s2", "s1"), published=2) for name in "ab"))
    shard.feed(rdata("b", 4, 2, epoch=2), rdata("b", 5, 3, epoch=2))
    assert [*shard.rejected.values()] == [Reason.CONFLICT]
    assert shard.positions["b"] == 4


def test_a_history_that_is_not_known_shows_nothing(shard: Shard) -> None:
    """The right to read it was taken away and given back: neither is another database."""
    done = shard.feed(join("a", 5, 2, timeline=DatabaseStart(None, "a2", "a1")))
    assert begun(done) == []
    done = shard.feed(join("a", 5, 3, timeline=DatabaseStart("db/1", "a3", "a2")))
    assert begun(done) == []
    done = shard.feed(join("a", 5, 4, timeline=DatabaseStart("db/2", "a4", "a3")))
    assert begun(done) == [("a", 5, 2, "database")]


def test_a_start_that_is_begun_again_follows_itself(shard: Shard) -> None:
    """It broke off before it knew whether its JOIN had arrived, so the next says the same two tokens."""
    again = DatabaseStart("db/1", "a2", "a1")
    for epoch in (2, 3):
        assert begun(shard.feed(join("a", 5, epoch, timeline=again))) == []
    assert begun(shard.feed(join("a", 5, 4, timeline=DatabaseStart("db/1", "a3", "a2")))) == []


@pytest.mark.parametrize("database", ["db/1", "db/2"])
def test_facts_of_a_retired_writer_that_was_forgotten_and_went_back_are_late(database: str) -> None:
    """Only Postgres remembers its position, which the line had passed: what comes again below the line is late."""
    shard = Shard(bounds=Bounds(retired=0))
    shard.feed(join("a", 0, timeline=DatabaseStart("db/1", "a1")), join("b", 0, timeline=DatabaseStart("db/1", "b1")))
    shard.feed(*(rdata("b", id, epoch=1) for id in range(1, 6)), retire("b", 5), position("a", 0, 5, epoch=1))
    assert shard.feed(position("a", 5, 6, epoch=1)).dropped_writers == ["b"]
    done = shard.feed(join("b", 3, 2, timeline=DatabaseStart(database, "b3", "b1")), rdata("b", 4, 3, epoch=2))
    assert [(it.writer, it.number, it.why) for it in done.timelines] == [("b", 2, "database")] * (database == "db/2")
    assert late(done) == [("b", 3, 4, "final")]
    assert done.counts.get("duplicate", 0) == 0
    assert shard.linear == 6


class Restored(RuleBasedStateMachine):
    """Writers that keep the contract on a database that is restored: the line passes nothing that is in flight, but for
    what it had passed before, and what was passed before and comes again is told as late."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard()
        self.queue: list[Record] = []
        self.passed = 0
        self.published: dict[str, int] = {}
        self.late: dict[str, set[int]] = defaultdict(set)
        self.fresh: set[tuple[str, int]] = set()

    @initialize(sign=st.sampled_from([1, -1]))
    def begin(self, sign: int) -> None:
        self.database = Database(sign, WRITERS)

    @rule(name=writers, count=st.integers(0, 4), ends=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=5))
    def work(self, name: str, count: int, ends: list[tuple[int, bool]]) -> None:
        process = self.database.processes[name]
        if not process.alive:
            self.start(name)
        for _ in range(count):
            self.database.reserve(name)
        for which, commit in ends[: len(process.open)]:
            if commit:
                self.database.commit(name, which)
                self.fresh.add((name, abs(process.outbox[-1].id)))
                self.queue.extend(self.database.send(name, -1))
            else:
                self.queue.extend(self.database.roll_back(name, which))

    def start(self, name: str) -> None:
        self.queue.extend(self.database.start(name))

    @rule()
    def heartbeats(self) -> None:
        for name, process in self.database.processes.items():
            if process.alive:
                self.queue.extend(self.database.heartbeat(name))

    @rule(back=st.integers(0, 6))
    def restore(self, back: int) -> None:
        """Told by the server's own history, as by Postgres: all that was sent has been read by then."""
        self.advance()
        self.go_back(max(0, self.database.last_value - back))
        self.passed = max(self.passed, self.linear)
        self.published = {name: abs(at) for name, at in self.shard.positions.items()}
        self.late.clear()
        self.fresh.clear()

    def go_back(self, value: int) -> None:
        self.database.restore(value, told=True)

    @property
    def linear(self) -> int:
        return abs(self.shard.linear)

    @rule()
    def advance(self) -> None:
        if not self.queue:
            return
        done = self.shard.feed(*self.queue)
        self.queue.clear()
        assert not self.shard.rejected
        for it in done.late:
            self.late[it.writer] |= set(range(abs(it.prev) + 1, abs(it.id) + 1))
        assert all(self.linear < id or id <= self.passed for _, id in self.database.in_flight())
        for name, id in self.fresh:
            assert id > self.published.get(name, 0) or id in self.late[name]

    def teardown(self) -> None:
        """All that is in flight ends; then the line has reached the end of the sequence, or is beyond it."""
        for name in WRITERS:
            self.start(name)
        for name in WRITERS:
            self.queue.extend(self.database.heartbeat(name))
        self.advance()
        assert self.linear == max(self.passed, self.database.last_value)


Restored.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None, print_blob=True
)
TestRestored = Restored.TestCase


class Relayed(Restored):
    """The same where a relay tells of all writers: nothing but what it told shows that a disk image was put back."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0
        self.lost = False

    def start(self, name: str) -> None:
        self.restart(0)

    @rule(back=st.integers(0, 6))
    def restart(self, back: int) -> None:
        """Of the server, and so of the relay, whose floor is `back` below what it told."""
        self.tell()
        self.queue.extend(self.database.relay_starts(back))

    def go_back(self, value: int) -> None:
        self.database.image_is_put_back(value)
        self.lost |= self.told > value
        self.told = min(self.told, value)

    def tell(self) -> None:
        """Before anything is sent, the database knows up to where."""
        self.told = max([self.told, *(abs(record.id) for record in self.queue)])
        if self.queue:
            self.database.told = max(self.database.told, self.database.last_value)

    @property
    def timelines(self) -> int:
        return self.shard.stream().timeline_number if self.shard.states else 1

    @rule()
    def advance(self) -> None:
        self.tell()
        known = self.timelines
        joined = any(record.kind == "JOIN" for record in self.queue)
        super().advance()
        assert self.timelines - known == (self.lost and joined)
        if joined:
            self.lost = False


Relayed.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, print_blob=True)
TestRelayed = Relayed.TestCase


def in_epoch_7() -> Shard:
    """w has joined at 0 and completed 1 to 5."""
    shard = Shard()
    shard.feed(join("w", 0, 7, timeline=DB1), *(rdata("w", id, epoch=7) for id in range(1, 6)))
    assert (shard.positions, shard.linear) == ({"w": 5}, 5)
    return shard


DB1 = DatabaseStart("db1", "t1")


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (join("w", 2, 7, timeline=DatabaseStart("db2", "t2")), "database"),
        (join("w", 2, 7, timeline=DatabaseStart("db1", "t2")), "position"),
        (join("w", 2, 7, timeline=DB1), "position"),
        (join("w", 2, 7), "position"),
    ],
)
def test_another_join_of_the_living_epoch_begins_a_timeline(again: Record, why: str) -> None:
    """Rule 10: what comes again is late, and no duplicate of what the lost history completed."""
    shard = in_epoch_7()
    done = shard.feed(again, rdata("w", 3, epoch=7), rdata("w", 4, epoch=7))
    assert begun(done) == [("w", 2, 2, why)]
    assert late(done) == [("w", 2, 4, "regressed")]
    assert done.counts == {"applied": 1, "late": 2}
    assert (shard.positions, shard.linear) == ({"w": 5}, 5)
    assert shard.feed(again).counts == {"duplicate": 1}


def test_another_start_in_the_living_epoch_begins_a_timeline() -> None:
    """Epochs rise with each start: where two share one, whatever keeps the epochs went back, whoever came before."""
    shard = in_epoch_7()
    for start, after in (("t2", "t1"), ("t9", "t8")):
        done = shard.feed(join("w", 5, 7, timeline=DatabaseStart("db1", start, after)))
        assert [why for *_, why in begun(done)] == ["start"]


def test_the_same_join_again_is_a_duplicate() -> None:
    """Whatever has happened since, in this timeline or in another one; and whatever a relay knows by now as told."""
    shard, first = in_epoch_7(), join("w", 0, 7, timeline=DB1)
    before = shard.states["events"]
    done = shard.feed(first, join("w", 0, 7, timeline=DB1, published=4))
    assert (done.counts, begun(done)) == ({"duplicate": 2}, [])
    assert shard.stream().writers["w"].join_crc == codec.decode(before).writers["w"].join_crc
    done = shard.feed(join("v", 5, 7, timeline=DatabaseStart("db2", "v1")), first)
    assert (done.counts["duplicate"], begun(done)) == (1, [("v", 5, 2, "database")])


def test_a_join_of_the_living_epoch_follows_into_the_timeline_of_another() -> None:
    """It begins none: v's JOIN did. From then on w's own records count for the line again."""
    shard = in_epoch_7()
    shard.feed(join("v", 2, 7, timeline=DatabaseStart("db2", "v1")))
    done = shard.feed(
        join("w", 2, 7, timeline=DatabaseStart("db2", "t2")), rdata("w", 3, epoch=7), void("v", 2, 6, epoch=7)
    )
    assert (begun(done), late(done)) == ([], [("w", 2, 3, "regressed")])
    shard.feed(rdata("w", 7, 3, epoch=7), position("v", 6, 7, epoch=7))
    assert shard.linear == 7


def test_an_epoch_that_an_operator_began_gets_its_evidence_from_the_writers_own_join() -> None:
    """The next start follows that one, and is no sign of anything; another one in the same epoch is."""
    shard = in_epoch_7()
    shard.feed(forced(join("w", 5, 8)))
    done = shard.feed(join("w", 5, 8, timeline=DatabaseStart("db1", "t2", "t1")))
    assert (done.counts, begun(done)) == ({"duplicate": 1}, [])
    assert begun(shard.feed(join("w", 5, 9, timeline=DatabaseStart("db1", "t3", "t2")))) == []
    assert begun(shard.feed(join("w", 5, 9, timeline=DatabaseStart("db1", "t4", "t3")))) == [("w", 5, 2, "start")]
