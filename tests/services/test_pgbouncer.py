"""Services behind a real PgBouncer in transaction mode, and a relay that is sent there by mistake."""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg

from tests.services.pgbouncer import CONNECTIONS, PgBouncer
from tests.services.shop import TIDEMARK, Shop
from tests.waiting import eventually
from tidemark import Writer
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer
from tidemark.common.environment import child_environment

CLIENTS, EACH = 24, 12
PLACE = """
with fact as (select tidemark.append('orders', %s::jsonb) as id)
insert into orders (stream_id, total) select id, %s from fact
"""
OWN = """
select count(*) from pg_settings where source = 'session' and name <> 'application_name'
    and name not in ('client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings')
union all select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()
union all select count(*) from pg_prepared_statements
"""
"""What a session may have of its own; the five settings are those of a client that PgBouncer gives back to it."""


def test_what_many_clients_commit_is_told(shop: Shop, pooler: PgBouncer, postgres: PostgresServer) -> None:
    """They are more than the pooler has connections, a third of their transactions roll back, and the server is killed
    underneath: the facts are those that were committed, and nothing of the clients stays in the sessions."""
    half = threading.Semaphore(0)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(_serve, pooler.dsn(shop.dsn), number, half) for number in range(CLIENTS)]
        for _ in clients:
            half.acquire()
        postgres.kill()
        postgres.start()
        for client in clients:
            client.result(60)
    assert len(shop.proved()) >= CLIENTS * EACH
    assert _leaked(pooler, shop) == {(0,)}


def _serve(dsn: str, number: int, half: threading.Semaphore) -> None:
    """Place orders, each in a transaction. The end of the server is met once or, by who is quick, a few times."""
    done = met = 0
    while done < EACH:
        with eventually(lambda: _connected(dsn), 60.0) as connection:
            try:
                while done < EACH:
                    with connection.transaction(force_rollback=True):
                        _place(connection, number)
                    with connection.transaction():
                        _place(connection, number)
                        # psycopg's own would hide that the server is gone
                        connection.execute("savepoint again", prepare=False)
                        _place(connection, number)
                        connection.execute("rollback to again", prepare=False)
                    done += 1
                    if done == EACH // 2:
                        half.release()
            except psycopg.Error:
                met += 1
                if met > 5:
                    raise


def _connected(dsn: str) -> psycopg.Connection | None:
    try:
        connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
        connection.execute("select 1", prepare=False)
    except psycopg.Error:
        return None
    return connection


def _place(connection: psycopg.Connection, total: int) -> None:
    """In SQL, or with the client, which prepares nothing though the connection would."""
    if total % 2:
        connection.execute(PLACE, [f'{{"total": {total}}}', total], prepare=False)
    else:
        id = Writer().append(connection, "orders", {"total": total})
        connection.execute("insert into orders (stream_id, total) values (%s, %s)", [id, total], prepare=False)


def _leaked(pooler: PgBouncer, shop: Shop) -> set[tuple[int]]:
    """What each of the pooler's sessions has of its own: all of them at once, so that none is looked at twice."""
    looked = [psycopg.connect(pooler.dsn(shop.dsn), prepare_threshold=None) for _ in range(CONNECTIONS)]
    try:
        return {row for connection in looked for row in connection.execute(OWN).fetchall()}
    finally:
        for connection in looked:
            connection.close()


def test_a_relay_behind_it_is_refused(shop: Shop, pooler: PgBouncer, kafka: KafkaServer) -> None:
    """Its proof needs a session that is its own: it says so, and leaves nothing in those of others."""
    changes = {
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": "shop_1.facts",
        "TIDEMARK_POSTGRES_DSN": pooler.dsn(shop.dsn),
    }
    for verb in ([], ["migrate"], ["blockers"]):
        done = subprocess.run(
            [*TIDEMARK, "relay", *verb],
            env=child_environment(changes),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2, done
        assert "a pooler" in done.stderr
        assert "direct" in done.stderr
    assert _leaked(pooler, shop) == {(0,)}
