"""SECURITY.md: each line that says who can do what names tests that are there, and the defaults are as it says."""

import re
from pathlib import Path

import pytest

from tidemark.app.settings import FIELDS
from tidemark.streaming.engine.spark import SETTINGS

ROOT = Path(__file__).parents[2]


def _rows() -> list[list[str]]:
    """The rows of all tables, without those of headings and rules; each row with its cells."""
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    tables = [number for number, line in enumerate(lines) if re.fullmatch(r"\|[-|]+\|", line)]
    rows: list[list[str]] = []
    for rule in tables:
        assert lines[rule - 1].endswith("| test |"), lines[rule - 1]
        for line in lines[rule + 1 :]:
            if not line.startswith("|"):
                break
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


@pytest.mark.parametrize("row", _rows(), ids=lambda row: " ".join(row[:2])[:60])
def test_each_line_names_tests_that_are_there(row: list[str]) -> None:
    """The last column has one or more tests, as pytest takes them."""
    named = re.findall(r"`(tests/[^`]+)::(test_[^`]+)`", row[-1])
    assert named
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_ports_are_on_this_machine_by_default() -> None:
    """Sidecar, line protocol, metrics and Spark: whoever wants more says so."""
    assert {FIELDS[name].default for name in ("sidecar_host", "metrics_host")} == {"127.0.0.1"}
    assert FIELDS["lines_listen"].default.startswith("127.0.0.1:")
    assert {SETTINGS[name] for name in ("spark.driver.host", "spark.driver.bindAddress")} == {"127.0.0.1"}
