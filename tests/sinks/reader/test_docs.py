"""The examples of the pages for readers work."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import psycopg

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.waiting import eventually
from tidemark.streaming.core.effects import LateCompletion


def test_the_examples_run_as_they_stand(pipeline: Pipeline, redis_url: str, dsn: str, sql: psycopg.Connection) -> None:
    """The service sums three orders and ends when told to, and parks one where it may; tokens and
    advances are shown."""
    pages = "".join(Path(f"docs/how-to/{name}.md").read_text() for name in ("read-facts", "read-positions"))
    loop, parking, _session, metrics, look, follow = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    named = {"SHOP_DSN": dsn, "BOOKS_DSN": dsn, "TIDEMARK_REDIS_URL": redis_url, "TIDEMARK_POSTGRES_DSN": dsn}
    environment = {**os.environ, **named}
    sql.execute("create table orders (stream_id bigint primary key, total integer not null)")
    sql.execute("insert into orders values (1, 40), (2, 7), (3, 7), (4, 1000)")
    pipeline.publish(stream("orders", advance("shop-1", 0, 3), linear=3))
    service = subprocess.Popen([sys.executable, "-c", loop], env=environment, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: sql.execute("select to_regclass('booked')").fetchone() != (None,))
        eventually(lambda: sql.execute("select sum(total) from booked").fetchone() == (54,))
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.wait()
    sql.execute("drop schema tidemark_reader cascade")
    sql.execute("alter table orders rename to elsewhere")
    failed = subprocess.run(
        [sys.executable, "-c", loop], env=environment, check=False, timeout=60, capture_output=True, text=True
    )
    sql.execute("alter table elsewhere rename to orders")
    line, hint = failed.stderr.splitlines()
    assert failed.returncode == 2
    assert line.startswith("error: Postgres at ")
    assert line.endswith('relation "orders" does not exist; check the name of the table')
    assert hint.startswith("Hint: Correct what the message names")
    sql.execute("delete from booked")
    sql.execute("drop schema tidemark_reader cascade")
    book = (
        "def book(row, connection):\n"
        "    connection.execute('insert into booked values (%s, %s)', [row['stream_id'], row['total']])\n"
        "    if row['stream_id'] == 1:\n"
        "        raise KeyError('id')\n"
    )
    parks = book + loop[: loop.index("    for batch in")] + indent(parking, "    ")
    service = subprocess.Popen([sys.executable, "-c", parks], env=environment, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: sql.execute("select sum(total) from booked").fetchone() == (14,))
        assert sql.execute("select id, reason from tidemark_reader.parked").fetchall() == [(1, "KeyError: 'id'")]
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.wait()
    report = f"{metrics}\nreport(ReadProgress('books', 'orders', None, 2, 1, False, 0.1, 0))"
    subprocess.run([sys.executable, "-c", report], env=environment, check=True, timeout=60)
    said = subprocess.run(
        [sys.executable, "-c", look], env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert said.stdout.split() == ["m3", "{'shop-1':", "3}", "Order.AFTER", "m5"]
    said = subprocess.run(
        [sys.executable, "-c", follow], env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert said.stdout.splitlines() == [
        "shop-1 0 3 Evidence(facts=3, empty=0, unseen=0, skipped=0)",
        "Place(linear=0, positions={'shop-1': 3}, late=0)",
    ]


def test_the_example_is_right_after_a_restore(
    pipeline: Pipeline, redis_url: str, dsn: str, sql: psycopg.Connection
) -> None:
    """A restore takes three orders of one writer, and one of their IDs is given out again. The other writer's orders
    between them stay booked. Later a fact comes whose ID an operator has settled."""
    loop = re.findall(r"```python\n(.*?)```", Path("docs/how-to/read-facts.md").read_text(), re.DOTALL)[0]
    environment = {**os.environ, "SHOP_DSN": dsn, "BOOKS_DSN": dsn, "TIDEMARK_REDIS_URL": redis_url}
    sql.execute("create table orders (stream_id bigint primary key, total integer not null)")
    sql.execute("insert into orders select id, 10 * id from generate_series(1, 6) as id")
    both = advance("shop-1", 0, 6, facts=4, empty=2), advance("shop-2", 0, 5, facts=2, empty=3)

    def booked() -> dict[int, int]:
        return dict(sql.execute("select id, total from booked").fetchall())

    pipeline.publish(stream("orders", *both, linear=6))
    service = subprocess.Popen([sys.executable, "-c", loop], env=environment, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: sql.execute("select to_regclass('booked')").fetchone() != (None,))
        eventually(lambda: booked() == {1: 10, 2: 20, 3: 30, 4: 40, 5: 50, 6: 60})
        sql.execute("delete from orders where stream_id in (3, 4, 6)")
        sql.execute("insert into orders values (4, 41)")
        restored = [_late(1, 3, 0, "regressed"), _late(3, 4, 1, "regressed"), _late(4, 6, 0, "regressed")]
        pipeline.publish(stream("orders", linear=6, linear_prev=6, late=restored))
        eventually(lambda: booked() == {1: 10, 2: 20, 4: 41, 5: 50})
        sql.execute("insert into orders values (8, 80)")
        settled = advance("shop-1", 6, 8, facts=1, skipped=1, epoch=2)
        pipeline.publish(stream("orders", settled, linear=8, linear_prev=6))
        eventually(lambda: booked() == {1: 10, 2: 20, 4: 41, 5: 50, 8: 80})
        sql.execute("insert into orders values (7, 70)")
        pipeline.publish(stream("orders", linear=8, linear_prev=8, late=[_late(6, 7, 1, "skipped")]))
        eventually(lambda: booked() == {1: 10, 2: 20, 4: 41, 5: 50, 7: 70, 8: 80})
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.wait()


def _late(prev: int, id: int, facts: int, why: str) -> LateCompletion:
    return LateCompletion(writer="shop-1", epoch=2, prev=prev, id=id, facts=facts, why=why)
