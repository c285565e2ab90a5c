"""Writers that use Kafka's own transactions."""

from confluent_kafka import Producer

from tests.fix_pipeline import Site
from tidemark.streaming.records import Rdata, encode, row


def fact(id: int) -> bytes:
    return encode(Rdata(stream="orders", writer="shop", id=id, row=row({})))


def test_what_a_writer_aborted_is_no_evidence(site: Site) -> None:
    """Rule 1: fact 2 was taken back by its transaction, so 3 waits until 2 is there for good."""
    site.make_topics()
    producer = Producer(site.kafka.producer() | {"transactional.id": site.facts})
    producer.init_transactions(30)
    for value, keep in ((fact(1), True), (fact(2), False), (fact(3), True)):
        producer.begin_transaction()
        producer.produce(site.facts, key=b"orders", value=value)
        if keep:
            producer.commit_transaction(30)
        else:
            producer.flush(30)
            producer.abort_transaction(30)
    site.start().ready()
    site.reaches("orders", shop=1, linear=1)
    [(pending,)] = site.sql("select count(*) from tidemark.stream_gaps where closed_at is null")
    assert pending == 1
    site.send(Rdata(stream="orders", writer="shop", id=2, row=row({})))
    site.reaches("orders", shop=3, linear=3)
