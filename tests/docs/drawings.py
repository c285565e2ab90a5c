"""The drawings of docs/pictures, as SVG for light and dark. `python -m tests.docs.drawings` writes them."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs/pictures"

_STYLE = """
  svg { color-scheme: light dark }
  text { font: 14px system-ui, sans-serif; fill: #1e293b }
  .bg { fill: #ffffff; stroke: #cbd5e1 }
  .small { font-size: 12px; fill: #475569 }
  .strong { font-weight: 600 }
  .mid { text-anchor: middle }
  .line { stroke: #64748b; stroke-width: 1.5; fill: none }
  .arrow { stroke: #64748b; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  .tip { fill: #64748b }
  .box { fill: #f1f5f9; stroke: #64748b; stroke-width: 1.2 }
  .done { fill: #99f6e4; stroke: #0f766e; stroke-width: 1.5 }
  .open { fill: #ffffff; stroke: #b45309; stroke-width: 1.5; stroke-dasharray: 4 3 }
  .lost { fill: #fecaca; stroke: #b91c1c; stroke-width: 1.5 }
  .none { fill: #ffffff; stroke: #94a3b8; stroke-width: 1 }
  .good { fill: #0f766e }
  .warn { fill: #b45309 }
  .bad { fill: #b91c1c }
  .mark { stroke: #0f766e; stroke-width: 3; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e2e8f0 }
    .bg { fill: #0f172a; stroke: #475569 }
    .small { fill: #a9b6c8 }
    .line, .arrow { stroke: #94a3b8 }
    .tip { fill: #94a3b8 }
    .box { fill: #1e293b; stroke: #94a3b8 }
    .done { fill: #115e59; stroke: #2dd4bf }
    .open { fill: #0f172a; stroke: #fbbf24 }
    .lost { fill: #7f1d1d; stroke: #f87171 }
    .none { fill: #0f172a; stroke: #64748b }
    .good { fill: #2dd4bf }
    .warn { fill: #fbbf24 }
    .bad { fill: #f87171 }
    .mark { stroke: #2dd4bf }
  }
"""


def _svg(label: str, width: int, height: int, shapes: Iterator[str]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">',
        f"<style>{_STYLE}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker>',
        f'<rect class="bg" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{text}</text>'


def _path(points: str, style: str = "arrow") -> str:
    return f'<path class="{style}" d="{points}"/>'


def _id(x: int, y: int, text: object, style: str) -> str:
    return f'<circle class="{style}" cx="{x}" cy="{y}" r="14"/>' + _text(x, y + 5, str(text), "mid")


def _box(x: int, y: int, width: int, height: int, *lines: str, style: str = "box") -> Iterator[str]:
    yield f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
    top = y + height // 2 + 5 - 9 * (len(lines) - 1)
    for number, line in enumerate(lines):
        yield _text(x + width // 2, top + 18 * number, line, "mid small" if number else "mid strong")


def out_of_order() -> str:
    def shapes() -> Iterator[str]:
        yield _text(24, 54, "Transaction A", "strong")
        yield from _box(150, 36, 400, 28, style="open")
        yield _text(162, 55, "takes ID 2")
        yield _text(480, 55, "commits")
        yield _text(24, 100, "Transaction B", "strong")
        yield from _box(230, 82, 190, 28, style="done")
        yield _text(242, 101, "takes ID 3")
        yield _text(350, 101, "commits")
        yield _path("M150 130H740")
        yield _text(694, 124, "time", "small")
        yield _path("M440 30V300", "line")
        yield _path("M620 36V300", "line")
        yield _text(446, 150, "poll 1", "small")
        yield _text(626, 150, "poll 2", "small")
        yield _text(24, 184, "Consumer remembers", "strong")
        yield _text(24, 202, "the highest ID")
        yield _text(446, 184, "reads 3,")
        yield _text(446, 202, "remembers 3")
        yield _text(626, 184, "asks for IDs &gt; 3:", "bad")
        yield _text(626, 202, "2 is lost", "bad strong")
        yield _text(24, 252, "Consumer reads up", "strong")
        yield _text(24, 270, "to the position")
        yield _text(446, 252, "position 1:")
        yield _text(446, 270, "reads nothing")
        yield _text(626, 252, "position 3:", "good")
        yield _text(626, 270, "reads 2 and 3", "good strong")

    return _svg("B commits before A: a consumer that remembers 3 never sees 2", 780, 312, shapes())


def positions() -> str:
    def shapes() -> Iterator[str]:
        columns = {number: 150 + 62 * number for number in range(1, 10)}
        writers = {
            "shop": {1: "done", 3: "done", 4: "open", 7: "done"},
            "web": {2: "done", 5: "done", 6: "done", 8: "done"},
        }
        for row, (writer, ids) in enumerate(writers.items()):
            y = 70 + 70 * row
            yield _text(24, y + 5, f"writer {writer}", "strong")
            yield _path(f"M150 {y}H730", "line")
            for number, style in ids.items():
                yield _id(columns[number], y, number, style)
        yield _path(f"M{columns[3] + 26} 46V94", "mark")
        yield _text(columns[3] + 32, 42, "shop is at 3", "good")
        yield _path(f"M{columns[8] + 26} 116V164", "mark")
        yield _text(columns[8] - 32, 190, "web is at 8", "good")
        yield _text(24, 235, "linear position", "strong")
        yield _path("M150 230H730", "line")
        for number in range(1, 9):
            yield _id(columns[number], 230, number, "done" if number < 4 else "open" if number == 4 else "none")
        yield _path(f"M{columns[3] + 26} 206V254", "mark")
        yield _text(24, 290, "ID 4 is open, so the stream is complete up to 3 only.", "small")
        yield _text(380, 290, "Green: committed or rolled back. Dashed: open.", "small")

    return _svg(
        "Each writer has a position; the linear position is the highest ID below every open ID", 780, 310, shapes()
    )


def gap() -> str:
    def shapes() -> Iterator[str]:
        yield _text(24, 40, "stream sales", "strong")
        yield _path("M60 90H730", "line")
        styles = {5: "done", 6: "done", 7: "done", 8: "open", 9: "done", 10: "done", 11: "done"}
        for place, (number, style) in enumerate(styles.items()):
            yield _id(150 + 80 * place, 90, number, style)
        yield _path("M350 60V120", "mark")
        yield _text(258, 52, "position 7", "good strong")
        yield _text(374, 52, "gap: 8", "warn strong")
        yield _text(520, 52, "pending: 9 to 11")
        yield _path("M390 150V112")
        yield from _box(
            240, 150, 300, 62, "blocker: writer checkout", "pid 4913, idle in transaction, 16 s", style="open"
        )
        yield _text(24, 242, "When transaction 4913 ends, the position moves from 7 to 11 in one step.", "small")

    return _svg("A gap at 8 holds the position at 7; its blocker is an open transaction", 780, 262, shapes())


def pipeline() -> str:
    def shapes() -> Iterator[str]:
        yield from _box(20, 40, 130, 60, "service", "append() in SQL")
        yield from _box(20, 140, 130, 60, "relay", "reads the outbox")
        yield from _box(20, 240, 130, 60, "other writers", "records on Kafka")
        yield from _box(200, 130, 110, 80, "Kafka", "facts, control")
        yield from _box(360, 30, 180, 56, "decode", "records to runs")
        yield from _box(360, 112, 180, 56, "state machine", "positions, gaps")
        yield from _box(360, 194, 180, 56, "publish", "one batch at a time")
        yield from _box(600, 30, 160, 56, "Postgres", "1. one transaction")
        yield from _box(600, 112, 160, 56, "Redis", "2. keys, channels")
        yield from _box(600, 194, 160, 56, "dead letters", "3. bad records")
        yield from _box(600, 280, 160, 56, "readers, sidecar", "HTTP, lines, SQL")
        yield _text(360, 290, "Spark runs the three steps;", "small")
        yield _text(360, 308, "one active pipeline, any standbys", "small")
        for points in (
            "M85 100V138", "M150 170H198", "M150 270C180 270 180 200 198 200", "M310 170C340 170 330 58 358 58",
            "M450 86V110", "M450 168V192", "M540 222C575 222 570 58 598 58", "M540 222C575 222 570 140 598 140",
            "M540 222H598", "M770 140C782 200 780 300 762 308",
        ):  # fmt: skip
            yield _path(points)
        yield _path("M760 140H770", "line")

    return _svg(
        "Services and relays write to Kafka; the pipeline publishes to Postgres, then Redis", 800, 352, shapes()
    )


def timelines() -> str:
    def shapes() -> Iterator[str]:
        yield _text(24, 54, "timeline 1", "strong")
        yield _path("M130 50H640", "line")
        for number in range(1, 9):
            yield _id(100 + 62 * number, 50, number, "lost" if number > 5 else "done")
        yield _path("M441 20V80", "mark")
        yield _text(430, 104, "backup", "good mid")
        yield _text(536, 96, "6 to 8: lost by the restore,", "bad")
        yield _text(536, 114, "readers have seen them", "bad")
        yield _path("M441 112V150L480 166")
        yield _text(24, 174, "timeline 2", "strong")
        yield _path("M492 170H750", "line")
        for number in range(6, 10):
            yield _id(120 + 62 * number, 170, number, "done" if number > 8 else "open")
        yield _text(430, 216, "6 to 8 again: published as late,", "warn")
        yield _text(430, 234, "so that readers repair")
        yield _text(664, 216, "9: new", "good")
        yield _text(24, 234, "The published position stays at 8. It never moves back.", "small")

    return _svg("After a restore IDs 6 to 8 are given out again and published as late", 790, 256, shapes())


def _badge(name: str, value: str, width: int) -> str:
    """A name and its value on one line, as code hosts show it."""
    left = 12 + 7 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 20" width="{width}" height="20" role="img"'
        f' aria-label="{name}: {value}">'
        f'<rect width="{width}" height="20" rx="3" fill="#0f766e"/>'
        f'<path d="M3 0H{left}V20H3A3 3 0 0 1 0 17V3A3 3 0 0 1 3 0" fill="#334155"/>'
        f'<g fill="#fff" font-family="system-ui, sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left // 2}" y="14">{name}</text><text x="{(left + width) // 2}" y="14">{value}</text></g></svg>\n'
    )


def licence() -> str:
    return _badge("licence", _project()["license"], 126)


def ci() -> str:
    """Static, without a result: the address of the repository, which a badge with the result needs, is not known."""
    return _badge("CI", "GitHub Actions", 126)


def python_versions() -> str:
    pattern = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    versions = [found[1] for text in _project()["classifiers"] if (found := pattern.fullmatch(text))]
    return _badge("python", ", ".join(versions), 70 + 30 * len(versions))


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    return project


DRAWINGS: Mapping[str, Callable[[], str]] = {
    "ci.svg": ci,
    "gap.svg": gap,
    "licence.svg": licence,
    "out-of-order.svg": out_of_order,
    "pipeline.svg": pipeline,
    "positions.svg": positions,
    "python.svg": python_versions,
    "timelines.svg": timelines,
}


if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        (FOLDER / name).write_text(drawing())
