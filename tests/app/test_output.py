"""Tables, formats, colour and progress of the command line."""

import subprocess
import sys
from datetime import UTC, datetime

import pytest

from tests.terminals import shown_on_a_terminal
from tidemark.app.output import count, duration, id_range, ids, join_escaped, table
from tidemark.common.timestamps import timestamp


def test_a_long_name_widens_no_column() -> None:
    """Its beginning and its end tell it from others; the last column may be as long as it is."""
    name = "a" * 100 + "b" * 100
    _, row = table(("STREAM", "WHY"), [(name, "x" * 99)])
    assert row == "a" * 23 + "…" + "b" * 24 + "  " + "x" * 99


def test_no_terminal_obeys_what_is_printed() -> None:
    """Escapes, also of one character, line ends, and what turns the direction of writing round."""
    assert join_escaped(["a\x1b[2Jb\x9b", "c\nd\u202e"]) == "a\\x1b[2Jb\\x9b\nc\\nd\\u202e"


def test_a_table_fits_the_terminal() -> None:
    """Wide cells are cut further, and a line is never longer than the terminal."""
    rows = [("stream-" + "s" * 60, "writer-" + "w" * 60, "detail " * 20)]
    for width in (40, 80, 200):
        assert max(map(len, table(("STREAM", "WRITER", "WHY"), rows, width=width))) <= width


def test_one_format_of_numbers_ranges_and_times() -> None:
    """Every verb uses these."""
    assert [count(number, "record") for number in (0, 1, 2)] == ["0 records", "1 record", "2 records"]
    assert (count(2, "entry"), count(2, "batch")) == ("2 entries", "2 batches")
    assert [id_range(6, 7), id_range(6, 9), id_range(-6, -7)] == ["7", "7..9", "-7"]
    assert [ids(6, 7), ids(-6, -9)] == ["ID 7", "IDs -7..-9"]
    assert [*map(duration, (0, 119, 120, 7199, 7200, 172_800))] == ["0 s", "119 s", "2 min", "119 min", "2 h", "2 d"]
    assert timestamp(datetime(2026, 11, 26, 8, 0, 0, 123_456, UTC)) == "2026-11-26 08:00:00.123Z"


PRINTING = """
from tidemark.app.output import echo, progress
echo("STREAM  LINEAR\\nproblem: none")
with progress("reading", 4, "record") as advance:
    advance(4)
"""


def test_a_terminal_gets_colour_and_a_progress_bar() -> None:
    """The bar has the rate."""
    shown = shown_on_a_terminal(PRINTING)
    assert "\x1b[1mSTREAM" in shown
    assert "\x1b[31mproblem" in shown
    assert "4/4" in shown
    assert "records/s" in shown


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_nobody_wants_it(variables: dict[str, str]) -> None:
    """NO_COLOR, and a terminal that has none."""
    assert "\x1b[1m" not in shown_on_a_terminal(PRINTING, environment=variables)
    assert "\x1b[31m" not in shown_on_a_terminal(PRINTING, environment=variables)


def test_a_pipe_gets_neither_colour_nor_a_bar() -> None:
    """Also if the colours were asked for by a terminal's name."""
    done = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("STREAM  LINEAR\nproblem: none\n", "")
