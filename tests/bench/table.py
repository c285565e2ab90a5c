"""Markdown tables and numbers for people. Pure."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The first column is text, the others are numbers."""
    return [_row(head), _row(["---", *["--:"] * (len(head) - 1)]), *map(_row, rows)]


def verdict(reached: float, wanted: float, unit: str = "") -> str:
    """For figures that should not be larger than wanted."""
    return f"{_short(reached)}{unit} ({'' if reached <= wanted else '**not** '}within {_short(wanted)}{unit})"


def rate(per_second: float) -> str:
    """Records a second, to three digits."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if per_second >= size:
            return f"{per_second / size:.3g} {letter}"
    return f"{per_second:.3g}"


def mib(count: float) -> str:
    return f"{count / (1 << 20):.0f} MiB"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
