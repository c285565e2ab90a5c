"""IDs per writer as text for people: `first:1-7:9,second:8` is 1 to 7 and 9 of `first`, and 8 of `second`. Pure.

On a backward stream the same reads `first:-1--7:-9`. A name may hold colons, commas and dashes of its own only as
`%3A`, `%2C` and `%25` (for the percent sign): dashes need no escape, because ranges stand after the last name.
"""

import re
from collections.abc import Mapping
from urllib.parse import unquote

from tidemark.streaming.errors import BadToken
from tidemark.streaming.intervals import Intervals

_SPAN = re.compile(r"(-?[0-9]+)(?:-(-?[0-9]+))?")


def interval_text(sets: Mapping[str, Intervals], sign: int = 1) -> str:
    """Print the sets of magnitudes; `sign` is -1 for a backward stream. Writers are sorted; empty sets are left out."""
    return ",".join(
        ":".join((_escaped(writer), *(_span(low + 1, high, sign) for low, high in ids)))
        for writer, ids in sorted(sets.items())
        if len(ids)
    )


def parse_intervals(text: str) -> dict[str, Intervals]:
    """The sets of magnitudes that `text` names. Raises `BadToken` where it cannot be read or mixes signs."""
    sets: dict[str, Intervals] = {}
    signs: set[bool] = set()
    for part in text.split(",") if text else ():
        name, *spans = part.split(":")
        if not name or not spans:
            raise BadToken(text, f"{part!r} is not a writer's name and its ranges, such as first:1-7:9")
        pairs = []
        for span in spans:
            found = _SPAN.fullmatch(span)
            if not found:
                raise BadToken(text, f"{span!r} is neither an ID nor a range of IDs")
            low, high = int(found[1]), int(found[2] or found[1])
            signs |= {low < 0, high < 0}
            if not 0 < abs(low) <= abs(high) < 2**63 or len(signs) > 1:
                raise BadToken(text, f"{span!r} does not ascend from an ID to another of the same sign")
            pairs.append((abs(low) - 1, abs(high)))
        writer = unquote(name)
        sets[writer] = Intervals.of(pairs).union(sets.get(writer, Intervals.of(())))
    return sets


def _span(low: int, high: int, sign: int) -> str:
    return str(sign * low) if low == high else f"{sign * low}-{sign * high}"


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
