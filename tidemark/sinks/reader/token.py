"""Positions as text: tokens for services, such as `m7~first.9`, and sets of IDs for people. Pure.

The token `m7~first.9` means: the IDs of all writers up to 7, and the IDs of the writer `first` up to 9. Redis has the
same text (`publish.lua`). Writers that are not beyond the linear position are left out. The other writers are sorted by
the bytes of their names. In a name, `%` is written `%25` and `~` is written `%7E`. A name may contain dots: the last
dot of an entry separates the name from the ID.

The set of IDs `first:1-7:9,second:8` means: IDs 1 to 7 and 9 of the writer `first`, and ID 8 of `second`. On a backward
stream, the IDs are negative: `first:-1--7:-9`. In a name, colons, commas and percent signs are written `%3A`, `%2C` and
`%25`. Dashes are not escaped, because the first colon ends the name.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self
from urllib.parse import unquote

from tidemark.common.errors import BadToken
from tidemark.streaming.values.direction import Direction, DirectionName, farther, is_beyond, nearer

TOKEN_PATTERN = r"m-?[0-9]{1,19}(~[^~]+\.-?[0-9]{1,19})*"
"""A regular expression for the text of a token, for interface descriptions. `Token.parse` checks more."""

_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")
_IDS = re.compile(rf"(?:{_ID.pattern})(?:~(?:{_ID.pattern}))*")
_INVALID_ESCAPE = re.compile(r"%(?!25|7E)")


class Order(Enum):
    """The order of a token relative to another one, as `Token.compare` returns it.

    `INCOMPARABLE`: each of the two tokens is beyond the other for some writer.
    """

    BEFORE = "before"
    EQUAL = "equal"
    AFTER = "after"
    INCOMPARABLE = "incomparable"


@dataclass(frozen=True, slots=True)
class Token:
    """The positions of all writers of a stream. Make tokens with `Token.of` or `Token.parse`.

    `str(token)` is the text of the token, such as `m7~first.9`: all writers up to 7, and the writer `first` up to 9.

    Attributes:
        linear: the position of every writer that is not in `positions`.
        positions: pairs (writer, position) of the writers beyond `linear`, sorted by name. So tokens with the same
            positions are equal.
    """

    linear: int
    positions: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, linear: int, positions: Mapping[str, int] | None = None) -> Self:
        """Return the token of these positions.

        Args:
            linear: the linear position: an ID, or 0.
            positions: writer -> position. Writers that are not beyond `linear` are left out of the token.

        Raises:
            BadToken: some IDs are positive and others are negative.
        """
        reached = abs(linear)
        positions = positions or {}
        above = [(writer, id) for writer in sorted(positions) if abs(id := positions[writer]) > reached]
        token = cls(linear, tuple(above))
        ids = token._ids()
        if min(ids) < 0 < max(ids):
            raise BadToken(str(token), "it mixes positive and negative IDs")
        return token

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the token with the text `text`, such as `m7~first.9`. Raises `BadToken` if `text` is not a token."""
        first, *entries = text.split("~")
        if not first.startswith("m"):
            raise BadToken(text, "it does not begin with m and the linear position, as m7~first.9 does")
        parts = [entry.rpartition(".") for entry in entries]
        if not all(name for name, _, _ in parts):
            wrong = next(entry for entry, (name, _, _) in zip(entries, parts, strict=True) if not name)
            raise BadToken(text, f"{wrong!r} is not a writer's name, a dot and its position")
        linear, *reached = _parse_ids(text, [first[1:], *(id for _, _, id in parts)])
        names = [name for name, _, _ in parts]
        if "%" in text:
            names = [_unescape(text, name) for name in names]
        positions = dict(zip(names, reached, strict=True))
        if len(positions) < len(names):
            ((name, _),) = Counter(names).most_common(1)
            raise BadToken(text, f"it names {name!r} twice")
        return cls.of(linear, positions)

    def __str__(self) -> str:
        entries = (f"{name.replace('%', '%25').replace('~', '%7E')}.{id}" for name, id in self.positions)
        return "~".join((f"m{self.linear}", *entries))

    def at(self, writer: str) -> int:
        """Return the position of `writer`: the linear position if the token does not name the writer."""
        return dict(self.positions).get(writer, self.linear)

    def covers(self, other: "Token | str | int") -> bool:
        """Whether each position of this token is at or beyond that of `other`: a token, its text, or an ID.

        Raises `BadToken` as `compare` does.
        """
        other = as_token(other)
        _check_direction(self, other)
        if is_beyond(other.linear, self.linear):
            return False
        own = dict(self.positions)
        return not any(is_beyond(id, own.get(name, self.linear)) for name, id in other.positions)

    def compare(self, other: "Token | str | int") -> Order:
        """Compare this token with `other`: a token, its text, or an ID of all writers.

        Returns:
            `Order.EQUAL` if the tokens are equal, `Order.BEFORE` if only `other` covers this token, `Order.AFTER` if
            only this token covers `other`; otherwise `Order.INCOMPARABLE`.

        Raises:
            BadToken: `other` is neither a token nor an ID, or the IDs of the two tokens have different signs.
        """
        other = as_token(other)
        _check_direction(self, other)
        pairs = [(self.linear, other.linear), *((own, other_id) for _, own, other_id in self._writers_of_both(other))]
        less = any(is_beyond(other_id, own) for own, other_id in pairs)
        more = any(is_beyond(own, other_id) for own, other_id in pairs)
        if less and more:
            return Order.INCOMPARABLE
        return Order.BEFORE if less else Order.AFTER if more else Order.EQUAL

    def least_upper(self, other: "Token | str | int") -> "Token":
        """Return the least token that covers this token and `other`: everything that either of two readers has read.

        Raises `BadToken` as `compare` does.
        """
        return self._merge(as_token(other), farther)

    def greatest_lower(self, other: "Token | str | int") -> "Token":
        """Return the greatest token that this token and `other` cover: everything that both of two readers have read.

        Raises `BadToken` as `compare` does.
        """
        return self._merge(as_token(other), nearer)

    def farthest(self) -> int:
        """Return the ID farthest from 0 that the token names."""
        ids = self._ids()
        return max(max(ids), min(ids), key=abs)

    def _merge(self, other: "Token", choose: Callable[[int, int], int]) -> "Token":
        _check_direction(self, other)
        merged = {name: choose(own, other_id) for name, own, other_id in self._writers_of_both(other)}
        return Token.of(choose(self.linear, other.linear), merged)

    def _writers_of_both(self, other: "Token") -> Iterator[tuple[str, int, int]]:
        """Yield each writer that either token names, with its position in this token and in `other`."""
        own, other_id = dict(self.positions), dict(other.positions)
        for name in own.keys() | other_id.keys():
            yield name, own.get(name, self.linear), other_id.get(name, other.linear)

    def _ids(self) -> list[int]:
        return [self.linear, *[id for _, id in self.positions]]


def as_token(value: Token | str | int) -> Token:
    """Convert a token, its text, or an ID (all writers up to this ID) to a token. Raises `BadToken`."""
    match value:
        case Token():
            return value
        case str():
            return Token.parse(value)
        case int() if not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return Token(value)
    if isinstance(value, int) and not isinstance(value, bool):
        raise BadToken(str(value), "a stream ID must fit into 64 bits")
    raise BadToken(
        str(value),
        f"give a Token, its text, or a stream ID as an int; the type {type(value).__name__} is not supported",
    )


ZERO = Token(0)
"""The token `m0`: no ID of any writer."""


def _unescape(text: str, name: str) -> str:
    if _INVALID_ESCAPE.search(name):
        raise BadToken(text, f"{name!r} has a % that is not part of %25 or %7E")
    return name.replace("%7E", "~").replace("%25", "%")


def _parse_ids(text: str, ids: Sequence[str]) -> list[int]:
    """Parse the IDs of a token. Raises `BadToken` if one is not a 64-bit integer in its shortest form.

    One regular expression checks all IDs, because thousands of separate checks would block an event loop.
    """
    if _IDS.fullmatch("~".join(ids)):
        numbers = [*map(int, ids)]
        if min(numbers) >= -(2**63) and max(numbers) < 2**63:
            return numbers
    wrong = next(id for id in ids if not _ID.fullmatch(id) or not -(2**63) <= int(id) < 2**63)
    raise BadToken(text, f"{wrong!r} is not a stream ID")


def _check_direction(a: Token, b: Token) -> None:
    """Raise `BadToken` if the IDs of the tokens have different signs."""
    if a.farthest() * b.farthest() < 0:
        raise BadToken(str(b), f"its stream runs in the other direction than that of {a}")


_SPAN = re.compile(r"(-?[0-9]+)(?:-(-?[0-9]+))?")


def interval_text(sets: Mapping[str, Iterable[tuple[int, int]]], direction: DirectionName = "forward") -> str:
    """Format sets of IDs as text, such as `first:1-7:9,second:8`. The writers are sorted; empty sets are left out.

    Args:
        sets: writer -> intervals `(low, high]` of magnitudes, as `parse_intervals` returns them.
        direction: `forward`, or `backward` for negative IDs in the text.
    """
    signed = Direction.from_name(direction).signed
    spans = {
        writer: [_format_span(signed(low + 1), signed(high)) for low, high in ids]
        for writer, ids in sorted(sets.items())
    }
    return ",".join(":".join((_escape(writer), *listed)) for writer, listed in spans.items() if listed)


def parse_intervals(text: str) -> dict[str, list[tuple[int, int]]]:
    """Parse sets of IDs, such as `first:1-7:9,second:8`, or `first:-1--7` on a backward stream.

    Returns:
        Writer -> intervals `(low, high]` of magnitudes (IDs without a sign), sorted and disjoint.

    Raises:
        BadToken: `text` has another form, or has positive and negative IDs.
    """
    sets: dict[str, list[tuple[int, int]]] = {}
    signs: set[bool] = set()
    for part in text.split(",") if text else ():
        name, *spans = part.split(":")
        if not name or not spans:
            raise BadToken(text, f"{part!r} is not a writer's name and its ranges, such as first:1-7:9")
        for span in spans:
            match = _SPAN.fullmatch(span)
            if not match:
                raise BadToken(text, f"{span!r} is neither an ID nor a range of IDs")
            low, high = int(match[1]), int(match[2] or match[1])
            signs |= {low < 0, high < 0}
            if not 0 < abs(low) <= abs(high) < 2**63 or len(signs) > 1:
                raise BadToken(
                    text,
                    f"{span!r} is not a valid range: all IDs must be nonzero 64-bit integers of the same sign, and the"
                    " ID nearest to 0 must come first",
                )
            sets.setdefault(unquote(name), []).append((abs(low) - 1, abs(high)))
    return {writer: _merge_intervals(intervals) for writer, intervals in sets.items()}


def _merge_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged


def _format_span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _escape(name: str) -> str:
    return name.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
