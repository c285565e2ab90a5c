"""`tidemark config`: the effective settings, where each came from, and no secret."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from pydantic import SecretStr

from tidemark.app.connections import Shown, masked, masked_url
from tidemark.app.settings import Settings, origin_of, unknown_variables, variable_of


def lines(settings: Settings) -> Iterator[str]:
    """One line per setting, then one per variable that looks like a setting and is none."""
    rows = [(variable_of(name), _shown(name, getattr(settings, name)), origin_of(name)) for name in _names()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for variable, value, origin in rows:
        yield f"{variable:<{widths[0]}}  {value:<{widths[1]}}  {origin}"
    known = [row[0] for row in rows]
    for variable in unknown_variables():
        close = get_close_matches(variable, known, n=1)
        yield f"{variable} is no setting" + (f"; did you mean {close[0]}?" if close else "")


def _names() -> list[str]:
    return list(Settings.model_fields)


def _shown(name: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case SecretStr():
            shown = [it for it in Settings.model_fields[name].metadata if isinstance(it, Shown)]
            if not shown:
                return "***"
            return (masked_url if shown[0].web else masked)(value.get_secret_value())
        case _:
            return masked(str(value)).replace("\n", "\\n")
