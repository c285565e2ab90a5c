"""The wheel as users have it: in an environment of its own, beside whatever they have."""

import sys
from pathlib import Path

import psycopg
import pytest

from tests.packaging.conftest import VERSION, Environment, build, copy_of_the_tree
from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tests.sources.relay.world import prepared_schema

pytestmark = pytest.mark.slow

ARRAYS_AND_SPARK = ["numpy", "pandas", "pyarrow", "pyspark"]
CONSUMER = """
import psycopg
from tidemark import AsyncWriter, Positions, Reader, Table, Token, Writer, errors

def write(connection: psycopg.Connection) -> int:
    ids = Writer("web").append_many(connection, "orders", [1, 2])
    return Writer().append(connection, "orders", {"total": 40}) + ids[0]

async def write_too(connection: psycopg.AsyncConnection) -> int:
    return await AsyncWriter().append(connection, "orders", {"total": 40})

def read(positions: Positions, dsn: str) -> None:
    with Reader(positions, "orders", Table("orders", id="id"), name="books", source=dsn, effects=dsn) as reader:
        try:
            print(next(iter(reader)).rows, Token.parse("m7").linear + 1)
        except errors.Retry as error:
            raise error
"""
MISTAKEN = """
from tidemark import Token, Wrtier
print(Token("m7"), Wrtier)
"""
WRITE = """
import os
import psycopg
from tidemark import Writer

with psycopg.connect(os.environ["DSN"]) as connection:
    print(Writer().append(connection, "orders", {"total": 40}))
"""
READ = """
import os
from tidemark import Positions, Reader, Table

dsn, table = os.environ["DSN"], Table("orders", id="id")
with Positions(os.environ["REDIS"]) as positions:
    with Reader(positions, "orders", table, name="books", source=dsn, effects=dsn) as reader:
        print([row["total"] for row in next(iter(reader)).rows])
"""


@pytest.mark.parametrize("words", ["bin/tidemark", "bin/python -m tidemark", "bin/python -P -m tidemark"])
def test_command_runs_beside_folders_with_the_names_of_our_rooms(
    words: str, base_install: Environment, elsewhere: Path
) -> None:
    """A service has an `app` of its own, on its path and as the folder that it runs in."""
    program, *options = words.split()
    done = base_install.run(
        base_install.root / program, *options, "--version", cwd=elsewhere, PYTHONPATH=str(elsewhere)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"tidemark, version {VERSION}\n")


def test_our_rooms_cannot_be_imported_by_their_own_names(base_install: Environment, tmp_path: Path) -> None:
    """Nothing of ours is found but `tidemark`."""
    assert base_install.finds(["app", "sinks", "sources", "streaming", "tests", "tidemark"], tmp_path) == ["tidemark"]


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("pipeline", "pipeline"),
        ("topics", "pipeline"),
        ("sidecar", "sidecar"),
        ("status", "sidecar"),
        ("gaps", "sidecar"),
        ("produce", "relay"),
        ("relay", "relay"),
        ("relay migrate", "relay"),
        ("up", "local"),
        ("simulate --seconds 1 --seed 1", "local"),
    ],
)
def test_command_without_its_extra_says_which_to_install(
    command: str, extra: str, base_install: Environment, tmp_path: Path
) -> None:
    """One line, exit code 2."""
    done = base_install.run(base_install.root / "bin/tidemark", *command.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: tidemark {command.split(' ', maxsplit=1)[0]}")
    hint = ". `tidemark doctor` checks this machine" if command == "up" else ""
    assert done.stderr.endswith(f", which is not installed: pip install 'tidemark-streams[{extra}]'{hint}\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("name", "extra"), [("Reader", "reader"), ("RedisAddress", "reader")])
def test_import_without_its_extra_says_which_to_install(
    name: str, extra: str, base_install: Environment, tmp_path: Path
) -> None:
    """An ImportError, for those who try a library and do without it where it is not there."""
    program = f"try:\n    from tidemark import {name}\nexcept ImportError as error:\n    print(error)"
    said = base_install.run(base_install.python, "-c", program, cwd=tmp_path).stdout
    assert said.startswith(f"tidemark.{name} needs ")
    assert said.endswith(f", which is not installed: pip install 'tidemark-streams[{extra}]'\n")


def test_base_shows_settings_and_migrates_even_out_of_an_archive(
    base_install: Environment, wheel: Path, database: str, tmp_path: Path
) -> None:
    """What every installation can do, here with the wheel itself on the path, as zip applications have it."""
    given = {"PYTHONPATH": str(wheel), "TIDEMARK_POSTGRES_DSN": database}
    program = "import tidemark.app.cli as cli; print(cli.__file__); cli.main(['COMMAND'])"
    shown = base_install.run(base_install.python, "-c", program.replace("COMMAND", "config"), cwd=tmp_path, **given)
    assert shown.stdout.startswith(str(wheel))
    assert "TIDEMARK_REDIS_URL" in shown.stdout
    done = base_install.run(base_install.python, "-c", program.replace("COMMAND", "migrate"), cwd=tmp_path, **given)
    assert done.stdout.splitlines()[1].startswith("applied migration")


def test_a_fact_is_written_without_any_extra(base_install: Environment, database: str, tmp_path: Path) -> None:
    """Nothing but psycopg beside it: no Kafka, Redis, arrays or Spark."""
    assert not base_install.finds(["confluent_kafka", "redis", *ARRAYS_AND_SPARK], tmp_path)
    with prepared_schema(database), psycopg.connect(database, autocommit=True) as sql:
        sql.execute("select tidemark.create_stream('orders')")
        done = base_install.run(base_install.python, "-c", WRITE, cwd=tmp_path, DSN=database)
        assert (done.stdout, done.stderr) == ("1\n", "")
        assert sql.execute("select rows from tidemark.append_outbox").fetchall() == [(['{"total": 40}'],)]


def test_reader_alone_reads(
    reader_install: Environment, pipeline: Pipeline, redis_url: str, dsn: str, sql: psycopg.Connection, tmp_path: Path
) -> None:
    """Up to the linear position and no further, without Spark, arrays or Kafka."""
    assert not reader_install.finds(["confluent_kafka", *ARRAYS_AND_SPARK], tmp_path)
    sql.execute("create table orders (id bigint primary key, total integer not null)")
    sql.execute("insert into orders values (1, 40), (2, 7), (3, 1000)")
    pipeline.publish(stream("orders", advance("shop-1", 0, 2), linear=2))
    done = reader_install.run(reader_install.python, "-c", READ, cwd=tmp_path, DSN=dsn, REDIS=redis_url)
    assert (done.stdout, done.stderr) == ("[40, 7]\n", "")


def test_editable_installation_follows_the_checkout(base_install: Environment, tmp_path: Path) -> None:
    """What is changed in a room is there at the next start, and strict type checkers follow too."""
    tree = copy_of_the_tree(tmp_path / "tree")
    wheel = build(tree, "wheel:editable", tmp_path)
    editable = base_install.with_also(tmp_path / "environment", "--force-reinstall", "--no-deps", wheel)
    with (tree / "tidemark/streaming/values/limits.py").open("a") as module:
        module.write("\nCHANGED = 'yes'\n")
    program = "from tidemark.streaming.values import limits as model; print(model.CHANGED, model.__file__)"
    done = editable.run(editable.python, "-c", program, cwd=tmp_path)
    assert done.stdout == f"yes {tree / 'tidemark/streaming/values/limits.py'}\n"
    _mypy_knows_every_name(editable, tmp_path)


def test_strict_type_checkers_know_every_name(base_install: Environment, tmp_path: Path) -> None:
    """`mypy --strict` of a service finds nothing; what is wrong in one, it finds."""
    _mypy_knows_every_name(base_install, tmp_path)


def _mypy_knows_every_name(environment: Environment, place: Path) -> None:
    (place / "service.py").write_text(CONSUMER)
    (place / "mistaken.py").write_text(MISTAKEN)
    options = ["--strict", "--config-file=", "--cache-dir", place / "cache", "--python-executable", environment.python]
    mypy = [sys.executable, "-m", "mypy", "--no-error-summary", *options, "service.py", "mistaken.py"]
    said = environment.run(*mypy, cwd=place).stdout.splitlines()
    assert [line.rpartition("[")[2] for line in said] == ["attr-defined]", "arg-type]"]
    assert all(line.startswith("mistaken.py") for line in said)
