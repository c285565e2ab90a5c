"""The readers of docs/how-to/read-in-any-language.md: killed at random moments, they read each fact once."""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from tests.services.programs import HERE
from tests.services.readers import KILLS, Command, killed, late_facts, parked_facts, read_your_writes
from tests.services.shop import Shop
from tidemark.app.stack.postgres import postgres_program

Reads = Callable[[Command], None]


@pytest.fixture
def reads(shop: Shop, database: str, tmp_path: Path, request: pytest.FixtureRequest) -> Reads:
    """Run a program, and fail if its effects differ from the table."""

    def read(command: Command) -> None:
        outcome = killed(shop, command, tmp_path / "log")
        with request.getfixturevalue("capsys").disabled():
            print(f"\n{request.node.name}: {outcome}")  # noqa: T201
        assert (outcome.missed, outcome.doubled, outcome.unordered, outcome.wrong) == (0, 0, 0, 0)
        assert outcome.facts > 0
        late_facts(database, shop, command, tmp_path / "log")

    return read


@pytest.mark.parametrize("library", ["psycopg", "sqlalchemy", "django"])
def test_a_reader_in_python_reads_each_fact_once(reads: Reads, library: str) -> None:
    reads([sys.executable, HERE / "python" / f"billing_{library}.py"])


def test_a_reader_in_psql_reads_each_fact_once(reads: Reads) -> None:
    reads([postgres_program("psql"), "-q", "-v", "ON_ERROR_STOP=1", "-f", HERE / "psql" / "billing.sql"])


def test_a_reader_in_go_reads_each_fact_once(go: Path, reads: Reads) -> None:
    reads([go / "billing"])


def test_a_reader_in_go_parks_facts_that_fail(
    go: Path, shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on behind them. After a retry, each is billed once."""
    orders, parked = parked_facts(shop, [go / "parking"], tmp_path / "log")
    with capsys.disabled():
        print(f"\nGo, parking: {orders} facts, of which {parked} were parked and retried; {KILLS} kills")  # noqa: T201


def test_a_reader_in_java_reads_each_fact_once(java: str, javac: str, reads: Reads) -> None:
    reads([java, "-cp", javac, "Billing"])


def test_a_reader_in_node_reads_each_fact_once(npm: Path, reads: Reads) -> None:
    reads(["node", npm / "billing.mjs"])


def test_an_answer_over_http_has_the_invoice_of_the_order_just_placed(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The service that writes returns a token, and the service that reads waits for it, while its reader is killed."""
    service: Command = [sys.executable, HERE / "python" / "invoices_http.py"]
    reader: Command = [sys.executable, HERE / "python" / "billing_psycopg.py"]
    seconds = read_your_writes(shop, service, reader, tmp_path / "log", 4 * KILLS)
    with capsys.disabled():
        print(f"\nHTTP: {len(seconds)} orders, each in the answer; p50 {1000 * median(seconds):.0f} ms")  # noqa: T201
