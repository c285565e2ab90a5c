"""What holds a position: a writer that is dead or silent, or waits for a transaction that hangs."""

import time

import psycopg
from confluent_kafka import Producer

from tests.fix_pipeline import Site
from tests.incidents.scene import Scene
from tidemark.streaming.wire.records import Join, Rdata, Record, encode, encode_row

NOTHING = encode_row({})


def fact(stream: str, writer: str, id: int, prev: int | None = None) -> Rdata:
    return Rdata(stream=stream, writer=writer, epoch=1, prev=id - 1 if prev is None else prev, id=id, row=NOTHING)


def aged(site: Site, seconds: float, *records: Record) -> None:
    """Send facts of a program that sent them so long ago: Kafka's time of a record is its producer's."""
    producer, sent = Producer(site.kafka.producer_settings()), int((time.time() - seconds) * 1000)
    for record in records:
        producer.produce(site.facts, key=record.stream.encode(), value=encode(record), timestamp=sent)
    assert producer.flush(30) == 0


def test_a_silent_writer(scene: Scene) -> None:
    """It dies between two transactions, holding nothing that anybody knows of; the other writer goes on."""
    site = scene.site
    with scene.incident("silent-writer", "TidemarkWriterSilent", "TidemarkManualOverride") as incident:
        site.send(*(Join(stream="payments", writer=name, epoch=1, id=0) for name in ("till-1", "till-2")))
        site.send(fact("payments", "till-1", 7, 0), fact("payments", "till-2", 8, 0))
        site.reaches("payments", linear=8)
        site.send(fact("payments", "till-2", 20, 8))
        incident.wait_for_alert("TidemarkWriterSilent")
        said = incident.tidemark("gaps")
        assert "payments: till-1: no record beyond ID 7" in said
        assert "no record for" in said
        incident.tidemark("status", "payments")
        done = incident.act("retire", "payments", "till-1", why="sold on Friday")
        assert done.splitlines()[-1] == "applied: till-1 is at 7, linear position 20"
        site.reaches("payments", linear=20)
        incident.wait_for_alert("TidemarkManualOverride")
        assert "sold on Friday" in incident.tidemark("overrides", "list", "payments")


def test_a_dead_writer(scene: Scene) -> None:
    """It dies in the middle of a transaction, above which it had completed another: a gap with its name."""
    site = scene.site
    with scene.incident("dead-writer", "TidemarkGapOld") as incident:
        aged(site, 120.0, *(Join(stream="invoices", writer=name, epoch=1, id=0) for name in ("w1", "w2")))
        aged(site, 120.0, fact("invoices", "w1", 7, 0), fact("invoices", "w1", 9, 8))
        site.send(fact("invoices", "w2", 20, 0))
        site.reaches("invoices", w1=7, w2=20, linear=7)
        incident.wait_for_alert()
        then = incident.now()
        said = incident.tidemark("gaps")
        assert "invoices: w1: ID 8 open" in said
        assert "no record for 2 min" in said
        # It is started again, and its JOIN settles what its last life left open.
        site.send(Join(stream="invoices", writer="w1", epoch=2, id=20))
        site.reaches("invoices", w1=20, linear=20)
        told = incident.tidemark("explain", "invoices", "--at", then)
        assert "blocked by w1 (epoch 1): ID 8 open" in told


def test_a_hung_transaction(scene: Scene) -> None:
    """A service takes an ID, and its transaction stays open; other transactions go on."""
    site = scene.site
    with scene.incident("hung-transaction", "TidemarkRelayTransactionOld", "TidemarkGapOld") as incident:
        site.reaches("orders", linear=scene.append("orders"))
        hung = psycopg.connect(scene.shop_dsn, application_name="checkout")
        hung.execute("select tidemark.append('orders', '{}')")
        last = max(scene.append("orders") for _ in range(3))
        incident.wait_for_alert("TidemarkRelayTransactionOld")
        incident.wait_for_alert("TidemarkGapOld")
        then = incident.now()
        assert "open transaction" in incident.tidemark("gaps")
        said = incident.tidemark("relay", "--dsn", scene.shop_dsn, "blockers")
        pid = hung.info.backend_pid
        assert f"pid {pid}" in said
        assert "session named checkout" in said
        incident.psql(scene.shop_dsn, f"select pg_terminate_backend({pid})")
        hung.close()
        site.reaches("orders", linear=last)
        assert "blocked by shop" in incident.tidemark("explain", "orders", "--at", then)
