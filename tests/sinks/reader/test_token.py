"""Tokens as text and as an order, held against the text that Redis holds and against sets of (writer, ID)."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import SHARING
from tidemark.common.errors import BadToken
from tidemark.sinks.reader import ZERO, Order, Token
from tidemark.sinks.redis.client import key
from tidemark.sinks.redis.publish import Change, Redis

WRITERS = ("a", "b", "c.1", "d~e", "f%", "%7E", "é", "B")
NAMES = st.sampled_from(WRITERS)
LARGEST = 2**63 - 1


def tokens(sign: int = 1) -> st.SearchStrategy[Token]:
    ids = st.integers(0, 9).map(lambda id: sign * id)
    return st.builds(Token.of, ids, st.dictionaries(NAMES, ids, max_size=4))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Token, Token]:
    sign = draw(st.sampled_from((1, -1)))
    return draw(tokens(sign)), draw(tokens(sign))


def had(token: Token) -> set[tuple[str, int]]:
    """What the token stands for, written out: IDs of each writer, and of one that no token names."""
    return {(who, id) for who in (*WRITERS, "") for id in range(abs(token.at(who)))}


@settings(max_examples=50, suppress_health_check=SHARING)
@given(
    sign=st.sampled_from((1, -1)),
    linear=st.integers(0, 20) | st.just(LARGEST - 3),
    positions=st.dictionaries(NAMES, st.integers(0, 20) | st.integers(LARGEST - 5, LARGEST), max_size=5),
)
def test_text_is_that_of_redis(shown: Redis, keys: Any, sign: int, linear: int, positions: dict[str, int]) -> None:
    """What the script writes is parsed, and printed back byte for byte, escapes and far IDs included."""
    keys.flushall()
    told = {writer: sign * id for writer, id in positions.items()}
    shown.publish(1, [("new", Change("s", str(sign * linear), positions=[(w, str(id)) for w, id in told.items()]))])
    text = keys.get(key("s", "token"))
    assert str(Token.of(sign * linear, told)) == text
    assert Token.parse(text) == Token.of(sign * linear, told)


@given(tokens() | tokens(-1))
def test_text_comes_back(token: Token) -> None:
    """Printing and parsing give the same token, and equal tokens are one key of a dict."""
    assert Token.parse(str(token)) == token
    assert len({token, Token.parse(str(token))}) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "m", "m07", "m+7", "m-0", "m1.5", "m7 ", f"m{2**63}"),
        *("m7~", "m7~first", "m7~.9", "m7~a.9\n", "m7~a.9~a.10", "m7~a%.9", "m7~a%7e.9", "m7~a.-9", "m-7~a.9"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    """What is no token is named with what is wrong with it, and never taken for another one."""
    with pytest.raises(BadToken):
        Token.parse(text)


def test_the_error_of_a_wrong_escape_names_the_writer() -> None:
    """Only `%25` and `%7E` are escapes of a token."""
    with pytest.raises(BadToken, match="'x%1' has a % that is not part of %25 or %7E"):
        Token.parse("m7~x%1.9")


def test_entries_at_or_below_the_line_say_nothing() -> None:
    """`m7~first.7~second.3` is `m7`."""
    assert Token.parse("m7~first.7~second.3") == Token(7)


@given(pairs())
def test_order_is_that_of_what_was_read(pair: tuple[Token, Token]) -> None:
    """One token is before another where all that it stands for is in the other, and more."""
    a, b = pair
    assert (
        a.compare(b)
        == {
            (True, True): Order.EQUAL,
            (True, False): Order.BEFORE,
            (False, True): Order.AFTER,
            (False, False): Order.INCOMPARABLE,
        }[had(a) <= had(b), had(b) <= had(a)]
    )
    assert b.covers(a) == (had(a) <= had(b))
    assert a.covers(ZERO)


@given(pairs())
def test_bounds_are_union_and_intersection(pair: tuple[Token, Token]) -> None:
    """The least upper bound has been read by either of two readers, the greatest lower bound by both."""
    a, b = pair
    assert had(a.least_upper(b)) == had(a) | had(b)
    assert had(a.greatest_lower(b)) == had(a) & had(b)


class _Looked(str):
    """A text, or a piece of one, that counts how often any of them is looked at: hashed or compared."""

    times = 0

    def __hash__(self) -> int:
        _Looked.times += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        _Looked.times += 1
        return super().__eq__(other)

    def __lt__(self, other: str) -> bool:
        _Looked.times += 1
        return super().__lt__(other)

    def split(self, *given: Any) -> list[str]:
        return [*map(_Looked, super().split(*given))]

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = super().rpartition(sep)
        return _Looked(before), found, after


def _looks(act: Callable[[Token, Token], object], writers: int) -> int:
    """How often `act` looks at the names of two tokens that name so many writers each, half of them both."""
    text = {
        first: _Looked(f"m1{''.join(f'~w{number:05}.9' for number in range(first, first + writers))}")
        for first in (0, writers // 2)
    }
    a, b = (Token.parse(each) for each in text.values())
    _Looked.times = 0
    act(a, b)
    return _Looked.times


@pytest.mark.parametrize(
    "act",
    [
        lambda a, _: Token.parse(_Looked(str(a))),
        lambda a, b: a.covers(b),
        lambda a, b: a.compare(b),
        lambda a, b: a.least_upper(b),
        lambda a, b: a.greatest_lower(b),
        lambda a, b: a == b,
    ],
    ids=["parse", "covers", "compare", "least_upper", "greatest_lower", "equal"],
)
def test_long_tokens_cost_what_they_are_long(act: Callable[[Token, Token], object]) -> None:
    """Who sends a token of all that a request may hold takes about as many steps as it has entries, and not their
    square."""
    few, many = _looks(act, 500), _looks(act, 4000)
    assert few > 0
    assert many <= 16 * few  # and not 64 times; what sorts takes a little more than 8


def test_directions_are_not_compared() -> None:
    """A token of a backward stream is no token of a forward one."""
    with pytest.raises(BadToken, match="the other direction"):
        Token(7).compare(Token(-7))
