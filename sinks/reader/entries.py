"""Reads what `publish.lua` writes on a stream's list of advances. Pure."""

from tidemark.sinks.reader.asks import Entry
from tidemark.sinks.reader.events import Advance, Evidence, Late


def parse(entry: Entry) -> Advance | Late | None:
    """None for a kind that this version does not know."""
    fields = entry.fields

    def number(name: str) -> int:
        return int(fields[name])

    match fields["kind"]:
        case "POSITION":
            evidence = Evidence(number("facts"), number("empty"), number("unseen"), number("skipped"))
            return Advance(
                fields["writer"],
                number("epoch"),
                number("prev"),
                number("id"),
                evidence,
                number("prev"),
                number("linear"),
                number("batch"),
                number("time"),
            )
        case "LATE":
            return Late(
                number("number"),
                fields["writer"],
                number("epoch"),
                number("prev"),
                number("id"),
                number("facts"),
                fields["why"],
                number("batch"),
                number("time"),
            )
        case _:
            return None
