"""The SQL functions, as any client of the database calls them."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import conninfo, errors

from tidemark.app import relay
from tidemark.common.errors import BadSetting, Refused, Unavailable
from tidemark.sources.relay import queries, sequences
from tidemark.sources.relay.queries import SCHEMA, session_of
from tidemark.streaming.wire.records import is_name, is_writer_name


@pytest.fixture
def sql(ready: str) -> Iterator[psycopg.Connection]:
    """A session of the schema's owner, with a stream that goes up and one that goes down."""
    with psycopg.connect(ready, autocommit=True) as connection:
        connection.execute("select tidemark.create_stream('orders')")
        connection.execute("select tidemark.create_stream('history', 'backward')")
        yield connection


def outbox(sql: psycopg.Connection) -> list[tuple[int, list[str]]]:
    return sql.execute("select id, rows from tidemark.append_outbox order by abs(id)").fetchall()


def one(sql: psycopg.Connection, statement: str, *arguments: object) -> object:
    row = sql.execute(statement.encode(), arguments).fetchone()
    assert row is not None
    return row[0]


def test_a_fact_has_no_row_one_or_several(sql: psycopg.Connection) -> None:
    """Rows are JSON of any kind, given one by one or as an array; the IDs ascend from 1."""
    assert one(sql, """select tidemark.append('orders', '{"order": 17}')""") == 1
    assert one(sql, "select tidemark.append('orders')") == 2
    assert one(sql, """select tidemark.append('orders', '1', '"two"', 'null')""") == 3
    assert one(sql, "select tidemark.append('orders', variadic %s::jsonb[])", ["[]", "true"]) == 4
    assert outbox(sql) == [
        (1, ['{"order": 17}']),
        (2, []),
        (3, ["1", '"two"', "null"]),
        (4, ["[]", "true"]),
    ]


def test_ids_of_a_backward_stream_go_down(sql: psycopg.Connection) -> None:
    """From -1, or behind the ID that it was made after."""
    sql.execute("select tidemark.create_stream('older', direction => 'backward', after => -7)")
    assert [one(sql, f"select tidemark.append('{name}', '1')") for name in ("history", "history", "older")] == [
        -1,
        -2,
        -8,
    ]


def test_append_many_gives_each_row_an_id(sql: psycopg.Connection) -> None:
    """In their order, and none for none; 20 000 are one statement."""
    assert one(sql, "select tidemark.append_many('orders', %s::jsonb[])", ["1", "2"]) == [1, 2]
    assert one(sql, "select tidemark.append_many('history', %s::jsonb[])", ["1", "2"]) == [-1, -2]
    assert one(sql, "select tidemark.append_many('orders', '{}')") == []
    many = one(
        sql,
        "select tidemark.append_many('orders', array_agg(jsonb_build_object('order', at) order by at))"
        " from generate_series(1, 20000) as at",
    )
    assert many == [*range(3, 20003)]
    assert outbox(sql)[-1] == (20002, ['{"order": 20000}'])


def test_what_is_reserved_is_completed_in_the_same_transaction(sql: psycopg.Connection) -> None:
    """In a savepoint too; without that the ID stands there without rows."""
    with sql.transaction():
        first, second = (one(sql, "select tidemark.reserve('orders')") for _ in range(2))
        with sql.transaction():
            sql.execute("select tidemark.complete('orders', %s, '1', '2')", [second])
    assert outbox(sql) == [(first, []), (second, ["1", "2"])]


def test_a_writer_may_have_a_name(sql: psycopg.Connection) -> None:
    """Each of the functions takes it, and facts of all names share the sequence; without one it is the database."""
    assert one(sql, "select tidemark.append_as('web', 'orders', '1', '2')") == 1
    assert one(sql, "select tidemark.append_as('', 'orders')") == 2
    assert one(sql, "select tidemark.append_many('orders', %s::jsonb[], writer => 'till')", ["1", "2"]) == [3, 4]
    with sql.transaction():
        id = one(sql, "select tidemark.reserve('orders', writer => 'till')")
        sql.execute("select tidemark.complete('orders', %s, '1')", [id])
    rows = sql.execute("select id, writer from tidemark.append_outbox order by id").fetchall()
    assert rows == [(1, "web"), (2, ""), (3, "till"), (4, "till"), (5, "till")]


def test_a_writer_retires_only_where_that_is_certain(ready: str, sql: psycopg.Connection) -> None:
    """Not one that nobody knows, nor the database itself, nor while transactions of it run, prepared ones too, or its
    facts wait; each time it says which."""
    call = "select tidemark.retire_writer('web', 'orders')"
    with pytest.raises(errors.UndefinedObject, match="stream 'orders' has no writer 'web'"):
        sql.execute(call.encode())
    sql.execute("update tidemark.append_progress set writer = 'shop'")
    sql.execute("insert into tidemark.append_writers select 1, name, 7, 0 from unnest(array['web', 'shop']) as name")
    with pytest.raises(errors.InvalidParameterValue, match="'shop' is the database itself"):
        sql.execute("select tidemark.retire_writer('shop', 'orders')")
    with psycopg.connect(ready) as other:
        other.execute("select tidemark.reserve('orders', 'web')")
        with pytest.raises(errors.ObjectInUse, match=f"has an open transaction: pid {other.info.backend_pid}"):
            sql.execute(call.encode())
        other.execute("prepare transaction 'held'")
        with pytest.raises(errors.ObjectInUse, match="has an open transaction: a prepared transaction"):
            sql.execute(call.encode())
    sql.execute("commit prepared 'held'")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="facts of writer 'web' of stream 'orders' wait"):
        sql.execute(call.encode())
    sql.execute("begin isolation level repeatable read")
    with pytest.raises(errors.FeatureNotSupported, match="READ COMMITTED"):
        sql.execute(call.encode())
    sql.execute("rollback")
    sql.execute("delete from tidemark.append_outbox")
    assert one(sql, call) == 2
    assert sql.execute("select rows, writer from tidemark.append_outbox").fetchall() == [(["web"], "*")]


def test_a_stream_ends_where_all_of_it_is_told(ready: str, sql: psycopg.Connection) -> None:
    """Not while a transaction has an ID of it, which is named, or the relay something to tell. Then nobody appends to
    it, and made again it goes on behind its last ID, in its direction."""
    call = "select tidemark.drop_stream('history')"
    with psycopg.connect(ready) as other:
        other.execute("select tidemark.append('history', '1')")
        with pytest.raises(errors.ObjectInUse, match=f"'history' has open transactions: pid {other.info.backend_pid}"):
            sql.execute(call.encode())
        other.rollback()
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="'history' has IDs that the relay has not"):
        sql.execute(call.encode())
    sql.execute("update tidemark.append_progress set floor = -1 where number = 2")
    assert one(sql, call) == -1
    for gone in (call, "select tidemark.append('history', '1')", "select tidemark.reserve('history')"):
        with pytest.raises(errors.UndefinedObject, match="stream 'history' does not exist"):
            sql.execute(gone.encode())
    with pytest.raises(errors.DuplicateObject, match="exists already, in the other direction"):
        sql.execute("select tidemark.create_stream('history')")
    with pytest.raises(errors.InvalidParameterValue, match="dropped at ID -1"):
        sql.execute("select tidemark.create_stream('history', 'backward', -9)")
    sql.execute("select tidemark.create_stream('history', 'backward')")
    assert one(sql, "select tidemark.append('history', '1')") == -2
    assert one(sql, "select tidemark.append('orders', '1')") == 1


@pytest.mark.parametrize("name", ["*", "two words", "line\nfeed", "x" * 256, None])
def test_a_writer_has_no_name_that_kafka_would_not_take(sql: psycopg.Connection, name: str | None) -> None:
    """A fact with it could never be told."""
    for call in ("append_as(%(w)s, 'orders', '1')", "append_many('orders', '{1}', %(w)s)", "reserve('orders', %(w)s)"):
        with pytest.raises(errors.InvalidParameterValue, match="invalid writer name"):
            sql.execute(f"select tidemark.{call}".encode(), {"w": name})
    assert outbox(sql) == []


def test_no_other_id_can_be_completed(sql: psycopg.Connection) -> None:
    """Nobody knows any more whether such an ID was told as void, so a fact with it is refused."""

    def refused(id: object) -> None:
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="has not reserved ID"), sql.transaction():
            sql.execute("select tidemark.complete('orders', %s, '1')", [id])

    refused(5)
    refused(one(sql, "select tidemark.reserve('orders')"))  # in a transaction of its own
    with sql.transaction():
        with sql.transaction(force_rollback=True):
            id = one(sql, "select tidemark.reserve('orders')")
        refused(id)
        id = one(sql, "select tidemark.reserve('orders')")
        sql.execute("select tidemark.complete('orders', %s, '1')", [id])
        refused(id)


def test_a_rolled_back_savepoint_gives_its_lock_back(sql: psycopg.Connection) -> None:
    """Its ID is void although the transaction runs on; what was reserved outside is held on."""
    with sql.transaction():
        with sql.transaction(force_rollback=True):
            sql.execute("select tidemark.append('orders', '1')")
        number = one(sql, "select number from tidemark.append_streams where stream = 'orders'")
        held = (
            "select count(*) from pg_locks where locktype = 'advisory'"
            " and database = (select oid from pg_database where datname = current_database())"
            " and classid::bigint = %s + %s and objid = hashtext('')::oid"
        )
        assert one(sql, held, queries.LOCK_KEY_BASE, number) == 0
        with sql.transaction():
            sql.execute("select tidemark.append('orders', '1')")
        with sql.transaction(force_rollback=True):
            sql.execute("select tidemark.append('orders', '1')")
        assert one(sql, held, queries.LOCK_KEY_BASE, number) == 1


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ("append('order', '1')", errors.UndefinedObject, r"'order' does not exist(.|\n)*create_stream\('order'\)"),
        ("append('Sales 2', '1')", errors.InvalidParameterValue, "invalid stream name: 'Sales 2'"),
        ("append_many('', '{1}')", errors.InvalidParameterValue, "invalid stream name: ''"),
        ("reserve('or\u200bders')", errors.InvalidParameterValue, "invalid stream name"),
        ("complete('Sales 2', 1)", errors.InvalidParameterValue, "invalid stream name: 'Sales 2'"),
        ("drop_stream('Sales 2')", errors.InvalidParameterValue, "invalid stream name: 'Sales 2'"),
        ("retire_writer('w', 'Sales 2')", errors.InvalidParameterValue, "invalid stream name: 'Sales 2'"),
        ("retire_writer('two words', 'orders')", errors.InvalidParameterValue, "invalid writer name: 'two words'"),
        ("append(null, '1')", errors.InvalidParameterValue, "invalid stream name: NULL"),
        ("append('orders', null)", errors.NullValueNotAllowed, "a row is NULL"),
        ("append('orders', variadic null)", errors.NullValueNotAllowed, "the rows are NULL"),
        ("append_many('orders', null)", errors.NullValueNotAllowed, "the rows are NULL"),
        ("append('orders', variadic '{{1, 2}, {3, 4}}')", errors.ArraySubscriptError, "array of arrays"),
        ("append('orders', variadic array[array[to_jsonb(repeat('x', 600))]])", errors.ArraySubscriptError, "arrays"),
        ("append_many('orders', array[array[to_jsonb(repeat('x', 600))]])", errors.ArraySubscriptError, "arrays"),
        ("append_fact('*', 'orders', '{1}')", errors.InvalidParameterValue, "invalid writer name"),
        ("append_fact(null, 'orders', '{1}')", errors.InvalidParameterValue, "invalid writer name"),
        ("append_fact('', null, '{1}')", errors.InvalidParameterValue, "invalid stream name: NULL"),
        ("append_fact('', 'orders', null)", errors.NullValueNotAllowed, "the rows are NULL"),
        ("append('orders', '{\"total\": NaN}')", errors.InvalidTextRepresentation, "NaN"),
        ("append('orders', repeat('[', 300)::text || repeat(']', 300))", errors.UndefinedFunction, "does not exist"),
        ("append('orders', (repeat('[', 300) || repeat(']', 300))::jsonb)", errors.ProgramLimitExceeded, "nested"),
        ("append('orders', (repeat('[', 256) || repeat(']', 256))::jsonb)", errors.ProgramLimitExceeded, "nested"),
        (
            "append_many('orders', array[(repeat('[', 256) || repeat(']', 256))::jsonb])",
            errors.ProgramLimitExceeded,
            "256",
        ),
        (
            "append('orders', (repeat('[', 255) || '{}' || repeat(']', 255))::jsonb, to_jsonb(repeat('x', 600)))",
            errors.ProgramLimitExceeded,
            "nested 256 deep",
        ),
        ("append('orders', to_jsonb(repeat('x', 900001)))", errors.ProgramLimitExceeded, "900003 bytes"),
        ("append('orders', to_jsonb(array_fill(1e131000, array[7])))", errors.ProgramLimitExceeded, "bytes of JSON"),
        (
            "append('orders', variadic (select array_agg(to_jsonb(repeat('x', 700000))) from generate_series(1, 130)))",
            errors.ProgramLimitExceeded,
            "a fact of stream 'orders' has 91026260 bytes in 130 rows, and a fact may have 16777216",
        ),
        (
            "complete('orders', 1, variadic (select array_agg('{}'::jsonb) from generate_series(1, 90000)))",
            errors.ProgramLimitExceeded,
            "a fact of stream 'orders' has 18180000 bytes in 90000 rows",
        ),
        (
            "create_stream('two words')",
            errors.InvalidParameterValue,
            r"invalid stream name: 'two words'\nHINT:  A name has 1 to 255 characters, and no white space, control",
        ),
        ("create_stream('')", errors.InvalidParameterValue, "invalid stream name: ''"),
        ("create_stream('orders', 'backward')", errors.DuplicateObject, "other direction"),
        ("create_stream('new', 'sideways')", errors.InvalidParameterValue, "forward"),
        ("create_stream('new', after => -4)", errors.InvalidParameterValue, "forward"),
    ],
)
def test_what_could_not_be_told_is_refused(
    sql: psycopg.Connection, call: str, error: type[psycopg.Error], says: str
) -> None:
    """With an error that says what and where; the service's transaction knows it before it commits."""
    with pytest.raises(error, match=says):
        sql.execute(f"select tidemark.{call}".encode())
    assert outbox(sql) == []


def test_a_row_may_be_nested_255_deep(sql: psycopg.Connection) -> None:
    """Arrays and objects, empty and with a value in the innermost one, and in a row that is long."""
    rows = ["[" * 255 + value + "]" * 255 for value in ("", "1", '"' + "x" * 600 + '"')]
    rows.append('{"a": ' * 255 + "1" + "}" * 255)
    assert one(sql, "select tidemark.append('orders', variadic %s::jsonb[])", rows) == 1
    assert [len(kept) for _, kept in outbox(sql)] == [4]


@pytest.mark.parametrize(("direction", "sign"), [("forward", 1), ("backward", -1)])
def test_a_stream_that_exists_is_not_created_again_beyond_its_last_id(
    sql: psycopg.Connection, direction: str, sign: int
) -> None:
    """Its next IDs would be those of rows that `after` declares taken. What its IDs are beyond already is accepted."""
    create = "select tidemark.create_stream('sales', %s, %s)"
    sql.execute(create, [direction, 7 * sign])
    for after in (0, 3 * sign, 7 * sign):
        sql.execute(create, [direction, after])
    for last in (7 * sign, 9 * sign):
        with pytest.raises(errors.InvalidParameterValue) as refused:
            sql.execute(create, [direction, last + sign])
        assert str(refused.value).startswith(
            f"stream 'sales' exists already, with IDs beyond {7 * sign} and the last ID {last}:"
            f" `after` must not be beyond the last ID, and is {last + sign}\n"
        )
        assert [one(sql, "select tidemark.append('sales')") for _ in range(2)] == [last + sign, last + 2 * sign]
        sql.execute(create, [direction, last + 2 * sign])


def test_a_stream_may_have_every_name_that_a_record_may_have(sql: psycopg.Connection) -> None:
    """Every character of Unicode's first plane is taken or refused as on Kafka, and so are lengths."""
    every = [chr(code) for code in range(1, 0x10000) if not 0xD800 <= code <= 0xDFFF]
    check = "select pg_get_constraintdef(oid) from pg_constraint where conname = 'append_streams_stream_check'"
    rule = str(one(sql, check)).removeprefix("CHECK ")
    found = sql.execute(f"select stream from unnest(%s::text[]) as given (stream) where {rule}".encode(), [every])
    assert {name for (name,) in found.fetchall()} == {name for name in every if is_name(name)}
    sql.execute(
        "create function pg_temp.taken(_name text) returns boolean language plpgsql as"
        " $$ begin perform tidemark.check_stream_name(_name); return true;"
        " exception when others then return false; end $$"
    )
    found = sql.execute("select stream from unnest(%s::text[]) as given (stream) where pg_temp.taken(stream)", [every])
    assert {name for (name,) in found.fetchall()} == {name for name in every if is_name(name)}
    assert one(sql, "select tidemark.create_stream(repeat('x', 255))::text") == ""
    with pytest.raises(errors.InvalidParameterValue, match="invalid stream name"):
        sql.execute("select tidemark.create_stream(repeat('x', 256))")


def test_a_writer_may_have_every_name_that_a_record_may_have(sql: psycopg.Connection) -> None:
    """Every character of Unicode's first planes and of its tags: no writer looks like another for want of a mark."""
    sql.execute(
        "create function pg_temp.taken(_name text) returns boolean language plpgsql as"
        " $$ begin perform tidemark.append_writer(_name); return true; exception when others then return false; end $$"
    )
    codes = [*range(1, 0x3100), *range(0xFE00, 0x10000), *range(0x1BC90, 0x1BCB0), *range(0x1D170, 0x1D180)]
    every = [chr(code) for code in (*codes, *range(0xE0000, 0xE0200))]
    found = sql.execute("select writer from unnest(%s::text[]) as given (writer) where pg_temp.taken(writer)", [every])
    assert {name for (name,) in found.fetchall()} == {name for name in every if is_writer_name(name)}


def test_who_may_append_may_do_nothing_else(sql: psycopg.Connection) -> None:
    """A member of tidemark_append calls the functions; the tables, the sequences and making streams are not for it."""
    sql.execute("drop role if exists service")
    sql.execute("create role service in role tidemark_append")
    sql.execute("set role service")
    try:
        assert one(sql, "select tidemark.append('orders', '1')") == 1
        for denied in (
            "select * from tidemark.append_outbox",
            "insert into tidemark.append_outbox values (1, 9, '{}', 0)",
            "delete from tidemark.append_outbox",
            "select nextval('tidemark.append_ids_1')",
            "select tidemark.create_stream('other')",
            "select tidemark.take_id(null, '')",
            "select tidemark.append_beat('orders')",
            "select tidemark.retire_writer('web', 'orders')",
            "select tidemark.drop_stream('orders')",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                sql.execute(denied.encode())
    finally:
        sql.execute("reset role")
        sql.execute("drop owned by service")
        sql.execute("drop role service")


def test_functions_ignore_the_search_path_of_their_caller(sql: psycopg.Connection) -> None:
    """A table or function of the caller's never stands in for what they use."""
    sql.execute("create schema trap")
    sql.execute("create function trap.nextval(regclass) returns bigint language sql as 'select 99::bigint'")
    sql.execute("create table trap.append_streams as select * from tidemark.append_streams")
    sql.execute("set search_path = trap, pg_catalog")
    assert one(sql, "select tidemark.append('orders', '1')") == 1


def test_every_call_is_one_fact_wherever_it_stands(sql: psycopg.Connection) -> None:
    """In a default, in rows of COPY, in a statement that is prepared and its plan kept, in a view, in a cursor that
    outlives its transaction, and where the planner would share the work. Nowhere else: not in a WITH that nobody reads.
    """
    appended = "select tidemark.append('orders', '1') as id"
    sql.execute("create table placed (id bigint default tidemark.append('orders', '1'), total integer)")
    sql.execute(f"create view facts as {appended}".encode())
    sql.execute("set debug_parallel_query = on")
    sql.execute("set plan_cache_mode = force_generic_plan")

    sql.execute("insert into placed (total) select generate_series(1, 3)")
    with sql.cursor() as cursor, cursor.copy("copy placed (total) from stdin") as rows:
        rows.write("4\n5\n")
    sql.execute(
        "prepare place (jsonb) as with fact as (select tidemark.append('orders', $1) as id)"
        " insert into placed select id, 6 from fact"
    )
    for _ in range(6):
        sql.execute("execute place ('1')")
    assert one(sql, "select count(*) from (select id, id from facts) as twice") == 1
    with sql.transaction():
        sql.execute(f"declare held cursor with hold for {appended}".encode())
    sql.execute(f"with fact as ({appended}) insert into placed values (0, 7)".encode())

    ids = [id for id, _ in outbox(sql)]
    kept = [id for (id,) in sql.execute("select id from placed where id > 0 order by id").fetchall()]
    assert ids == [*kept, *range(12, 14)]
    assert one(sql, "fetch held") == 13


def test_migrating_again_changes_nothing(ready: str, sql: psycopg.Connection) -> None:
    """Streams, facts and IDs stay; making a stream again is nothing."""
    sql.execute("select tidemark.append('orders', '1')")
    with session_of(ready, "test") as session:
        assert SCHEMA.migrate(session) == []
    sql.execute("select tidemark.create_stream('orders')")
    assert one(sql, "select tidemark.append('orders', '1')") == 2


def test_a_database_without_an_encoding_is_refused(sql: psycopg.Connection, ready: str) -> None:
    """In SQL_ASCII any bytes are a text, and Kafka's are UTF-8: a row of others could never be told."""
    sql.execute("drop database if exists bytes")
    sql.execute("create database bytes encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'")
    with (
        session_of(conninfo.make_conninfo(ready, dbname="bytes"), "test") as session,
        pytest.raises(Refused, match=r"SQL_ASCII(.|\n)*ENCODING 'UTF8'"),
    ):
        SCHEMA.migrate(session)
    sql.execute("drop database bytes with (force)")


def test_a_database_with_another_encoding_is_refused(sql: psycopg.Connection, ready: str) -> None:
    """The limits on names and sizes hold for UTF-8, and nothing is made in the database."""
    sql.execute("drop database if exists latin")
    sql.execute("create database latin encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'")
    dsn = conninfo.make_conninfo(ready, dbname="latin")
    with pytest.raises(BadSetting, match="the database has encoding LATIN1; create a database WITH ENCODING 'UTF8'"):
        relay.migrate(dsn, ["orders"], "forward", print)
    with psycopg.connect(dsn) as latin:
        assert latin.execute("select to_regnamespace('tidemark')").fetchone() == (None,)
    sql.execute("drop database latin with (force)")


def test_heads_say_what_went_wrong_as_psycopg_does(sql: psycopg.Connection) -> None:
    """They are asked below its cursors: a lost session is opened again, and a right that is missing is named."""
    with session_of(sql.info.dsn + f" password={sql.info.password} client_encoding=latin1", "test") as session:
        sql.execute("update tidemark.append_streams set stream = 'or-dérs' where stream = 'orders'")
        with session.use() as connection:
            assert "or-dérs" in {stream.name for stream in sequences.read_snapshots(connection)}
            sql.execute("select pg_terminate_backend(%s)", [connection.info.backend_pid])
        with pytest.raises(Unavailable), session.use() as connection:
            sequences.read_snapshots(connection)
        with session.use() as connection:
            assert sequences.read_snapshots(connection)
            connection.execute("set role pg_monitor")
        with pytest.raises(Refused, match="permission denied"), session.use() as connection:
            sequences.read_snapshots(connection)


def test_the_head_is_never_higher_than_what_was_given_out(sql: psycopg.Connection) -> None:
    """`select last_value` is, while nextval writes its log: an ID that nobody has yet would look as if it were void."""
    stream = next(each for each in sequences.read_snapshots(sql) if each.name == "orders")
    with psycopg.connect(sql.info.dsn, password=sql.info.password, autocommit=True) as other:
        pipe = other.cursor()
        with other.pipeline():
            for _ in range(200):
                pipe.execute("select count(nextval('tidemark.append_ids_1')) from generate_series(1, 32)")
                head = sequences.read_snapshots(sql)[stream].sequence.last_id or 0
                # NULL before the first of them has been given out
                assert head <= (one(sql, "select pg_sequence_last_value('tidemark.append_ids_1')") or 0)  # type: ignore[operator]
