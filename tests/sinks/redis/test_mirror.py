"""Redis as a mirror of Postgres: after any loss it holds again what was committed, and nothing else."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.sinks.given import advance, entries, stream
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.app.stack.processes import RedisServer
from tidemark.common.errors import LeaseLost
from tidemark.sinks.background import Maintenance, MaintenanceConfig
from tidemark.sinks.port import RefillResult, Sink
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.retention import Retention
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.redis.client import SENTINEL_KEY, STREAMS_KEY, key
from tidemark.sinks.redis.mirror import Mirror
from tidemark.sinks.redis.publish import Redis
from tidemark.streaming.core.effects import LateCompletion, StreamEffects, WriterRow


@pytest.fixture
def pipeline(store: Postgres, shown: Redis, lease: Lease) -> Pipeline:
    return Pipeline(store, shown, lease)


def moves(*steps: int, writer: str = "w", name: str = "s") -> Iterator[StreamEffects]:
    """One batch per step from position to position."""
    for prev, id_ in zip((0, *steps), steps, strict=False):
        yield stream(name, advance(writer, prev, id_), linear=id_)


def dump(keys: Any, name: str = "s") -> object:
    """All that readers can see of a stream."""
    read = (keys.get(key(name, "linear")), keys.get(key(name, "token")), keys.hgetall(key(name, "positions")))
    return (*read, entries(keys, name))


def test_batch_becomes_visible(pipeline: Pipeline, keys: Any) -> None:
    """A committed batch is in Redis with its evidence, under the name of its stream."""
    pipeline.publish(*moves(3))
    assert keys.smembers(STREAMS_KEY) == {"s"}
    assert keys.get(key("s", "token")) == "m3"
    assert entries(keys)[0]["facts"] == "3"


def test_batch_that_only_held_is_not_shown(pipeline: Pipeline, keys: Any) -> None:
    """A stream on which nothing moved costs Redis nothing, once its line is there."""
    pipeline.publish(stream("s"))
    assert keys.get(key("s", "token")) == "m0"
    keys.flushall()
    pipeline.publish(stream("s"))
    assert keys.keys() == []


def comes_late(id_: int) -> StreamEffects:
    return stream("s", late=[LateCompletion("w", 1, id_ - 1, id_, 1, "skipped")], linear=9, linear_prev=9)


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_crash_between_commit_and_redis_is_made_good(pipeline: Pipeline, shown: Redis, keys: Any, lost: int) -> None:
    """Rules 3 and 4: batches that were committed and never shown appear at the start, chained, with their evidence."""
    steps = list(moves(1, 2, 4, 8, 16, 32, 64))
    for step in steps[:-lost]:
        pipeline.publish(step)
    for step in steps[-lost:]:
        pipeline.commit(step)
    assert pipeline.restarted(shown).refill().entry_count == lost
    assert [it["id"] for it in entries(keys)] == ["1", "2", "4", "8", "16", "32", "64"]
    assert [it["batch"] for it in entries(keys)] == list("1234567")
    assert keys.get(key("s", "token")) == "m64"


@pytest.mark.parametrize(("lost", "kept"), [(2, ["1", "2", "3", "4"]), (3, ["4", "5"])])
def test_late_completions_that_redis_lacks_leave_no_hole(
    pipeline: Pipeline, shown: Redis, keys: Any, monkeypatch: pytest.MonkeyPatch, lost: int, kept: list[str]
) -> None:
    """Rule 3: a list that goes on holds all of them; where there are too many it begins anew with the newest, and
    without an advance that readers could take for the end of what they know."""
    monkeypatch.setattr("tidemark.sinks.redis.mirror.MAX_REFILL_ENTRIES", 2)

    pipeline.publish(stream("s", advance("w", 0, 9), linear=9))
    for id_ in (1, 2):
        pipeline.publish(comes_late(id_))
    for id_ in range(3, 3 + lost):
        pipeline.commit(comes_late(id_))
    pipeline.restarted(shown).refill()
    assert [it["id"] for it in entries(keys) if it["kind"] == "LATE"] == kept
    assert [it["id"] for it in entries(keys) if it["kind"] == "POSITION"] == (["9"] if lost == 2 else [])
    assert keys.hgetall(key("s", "positions")) == {"w": "9"}


def test_repeated_batch_is_shown_from_postgres(pipeline: Pipeline, shown: Redis, keys: Any) -> None:
    """Rules 2 and 4: a batch whose commit succeeded and whose publication did not is shown when it comes again."""
    late = LateCompletion("w", 1, 1, 2, 1, "skipped")
    made, _ = pipeline.commit(stream("s", advance("w", 0, 3), late=[late]))
    repeated = pipeline.store.apply(made)
    assert repeated.is_repeat
    pipeline.restarted(shown).publish(made, repeated)
    before = dump(keys)
    assert [it["kind"] for it in entries(keys)] == ["POSITION", "LATE"]
    pipeline.restarted(shown).publish(made, repeated)
    assert dump(keys) == before


def test_batch_after_a_crash_does_not_leave_a_hole(pipeline: Pipeline, shown: Redis, keys: Any) -> None:
    """Rule 3: an advance that does not join what Redis holds brings the missing ones with it."""
    first, second, third = moves(3, 5, 9)
    pipeline.publish(first)
    pipeline.commit(second)
    pipeline.restarted(shown).publish(*pipeline.commit(third))
    assert [(it["prev"], it["id"]) for it in entries(keys)] == [("0", "3"), ("3", "5"), ("5", "9")]


def test_a_batch_waits_for_the_comparison_that_runs_already(
    pipeline: Pipeline, shown: Redis, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new owner compares everything once, however many streams there are, and not once more for its first batch."""
    pipeline.publish(*moves(1))
    comparing, may_go_on, compared = threading.Event(), threading.Event(), []

    def all_streams() -> list[str]:
        compared.append(Postgres.streams(pipeline.store))
        comparing.set()
        assert may_go_on.wait(60)
        return compared[-1]

    monkeypatch.setattr(pipeline.store, "streams", all_streams)
    mirror = pipeline.restarted(shown)
    with ThreadPoolExecutor(2) as pool:
        refilling = pool.submit(mirror.refill)
        assert comparing.wait(60)
        publishing = pool.submit(mirror.publish, *pipeline.commit(stream("s", advance("w", 1, 3), linear=3)))
        may_go_on.set()
        refilling.result()
        publishing.result()
    assert compared == [["s"]]
    assert keys.get(key("s", "token")) == "m3"
    assert [(it["prev"], it["id"]) for it in entries(keys)] == [("0", "1"), ("1", "3")]


def test_flushed_redis_is_the_same_again(pipeline: Pipeline, keys: Any) -> None:
    """Rules 2 and 4: after FLUSHALL a refill gives the same keys, LATE entries and backward streams included."""
    for step in (*moves(3, 5, 9), *moves(-2, -7, name="back"), *moves(2**62, 2**63 - 1, name="far")):
        pipeline.publish(step)
    pipeline.publish(comes_late(2))
    pipeline.publish(stream("s", advance("v", 0, 10), linear=9))
    names = ("s", "back", "far")
    before = {name: dump(keys, name) for name in names}
    keys.flushall()
    assert pipeline.mirror.refill().stream_count == 3
    after = {name: dump(keys, name) for name in names}
    assert after["back"] == before["back"]
    assert after["far"] == before["far"]
    assert after["s"][:3] == before["s"][:3]  # type: ignore[index]
    assert sorted(map(str, entries(keys))) == sorted(map(str, before["s"][3]))  # type: ignore[index]
    assert keys.smembers(STREAMS_KEY) == set(names)
    assert pipeline.mirror.refill().stream_count == 0


def test_flush_between_batches_is_noticed_by_the_next(pipeline: Pipeline, keys: Any) -> None:
    """Rule 4: the first batch after a loss refills its streams before readers see half of them."""
    pipeline.publish(stream("s", advance("a", 0, 3), advance("b", 0, 4), linear=3))
    keys.flushall()
    pipeline.publish(stream("s", advance("a", 3, 5), linear=4))
    assert keys.hgetall(key("s", "positions")) == {"a": "5", "b": "4"}
    assert keys.get(key("s", "token")) == "m4~a.5"


def test_a_token_or_name_that_is_not_what_the_keys_say_is_written_again(pipeline: Pipeline, keys: Any) -> None:
    """Of a stream at rest too: deleted, half restored from an old dump, or somebody else's; and once, not each time."""
    pipeline.publish(stream("s", advance("w", 0, 9), advance("v", 0, 12), linear=9))
    token = key("s", "token")
    spoils: dict[str, Callable[[], object]] = {
        "gone": lambda: keys.delete(token),
        "old": lambda: keys.set(token, "m5~v.7"),
        "of a writer less": lambda: keys.set(token, "m9"),
        "beyond the keys": lambda: keys.set(token, "m9~v.12~w.200"),
        "no token": lambda: keys.set(token, ""),
        "no text": lambda: keys.set(token, b"m9~\xff.12\n"),
        "of another type": lambda: (keys.delete(token), keys.rpush(token, "x")),
        "names gone": lambda: keys.delete(STREAMS_KEY),
        "name gone": lambda: (keys.sadd(STREAMS_KEY, "another"), keys.srem(STREAMS_KEY, "s")),
    }
    before = dump(keys)
    for what, spoil in spoils.items():
        spoil()
        assert pipeline.mirror.refill() == RefillResult(1, 0), what
        assert dump(keys) == before, what
        assert "s" in keys.smembers(STREAMS_KEY), what
        assert pipeline.mirror.refill() == RefillResult(0, 0), what


@pytest.mark.parametrize(
    ("name", "field", "text"),
    [
        ("linear", None, "0003"),
        ("linear", None, "+3"),
        ("linear", None, "0_3"),
        ("linear", None, "\u0663"),
        ("linear", None, "9" * 30),
        ("linear", None, "-3"),
        ("allocated", None, "0000"),
        ("positions", "w", "0003"),
        ("fence", "late", "07"),
    ],
)
def test_numbers_that_are_not_written_as_ours_are_a_fault(
    pipeline: Pipeline, keys: Any, name: str, field: str | None, text: str
) -> None:
    """The script compares texts, so it would never pass them: the stream is named, and not filled in vain each time."""
    pipeline.publish(stream("s", advance("w", 0, 9), advance("v", 0, 12), linear=9))
    if field is None:
        keys.set(key("s", name), text)
    else:
        keys.hset(key("s", name), field, text)
    assert pipeline.mirror.refill() == RefillResult(0, 0)
    assert "delete the keys of the stream" in pipeline.mirror.faults()["s"]
    keys.delete(key("s", name))
    pipeline.mirror.refill()
    assert pipeline.mirror.faults() == {}
    assert keys.hgetall(key("s", "positions")) == {"w": "9", "v": "12"}


@pytest.mark.parametrize(
    "lead",
    [
        lambda keys: keys.set(key("s", "linear"), "10"),
        lambda keys: keys.set(key("s", "allocated"), "13"),
        lambda keys: keys.hset(key("s", "positions"), "v", "13"),
        lambda keys: keys.hset(key("s", "positions"), "stranger", "1"),
    ],
)
def test_a_redis_that_is_ahead_is_told_of(pipeline: Pipeline, keys: Any, lead: Callable[[Any], object]) -> None:
    """Rule 2: nothing is taken back of what a database lost that was restored, be it of one writer alone."""
    pipeline.publish(stream("s", advance("w", 0, 9), advance("v", 0, 12), linear=9))
    lead(keys)
    before = dump(keys)
    with capture_logs() as logs:
        pipeline.mirror.refill()
    assert [it["first"] for it in logs if "ahead of Postgres" in it["event"]] == ["s"]
    assert dump(keys)[0::2] == before[0::2]  # type: ignore[index]


def test_a_replica_without_the_last_move_is_noticed_by_a_retirement(pipeline: Pipeline, keys: Any) -> None:
    """Rule 3: its position comes with the batch, the advance that led to it does not; the list gets it all the same."""
    first, second = moves(3, 5)
    pipeline.publish(first)
    old = {name: keys.dump(name) for name in keys.scan_iter()}
    pipeline.publish(second)
    for name, value in old.items():  # as a replica that is promoted has it
        keys.restore(name, 0, value, replace=True)
    pipeline.publish(stream("s", linear=5, linear_prev=5, writers=[WriterRow("w", 1, 5, is_retired=True)]))
    assert [(it["prev"], it["id"]) for it in entries(keys)] == [("0", "3"), ("3", "5")]
    assert keys.get(key("s", "token")) == "m5"


def test_list_with_too_much_missing_begins_anew(
    pipeline: Pipeline, shown: Redis, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 3: where more is missing than a refill copies, the list begins anew and is chained from there."""
    steps = list(moves(*range(1, 41)))
    pipeline.publish(steps[0])
    for step in steps[1:]:
        pipeline.commit(step)
    monkeypatch.setattr("tidemark.sinks.redis.mirror.MAX_REFILL_ENTRIES", 12)
    pipeline.restarted(shown).refill()
    assert [it["id"] for it in entries(keys)] == [str(n) for n in range(29, 41)]
    assert keys.hgetall(key("s", "positions")) == {"w": "40"}


def test_rejoined_writer_is_shown_where_postgres_has_it(pipeline: Pipeline, keys: Any) -> None:
    """Rules 2 and 3: a writer that was dropped and joins again is shown cut to what was open, in Redis as well."""
    pipeline.publish(stream("s", advance("w", 0, 100), linear=100))
    pipeline.publish(stream("s", dropped_writers=["w"], linear=100))
    assert keys.hgetall(key("s", "positions")) == {}
    pipeline.publish(stream("s", advance("w", 0, 60, empty=60, epoch=2), linear=100))
    assert keys.hgetall(key("s", "positions")) == {"w": "100"}
    pipeline.publish(stream("s", dropped_writers=["w"], linear=100))
    pipeline.publish(stream("s", advance("w", 0, 130, unseen=130, epoch=3), linear=130))
    assert [(it["prev"], it["id"], it["unseen"]) for it in entries(keys)] == [("100", "130", "30")]


def test_owner_that_lost_shows_nothing(pipeline: Pipeline, shown: Redis, keys: Any) -> None:
    """Rule 6: a mirror whose lease was taken over refuses, and so does Redis if the mirror does not know it yet."""
    first, second = moves(3, 5)
    pipeline.publish(first)
    made = pipeline.commit(second)
    keys.hset(key("s", "fence"), "token", pipeline.lease.token + 1)
    with pytest.raises(LeaseLost):
        pipeline.mirror.publish(*made)
    pipeline.lease.note_lost(pipeline.lease.token + 1)
    with pytest.raises(LeaseLost):
        pipeline.mirror.refill()
    assert keys.get(key("s", "linear")) == "3"


def test_late_completions_after_a_restore_are_told(pipeline: Pipeline, shown: Redis, keys: Any, sql: Any) -> None:
    """Rules 5 and 10: a database that went back gives no number of a late completion again, so what comes late after
    that is told to readers, and in order."""

    def told() -> list[int]:
        return [int(it["number"]) for it in entries(keys) if it["kind"] == "LATE"]

    pipeline.store.set_late_numbers_ahead()
    pipeline.move("w", 0, 9)
    for id_ in (1, 2, 3):
        pipeline.publish(comes_late(id_))
    first, *lost = told()
    sql.execute("delete from tidemark.late_completions where number > %s", (first,))
    sql.execute("select setval('tidemark.late_completions_number_seq', %s)", (first,))
    pipeline.store.set_late_numbers_ahead()
    pipeline.mirror = pipeline.restarted(shown)
    for id_ in (4, 5):
        pipeline.publish(comes_late(id_))
    assert told()[:3] == [first, *lost]
    assert len(told()) == 5
    assert told() == sorted(set(told()))


@pytest.fixture
def watch(pipeline: Pipeline, dsn: str, shown: Redis, lease: Lease) -> Iterator[Maintenance]:
    terms = MaintenanceConfig(poll_seconds=0.1, compare_seconds=60, retention_seconds=60)
    with (
        # The batches are of some day in the past.
        Postgres(PostgresConfig(dsn, Retention(history_days=10_000))) as store,
        Maintenance([pipeline.mirror], store, lease, terms) as watch,
    ):
        eventually(lambda: shown.replace_sentinel("") is not None)
        yield watch


class Slow:
    """A sink that takes 10 s to be compared; knows how often it was."""

    name = "slow"

    def __init__(self) -> None:
        self.now = 0.0
        self.refills = 0
        self.spoilt: dict[str, str] = {}

    def monotonic(self) -> float:
        return self.now

    def check_for_loss(self) -> bool:
        return False

    def faults(self) -> dict[str, str]:
        return self.spoilt

    def refill(self) -> RefillResult:
        self.refills += 1
        self.now += 10
        return RefillResult(0)


@pytest.mark.parametrize(("spoilt", "wait"), [({}, 200), ({"s": "a fault"}, 60)])
def test_many_streams_are_compared_less_often(
    store: Postgres, lease: Lease, monkeypatch: pytest.MonkeyPatch, spoilt: dict[str, str], wait: int
) -> None:
    """Rule 8: to compare what is idle takes a twentieth of the time at most; while one is to be tried again, more."""
    sink = Slow()
    sink.spoilt = spoilt
    monkeypatch.setattr("tidemark.sinks.background.time", sink)
    maintenance = Maintenance([cast(Sink, sink)], store, lease, MaintenanceConfig())
    for at, refills in ((0, 1), (9 + wait, 1), (10 + wait, 2)):
        sink.now = at
        maintenance.work()
        assert sink.refills == refills


def test_thousand_streams_are_refilled_without_traffic(
    pipeline: Pipeline, shown: Redis, lease: Lease, keys: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rule 4: a flushed Redis has all of 1 000 streams with 8 writers again within 5 s, although no batch comes."""
    writers = [f"w{n}" for n in range(8)]
    for step in (1, 2):
        pipeline.publish(
            *(
                stream(f"s{n}", *(advance(writer, step - 1, step) for writer in writers), linear=step)
                for n in range(1000)
            )
        )
    with Maintenance([pipeline.mirror], pipeline.store, lease, MaintenanceConfig()):
        eventually(lambda: keys.get(SENTINEL_KEY) is not None)
        keys.flushall()
        began = time.monotonic()
        eventually(lambda: keys.scard(STREAMS_KEY) == 1000)
        taken = time.monotonic() - began
    assert keys.hgetall(key("s999", "positions")) == dict.fromkeys(writers, "2")
    with capsys.disabled():
        print(f" [1 000 streams refilled within {taken:.2f} s] ", end="")  # noqa: T201


@pytest.mark.usefixtures("watch")
def test_redis_that_lost_its_last_second_is_made_good(pipeline: Pipeline, shown: Redis, keys: Any) -> None:
    """Rule 4: a Redis that comes back without its newest writes is noticed by the stamp it does not remember."""
    first, second = moves(3, 5)
    pipeline.publish(first)
    old = {name: keys.dump(name) for name in keys.scan_iter()}
    pipeline.publish(second)
    stamp = keys.get(SENTINEL_KEY)
    eventually(lambda: keys.get(SENTINEL_KEY) != stamp)
    pipe = keys.pipeline()
    pipe.flushall()
    for name, value in old.items():
        pipe.restore(name, 0, value)
    pipe.execute()
    eventually(lambda: keys.get(key("s", "linear")) == "5")
    assert [it["id"] for it in entries(keys)] == ["3", "5"]


@pytest.mark.usefixtures("watch")
def test_redis_that_was_away_is_refilled(pipeline: Pipeline, keys: Any, redis_server: RedisServer) -> None:
    """A Redis that died and came back without its data is filled as soon as it answers."""
    pipeline.publish(*moves(3))
    redis_server.kill()
    time.sleep(0.5)
    redis_server.start()
    keys.flushall()
    eventually(lambda: keys.get(key("s", "linear")) == "3")


def test_watch_makes_tomorrows_history(pipeline: Pipeline, shown: Redis, lease: Lease, sql: Any) -> None:
    """The partition of the next day is there before the day begins."""
    with Maintenance([pipeline.mirror], pipeline.store, lease, MaintenanceConfig(poll_seconds=0.05)):
        query = "select 1 from pg_class where relname = 'packed_advances_' || to_char({}, 'YYYYMMDD')"
        tomorrow = query.format("(now() at time zone 'UTC')::date + 1")
        eventually(lambda: sql.execute(tomorrow).fetchone() is not None)


def test_watch_ends_with_the_lease(pipeline: Pipeline, shown: Redis, lease: Lease) -> None:
    """Rule 6: a watch whose lease was lost touches Redis no more."""
    with Maintenance([pipeline.mirror], pipeline.store, lease, MaintenanceConfig(poll_seconds=0.05)):
        lease.note_lost(lease.token + 1)
        eventually(lambda: all(thread.name != "maintenance" for thread in threading.enumerate()))


def test_every_kind_of_spoilt_key_is_the_fault_of_its_stream(
    pipeline: Pipeline, shown: Redis, lease: Lease, keys: Any
) -> None:
    """Whichever key somebody else has put there, and whatever it holds: the stream is named in Postgres with what to
    do, nothing of it is half written, the other goes on, and deleting the key brings all of it back."""
    spoils: dict[str, Callable[[Any, str], object]] = {
        "positions": lambda keys, name: keys.rpush(name, "x"),
        "linear": lambda keys, name: keys.rpush(name, "x"),
        "allocated": lambda keys, name: keys.hset(name, "x", "y"),
        "advances": lambda keys, name: keys.set(name, "x"),
        "fence": lambda keys, name: keys.set(name, "x"),
    }
    garbage: dict[str, Callable[[Any, str], object]] = {
        "linear": lambda keys, name: keys.set(name, "first"),
        "positions": lambda keys, name: keys.hset(name, "w", "first"),
        "fence": lambda keys, name: keys.hset(name, "token", "99999999999999999999999"),
    }
    bytes_: dict[str, Callable[[Any, str], object]] = {
        "linear": lambda keys, name: keys.set(name, b"\xff" * 20),
        "positions": lambda keys, name: keys.hset(name, b"\xff", "1"),
        "fence": lambda keys, name: keys.hset(name, "token", b"\xff" * 30),
    }
    steps = zip(moves(*range(1, 50)), moves(*range(1, 50), name="}x"), strict=True)
    pipeline.publish(*next(steps))
    intervals = MaintenanceConfig(poll_seconds=0.02, compare_seconds=0.02)
    with Maintenance([pipeline.mirror], pipeline.store, lease, intervals):
        for what, spoil in [*spoils.items(), *garbage.items(), *bytes_.items()]:
            with keys.pipeline() as at_once:  # else the mirror may mend it in between
                at_once.delete(key("}x", what))
                spoil(at_once, key("}x", what))
                at_once.execute()
            pipeline.publish(*next(steps))
            eventually(
                lambda: [it.stream for it in pipeline.store.conditions.faults()] == ["}x"], what=partial(str, what)
            )
            assert "delete the keys of the stream, tidemark:{{>x}:*" in pipeline.store.conditions.faults()[0].problem
            moved = next(steps)
            pipeline.publish(*moved)
            assert keys.get(key("s", "token")) == f"m{moved[0].linear}"
            keys.delete(key("}x", what))
            eventually(lambda: pipeline.store.conditions.faults() == [], what=partial(str, what))
            assert keys.get(key("}x", "token")) == f"m{moved[1].linear}"
            assert keys.hgetall(key("}x", "positions")) == {"w": str(moved[1].linear)}


def test_progress_of_a_rebuild(pipeline: Pipeline, store: Postgres, shown: Redis, lease: Lease, keys: Any) -> None:
    """The streams that Redis lacks, and nothing that it has."""
    for name in ("a", "b", "c"):
        pipeline.publish(stream(name, advance("w", 0, 3), linear=3))
    keys.flushall()
    steps = list[int]()

    @contextmanager
    def noting(total: int) -> Iterator[Callable[[int], None]]:
        steps.append(total)
        yield steps.append

    Mirror(store, shown, lease, noting).refill()
    assert steps == [3, 3]
