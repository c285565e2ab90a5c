"""A real standby and a real backup of a Postgres, which take its place."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_servers import own_postgres
from tidemark.app.stack.postgres import PostgresReplica, PostgresServer
from tidemark.app.stack.processes import find_process

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with own_postgres(tmp_path_factory.mktemp("origin")) as server:
        yield server


@pytest.fixture
def origin(server: PostgresServer) -> PostgresServer:
    """With the empty table `kept`."""
    ask(server, "drop table if exists kept")
    ask(server, "create table kept (n int)")
    return server


def ask(server: PostgresServer, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


HISTORY = (
    "select s.system_identifier::text || '/' || c.timeline_id from pg_control_system() s, pg_control_checkpoint() c"
)


def test_a_standby_takes_over_with_all_or_without_what_it_had_not_heard(origin: PostgresServer) -> None:
    """A synchronous one loses nothing; one that lagged loses what was committed since; each begins a timeline."""
    histories = [ask(origin, HISTORY)]
    for lags, n in ((False, 1), (True, 2)):
        replica = PostgresReplica(origin)
        replica.copy(as_standby=True)
        replica.start()
        replica.wait_until_streaming(is_synchronous=not lags)
        if lags:
            replica.disconnect()
        ask(origin, f"insert into kept values ({n})")
        replica.promote()
        replica.replace_origin()
        origin.start()
        assert ask(origin, "select n from kept") == [(1,)]
        histories.append(ask(origin, HISTORY))
        ask(origin, "insert into kept values (3)")  # nothing waits for a standby that is gone
        ask(origin, "delete from kept where n = 3")
    assert len({str(it) for it in histories}) == 3


def test_an_image_is_put_back_with_the_history_that_it_had(origin: PostgresServer) -> None:
    """What was written since is gone, and the server cannot be told from the one before."""
    before = ask(origin, HISTORY)
    replica = PostgresReplica(origin)
    replica.copy(as_standby=False)
    ask(origin, "insert into kept values (1)")
    replica.start()
    assert ask(replica, "select n from kept") == []
    replica.replace_origin()
    origin.start()
    assert (ask(origin, "select n from kept"), ask(origin, HISTORY)) == ([], before)


def test_no_session_of_a_stopped_origin_stays_if_its_postmaster_is_killed(origin: PostgresServer) -> None:
    """A client of such a session would wait for its answer for ever."""
    replica = PostgresReplica(origin)
    replica.copy(as_standby=False)
    replica.start()
    with psycopg.connect(origin.dsn("postgres")) as session:
        replica.freeze_origin()
        postmaster = find_process(origin.home, origin.name)
        assert postmaster is not None
        postmaster.kill()
        replica.replace_origin()
        with pytest.raises(psycopg.OperationalError):
            session.execute("select 1")
    origin.start()


def test_an_origin_goes_on_alone(origin: PostgresServer) -> None:
    """Without a replica that was given up; and after a start, at whatever step whoever made it was killed."""
    replica = PostgresReplica(origin)
    replica.copy(as_standby=True)
    replica.start()
    replica.wait_until_streaming(is_synchronous=True)
    replica.freeze_origin()
    replica.discard()
    ask(origin, "insert into kept values (1)")
    ask(origin, "alter system set synchronous_standby_names = '*'")
    origin.stop()
    origin.data.rename(origin.old_data)
    origin.start()
    ask(origin, "insert into kept values (2)")
    assert ask(origin, "select n from kept") == [(1,), (2,)]
