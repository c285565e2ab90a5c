"""A picture of the dashboard's panels without a Grafana: the same queries, places and names, plainly drawn."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from tests.app.prometheus import Prometheus
from tests.helm.tools import CHART

Panel = Mapping[str, Any]
"""As it stands in the chart's dashboard."""
COLUMN, ROW = 56, 38  # pixels of a unit of the grid, of which 24 are side by side
COLOURS = ("#56a64b", "#f2cc0c", "#3274d9", "#e02f44", "#ff780a", "#a352cc", "#37872d", "#8ab8ff", "#c15c17", "#b877d9")
SHOWN = 9  # series of a panel in its legend

Line = tuple[str, Sequence[tuple[float, float]]]
"""What it is called, and its values by time (s)."""


def panels() -> list[Panel]:
    """Those of the chart's dashboard."""
    found: list[Panel] = json.loads((CHART / "files/dashboard.json").read_text())["panels"]
    return found


def page(prometheus: Prometheus, panels: Iterable[Panel], namespace: str, since: float, until: float) -> str:
    """HTML with every panel, as it is from `since` to `until` (s since 1970)."""
    drawn = [_panel(panel, _lines(prometheus, panel, namespace, since, until), since, until) for panel in panels]
    style = "body{background:#111217;color:#ccccdc;font:12px sans-serif;margin:0}"
    style += "div{position:absolute;background:#181b1f;border:1px solid #2c3235;box-sizing:border-box;padding:4px 8px}"
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{''.join(drawn)}"


def _lines(prometheus: Prometheus, panel: Panel, namespace: str, since: float, until: float) -> Iterator[Line]:
    for target in panel["targets"]:
        query = target["expr"].replace("$namespace", namespace)
        step = str((until - since) / 120)
        found = prometheus.ask("query_range", query=query, start=str(since), end=str(until), step=step)
        for series in found["result"]:
            name = target.get("legendFormat", "")
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            yield name, [(float(time), float(value)) for time, value in series["values"] if value != "NaN"]


def _panel(panel: Panel, found: Iterable[Line], since: float, until: float) -> str:
    place, lines = panel["gridPos"], [line for line in found if line[1]]
    width, height = place["w"] * COLUMN - 6, place["h"] * ROW - 6
    box = f"left:{place['x'] * COLUMN}px;top:{place['y'] * ROW}px;width:{width}px;height:{height}px"
    inside = _newest(lines, panel) if panel["type"] == "stat" else _chart(lines, panel, width, height, since, until)
    return f'<div style="{box}"><b>{escape(panel["title"])}</b>{inside}</div>'


def _newest(lines: Sequence[Line], panel: Panel) -> str:
    text = _value(lines[0][1][-1][1], panel) if lines else "no data"
    return f'<p style="font-size:32px;margin:28px 0;text-align:center">{escape(text)}</p>'


def _chart(lines: Sequence[Line], panel: Panel, width: int, height: int, since: float, until: float) -> str:
    if not lines:
        return "<p>no data</p>"
    high = max((value for _, values in lines for _, value in values), default=0) or 1.0
    low = min(0.0, *(value for _, values in lines for _, value in values))
    tall, wide = height - 76, width - 24
    paths = []
    for number, (_, values) in enumerate(lines):
        points = " ".join(
            f"{(time - since) / (until - since) * wide:.1f},{tall - (value - low) / (high - low) * tall:.1f}"
            for time, value in values
        )
        colour = COLOURS[number % len(COLOURS)]
        paths.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    called = " ".join(
        f'<span style="color:{COLOURS[number % len(COLOURS)]}">&#9644; {escape(name or "value")}</span>'
        f" {escape(_value(values[-1][1], panel))} &nbsp;"
        for number, (name, values) in enumerate(lines[:SHOWN])
    )
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    top = f'<text x="2" y="12" fill="#8e8e9a" font-size="11">{escape(_value(high, panel))}</text>'
    grid = f'<rect width="{wide}" height="{tall}" fill="#14161a"/>'
    return f'<svg width="{wide}" height="{tall}" style="display:block">{grid}{"".join(paths)}{top}</svg>{called}{more}'


def _value(value: float, panel: Panel) -> str:
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    suffix = {"s": " s", "percentunit": " of 1"}.get(unit, "")
    return f"{value:.3g}{suffix}" if abs(value) < 1000 else f"{value:,.0f}{suffix}"
