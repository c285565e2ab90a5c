"""What the pipeline reads of Kafka: both topics, and transactions."""

from confluent_kafka import Producer

from tests.app.running import PATIENCE
from tests.fix_pipeline import PARTITIONS, Site
from tests.waiting import eventually
from tidemark.sources.producer import RecordProducer
from tidemark.sources.topics import Topics
from tidemark.streaming.wire.records import Join, Rdata, Record, Skip, encode, encode_row


def fact(id: int, prev: int) -> Record:
    return Rdata(stream="orders", writer="shop", epoch=1, prev=prev, id=id, row=encode_row({}))


def test_transactions_and_both_topics_are_read_to_their_ends(site: Site) -> None:
    """Rules 1, 3 and 5: facts of both topics are read, and of a transaction what it committed, up to its mark. Killed,
    it is followed by a query that reads on from where Postgres says."""
    transactional = Producer({**site.kafka.producer_settings(), "transactional.id": site.facts})
    transactional.init_transactions(30)
    site.send(Join(stream="orders", writer="shop", epoch=1, id=0), fact(1, 0))
    first = site.start(max_records_per_batch=2)
    site.reaches("orders", shop=1, linear=1)
    for records, end in (
        ([fact(7, 1)], transactional.abort_transaction),
        ([fact(2, 1)], transactional.commit_transaction),
    ):
        transactional.begin_transaction()
        for record in records:
            transactional.produce(site.facts, key=b"orders", value=encode(record))
        transactional.flush(30)
        end(30)
    site.reaches("orders", shop=2, linear=2)
    control = RecordProducer(site.kafka, site.control, give_up_after=30.0)
    control.send(
        "orders", encode(Skip(stream="orders", writer="shop", epoch=1, prev=2, id=3, by="me", why="lost", beyond=True))
    )
    control.deliver(30.0)
    site.reaches("orders", shop=3, linear=3)
    partitions = {site.facts: PARTITIONS, site.control: 1}
    eventually(
        lambda: (
            {(topic, number): at for topic, number, at in site.sql("select * from tidemark.kafka_offsets") if at}
            == {place: end for place, end in Topics(site.kafka).end_offsets(partitions).items() if end}
        ),
        PATIENCE,
        lambda: "every offset counted, marks of transactions too",
    )
    first.kill()
    site.send(fact(4, 3))
    site.start(max_records_per_batch=2)
    site.reaches("orders", shop=4, linear=4)
    site.send(fact(5, 4))
    site.reaches("orders", shop=5, linear=5)
    assert site.sql("select sum(facts)::int, sum(skipped)::int from tidemark.position_advances") == [(4, 1)]
