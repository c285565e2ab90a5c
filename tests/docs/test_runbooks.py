"""The runbooks that explain one command each, typed word for word on a local stack, and the statements of the design.

`make e2e-incidents` runs the pages with a cause. Each page here begins with the records and rows that `GIVEN` writes.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from tests.docs.shell import ROOT, VISIBLE_SECONDS, Shell, blocks
from tests.docs.test_how_to import typed
from tests.waiting import eventually
from tidemark.app.verbs import overrides
from tidemark.streaming.wire.records import Join, Rdata, Record, encode, encode_row

RUNBOOKS = ROOT / "docs/how-to/runbooks"
FIRST_READER = "docs/tutorials/first-stream.md"
CUT = -9
"""Where a JSON record is cut short."""


def fact(stream: str, writer: str, id: int, prev: int, epoch: int = 1) -> Rdata:
    return Rdata(stream=stream, writer=writer, epoch=epoch, prev=prev, id=id, row=encode_row({}))


@dataclass
class Given:
    """Writes what a page takes as given."""

    shell: Shell
    running: ExitStack = field(default_factory=ExitStack)
    """Programs that run to the end of a page."""

    @property
    def settings(self) -> dict[str, str]:
        return self.shell.terminal.stack_env

    @property
    def dsn(self) -> str:
        return self.settings["TIDEMARK_POSTGRES_DSN"]

    def sql(self, statement: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement.encode())

    def send(self, *records: Record) -> None:
        with self._producing() as produce:
            for record in records:
                produce(record.stream, encode(record), None)

    def send_poisoned(self, stream: str, value: bytes, partition: int | None = None) -> None:
        with self._producing() as produce:
            produce(stream, value, partition)

    def reaches(self, stream: str, linear: int) -> None:
        """Wait until the linear position of the stream is published."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            query = "SELECT 1 FROM tidemark.streams WHERE stream = %s AND linear = %s"
            published = lambda: connection.execute(query, [stream, linear]).fetchone()  # noqa: E731
            eventually(published, VISIBLE_SECONDS, lambda: f"{stream} at {linear}")

    def silent_after_a_second(self, stream: str) -> None:
        self.shell.typed(f"tidemark policy set {stream} silent_seconds=1 --by ada --why 'a test' --yes")

    @contextmanager
    def _producing(self) -> Iterator[Callable[[str, bytes, int | None], None]]:
        servers = self.settings["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]
        producer = Producer({"bootstrap.servers": servers, "partitioner": "murmur2_random"})

        def produce(stream: str, value: bytes, partition: int | None) -> None:
            place = {} if partition is None else {"partition": partition}
            producer.produce("tidemark.facts", key=stream.encode(), value=value, **place)

        yield produce
        assert producer.flush(30) == 0


def sales(given: Given) -> None:
    """ID 2 is open for more than ten seconds, while 3 is complete."""
    given.sql("SELECT tidemark.create_stream('sales')")
    given.sql("SELECT tidemark.append('sales', '{\"total\": 40}')")
    given.reaches("sales", 1)
    with psycopg.connect(given.dsn) as connection:
        connection.execute("SELECT tidemark.append('sales', '{\"total\": 2}')")
        given.sql("SELECT tidemark.append('sales', '{\"total\": 42}')")
        long = r"ID 2 open for (?:1[2-9]|[2-9]\d) s|ID 2 open for \d+ min"
        eventually(lambda: re.search(long, given.shell.typed("tidemark gaps sales")), VISIBLE_SECONDS)
    given.reaches("sales", 3)


def visits(given: Given) -> None:
    """The dead letters 0 and 1 are records that were cut short, and 2 is one in a wrong partition."""
    given.send(Join(stream="visits", writer="bridge", epoch=1, id=0), fact("visits", "bridge", 1, 0))
    given.reaches("visits", 1)
    cut = encode(fact("visits", "bridge", 3, 2))[:CUT]
    given.send_poisoned("visits", cut)
    given.send_poisoned("visits", cut)

    def letters() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(given.shell.typed("tidemark dead-letters list visits --json"))[
            "dead_letters"
        ]
        return found

    eventually(lambda: len(letters()) == 2, VISIBLE_SECONDS, lambda: str(letters()))
    (home,) = {letter["record"]["partition"] for letter in letters()}
    given.send_poisoned("visits", encode(fact("visits", "bridge", 2, 1)), 0 if home else 1)
    eventually(lambda: len(letters()) == 3, VISIBLE_SECONDS, lambda: str(letters()))


def gap_of_a_living_writer(given: Given) -> None:
    given.send(fact("ledger", "w1", 1, 0, epoch=0), fact("ledger", "w1", 4, 3, epoch=0))
    given.reaches("ledger", 1)


def one_policy(given: Given) -> None:
    given.shell.typed(
        "tidemark policy set 'imports*' gap_seconds=3600 --by ada --why 'a load takes half an hour' --yes"
    )


def silent_till(given: Given) -> None:
    joins = (Join(stream="payments", writer=name, epoch=1, id=0) for name in ("till-1", "till-2"))
    given.send(*joins, fact("payments", "till-1", 7, 0), fact("payments", "till-2", 8, 0))
    given.send(fact("payments", "till-2", 20, 8))


def restored_shop(given: Given) -> None:
    """ID 2 of `returns` is given out twice."""
    given.send(
        Join(stream="returns", writer="shop", epoch=1, id=0), *(fact("returns", "shop", n, n - 1) for n in (1, 2))
    )
    given.reaches("returns", 2)
    given.send(Join(stream="returns", writer="shop", epoch=2, id=1), fact("returns", "shop", 2, 1, epoch=2))

    def number() -> str | None:
        found = json.loads(given.shell.typed("tidemark late list --json"))["late"]
        return str(found[0]["number"]) if found else None

    (shown,) = re.findall(r"tidemark late resolve returns (\d+)", (RUNBOOKS / "late.md").read_text())
    given.shell.numbers = {**given.shell.numbers, shown: eventually(number, VISIBLE_SECONDS)}


def two_readers(given: Given) -> None:
    """`mailer` has read the orders but the last, and ended; `books` runs."""
    given.sql("CREATE TABLE orders (id bigint PRIMARY KEY, total integer NOT NULL)")
    given.sql("SELECT tidemark.create_stream('orders', after => 5000)")
    order = "INSERT INTO orders SELECT tidemark.append('orders', '{}'), 7"
    for _ in range(3):
        given.sql(order)
    with reading(given, "mailer", 5003):  # it prints an ID before it commits its place
        eventually(lambda: "m5003" in given.shell.typed("tidemark readers list"), VISIBLE_SECONDS)
    given.sql(order)
    given.running.enter_context(reading(given, "books", 5004))


@contextmanager
def reading(given: Given, reader: str, last: int) -> Iterator[None]:
    """The reader of the first tutorial, of the stream `orders`, once it has read the ID `last`."""
    (program,) = (block.text for block in blocks(FIRST_READER) if block.language == "python")
    path = given.shell.folder / f"{reader}.py"
    path.write_text(program.replace('"sales"', '"orders"').replace('"books"', f'"{reader}"'))
    with given.shell.running(f"python {path.name}", f"'id': {last}"):
        yield


def fenced_writer(given: Given) -> None:
    """w1 of `ledger` has left 6 and 7 open, and is silent."""
    given.silent_after_a_second("ledger")
    given.send(fact("ledger", "w1", 5, 4, epoch=0), fact("ledger", "w1", 8, 7, epoch=0))
    given.reaches("ledger", 5)
    eventually(lambda: "no record for" in given.shell.typed("tidemark gaps ledger"), VISIBLE_SECONDS)


def script_without_join(given: Given) -> None:
    given.sql("CREATE SEQUENCE ledger")
    given.send(Join(stream="parcels", writer="depot", epoch=1, id=0), fact("parcels", "depot", 3, 0))
    given.reaches("parcels", 3)
    given.silent_after_a_second("parcels")
    given.send(fact("parcels", "script", 4, 3))
    eventually(lambda: re.search(r"script .* last record (?![01] s)", given.shell.typed("tidemark gaps parcels")))


def record_file(given: Given) -> None:
    """The record `record.json`, and the pages, in the folder."""
    (given.shell.folder / "docs").symlink_to(ROOT / "docs")
    (given.shell.folder / "record.json").write_bytes(encode(fact("sales", "shop", 1, 0)))


def nothing(given: Given) -> None:
    """The page needs what the pages before it left."""


PAGES: Mapping[str, Callable[[Given], None]] = {
    "how-to/runbooks/explain": sales,
    "how-to/runbooks/trace": nothing,
    "how-to/runbooks/wait": nothing,
    "design": nothing,
    "how-to/runbooks/replay": nothing,
    "how-to/runbooks/bundle": nothing,
    "how-to/runbooks/dead-letters": visits,
    "how-to/runbooks/skip": gap_of_a_living_writer,
    "how-to/runbooks/overrides": one_policy,
    "how-to/runbooks/policy": nothing,
    "how-to/runbooks/top": nothing,
    "how-to/runbooks/verify": nothing,
    "how-to/runbooks/reseed": nothing,
    "how-to/runbooks/readers": two_readers,
    "how-to/runbooks/late": restored_shop,
    "how-to/runbooks/status": silent_till,
    "how-to/runbooks/gaps": nothing,
    "how-to/runbooks/retire": nothing,
    "how-to/runbooks/fence": fenced_writer,
    "how-to/runbooks/join": script_without_join,
    "reference/schemas/README": record_file,
}
"""In the order in which they are typed, each with what it takes as given."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_runbooks_typed_word_for_word(shell: Shell) -> None:
    """Each command succeeds and prints what its page shows, with one stack for all pages."""
    shell.programs = [Path(sys.executable).parent]
    sidecar = shell.terminal.stack_env["TIDEMARK_SIDECAR_URL"].rpartition(":")[2]
    shell.numbers = {"9480": sidecar}
    owner = eventually(
        lambda: re.search(r"active on (.*?), last batch", shell.typed("tidemark status")), VISIBLE_SECONDS
    )
    shell.names = {owner[1]: "tidemark-pipeline-0"}
    for page, write in PAGES.items():
        print(f"{page}:", flush=True)  # noqa: T201
        given = Given(shell)
        write(given)
        with given.running:
            for block in blocks(f"docs/{page}.md"):
                typed(shell, page, block)


NAMES = r"\b(?:w1|pod-?9|payments|events)\b"
REFUSALS = [
    (page, text)
    for page in ("fence", "retire", "skip")
    for text in re.findall(r"^\| `([^`]+ [^`]+)` \|", (RUNBOOKS / f"{page}.md").read_text(), re.MULTILINE)
]


def test_refusals_are_those_of_the_code() -> None:
    """The sentences of the tables `refused`, but for names of streams and writers, are in the module."""
    assert len(REFUSALS) >= 6
    source = Path(overrides.__file__).read_text()
    missing = [
        (page, part.strip())
        for page, text in REFUSALS
        for part in re.split(NAMES, text)
        if part.strip() and part.strip() not in source
    ]
    assert missing == []
