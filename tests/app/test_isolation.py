"""Records from which something follows that Postgres refuses: set aside one by one, while everything else goes on."""

import pytest
from confluent_kafka import Producer

from tests.app.proofs import dead_letters, verified
from tests.app.running import PATIENCE
from tests.fix_pipeline import Site
from tests.waiting import eventually
from tidemark.streaming.wire.records import Join, Rdata, Record, Skip, encode, encode_row

pytestmark = pytest.mark.slow

STREAMS = [f"s{number}" for number in range(10)]
FACTS = 40


def fact(stream: str, writer: str, id: int, prev: int, epoch: int = 1) -> Record:
    return Rdata(stream=stream, writer=writer, epoch=epoch, prev=prev, id=id, row=encode_row({}))


def override(site: Site, record: Skip) -> None:
    """Send an operator's record past the verbs, which would refuse some of them."""
    producer = Producer(site.kafka.producer_settings())
    producer.produce(site.control, key=record.stream.encode(), value=encode(record))
    assert producer.flush(30) == 0


def reasons(site: Site) -> list[tuple[str, str]]:
    """Key and reason of each dead letter."""
    return sorted((str(letter.key(), "utf-8"), origin.reason) for origin, letter in dead_letters(site))


def refuse(site: Site, constraint: str) -> None:
    site.sql(f"alter table tidemark.{constraint} not valid")


def test_a_record_that_postgres_refuses_is_set_aside_and_all_others_count_once(site: Site) -> None:
    """Rules 3, 5 and 9: the streams of its batch go on, each fact once. The linear position of its own stream is held,
    as the record's writer is not known; the writer's next JOIN frees it."""
    refuse(site, "stream_positions add constraint odd check (writer <> 'odd')")
    refuse(site, "skips add constraint odd check (why <> 'odd')")
    site.send(*(Join(stream=stream, writer="shop", epoch=1, id=0) for stream in STREAMS))
    site.send(*(fact(stream, "shop", id, id - 1) for id in range(1, FACTS) for stream in STREAMS))
    site.send(Join(stream="s3", writer="odd", epoch=1, id=FACTS - 1))
    site.send(*(fact(stream, "shop", FACTS, FACTS - 1) for stream in STREAMS))
    site.send(fact("s3", "odd", FACTS + 1, FACTS - 1), fact("s3", "shop", FACTS + 2, FACTS))
    for why in ("odd", "o\0d"):
        override(
            site, Skip(stream="s5", writer="shop", epoch=1, prev=FACTS, id=FACTS + 1, by="ann", why=why, beyond=True)
        )
    running = site.start()
    for stream in STREAMS:
        site.reaches(stream, shop=FACTS + 2 * (stream == "s3"))
    wanted = [("s3", "not_storable"), ("s5", "bad_text"), ("s5", "not_storable")]
    eventually(lambda: reasons(site) == wanted, PATIENCE, lambda: f"{reasons(site)} is {wanted}")
    running.says("Postgres refuses the effects of a record", times=2)
    assert site.positions("s3")["linear"] == FACTS - 1  # since the JOIN that was refused
    counted = "select count(*), sum(facts)::bigint from tidemark.position_advances"
    ((_, facts),) = site.sql(counted)
    assert facts == FACTS * len(STREAMS) + 1

    # What refuses everything is no record's fault: nothing is set aside, and what waits is applied once it is mended.
    refuse(site, "applied_batches add constraint nothing check (false)")
    site.send(fact("s0", "shop", FACTS + 1, FACTS))
    running.says("Postgres refuses every batch")
    site.sql("alter table tidemark.applied_batches drop constraint nothing")
    site.reaches("s0", shop=FACTS + 1)
    assert reasons(site) == wanted

    site.sql("alter table tidemark.stream_positions drop constraint odd")
    site.send(Join(stream="s3", writer="odd", epoch=2, id=FACTS + 2))
    site.reaches("s3", linear=FACTS + 2, odd=FACTS + 2)
    assert reasons(site) == wanted
    ((_, facts),) = site.sql(counted)
    assert facts == FACTS * len(STREAMS) + 3
    verified(site)
