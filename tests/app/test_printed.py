"""What the verbs print of names and words that others chose."""

from tidemark.app.output import as_lines, for_people


def test_a_long_name_widens_no_column() -> None:
    """Its beginning and its end tell it from others; the last column may be as long as it is."""
    name = "a" * 100 + "b" * 100
    _, row = as_lines(("STREAM", "WHY"), [(name, "x" * 99)])
    assert row == "a" * 23 + "…" + "b" * 24 + "  " + "x" * 99


def test_no_terminal_obeys_what_is_printed() -> None:
    """Escapes, also of one character, line ends, and what turns the direction of writing round."""
    assert for_people(["a\x1b[2Jb\x9b", "c\nd\u202e"]) == "a\\x1b[2Jb\\x9b\nc\\nd\\u202e"
