"""The pictures of the live page in docs/, of a sidecar behind which twelve streams move: `make pictures`.

`commands.json` gets the commands that each picture shows; `tests/docs/test_pictures.py` compares them with those that
exist.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg
from msgspec.structs import replace
from playwright.sync_api import Browser, Page

from tests.app.sidecar.given import At, SidecarClient, moved
from tests.app.sidecar.test_page import browser, opened
from tests.app.sidecar.test_page_past import open_row
from tests.sinks.given import batch, rejected
from tests.sinks.reader.given import Pipeline
from tidemark.sinks.reader.checkpoint import SCHEMA_TEXT
from tidemark.streaming.core.effects import ClosedGap, Gap, LateCompletion, StreamEffects
from tidemark.streaming.values.limits import RejectedRecords

__all__ = ["browser"]

DOCS = Path(__file__).parents[3] / "docs/pictures"
NAMES = (
    *("events", "account_data", "backfill", "caches", "device_lists", "federation", "presence", "push_rules"),
    *("receipts", "room_state", "to_device", "typing"),
)
BATCHES = 20
PAUSE = 0.5  # s
PAST = 3600  # s before the picture
PAST_STEP = 30  # s


@dataclass
class Moving:
    """Three writers that go on by `speed` IDs a batch; from `owe` on the third does not complete some of its IDs."""

    name: str
    speed: int
    position: int
    owed: tuple[int, int] | None = None
    since: int = 0
    is_new: bool = False

    def owe(self, width: int, since: int) -> None:
        low = self.position - 3
        self.owed, self.since, self.is_new = (low, low + width), since, True

    def settle(self) -> StreamEffects:
        assert self.owed is not None
        closed = [ClosedGap("writer-3", self.owed[1], "completed")]
        low, self.owed, self.is_new = self.owed[0], None, False
        before, self.position = self.position, self.position + self.speed
        writers = {"writer-1": At(before - 1, self.position - 1), "writer-2": At(before - 2, self.position - 2)}
        writers["writer-3"] = At(low, self.position - 3)
        return replace(moved(self.name, self.position - 3, **writers), closed=closed)

    def moves(self) -> StreamEffects:
        before, self.position = self.position, self.position + self.speed
        writers = {f"writer-{number}": At(before - number, self.position - number) for number in (1, 2, 3)}
        if self.owed is None:
            return moved(self.name, self.position - 3, **writers)
        low, high = self.owed
        writers["writer-3"] = At(low, low, pending=high + 1, since=self.since)
        gaps = [Gap("writer-3", 1, low, high, self.since)] if self.is_new else []
        self.is_new = False
        return replace(moved(self.name, low, **writers), gaps=gaps)


def test_the_calm_and_the_troubled_page_are_taken(
    pipeline: Pipeline, client: SidecarClient, browser: Browser, sql: psycopg.Connection
) -> None:
    """For people to look at; what the page says has tests of its own."""
    streams = {name: Moving(name, 3 + number % 7, 1000 * (number + 3)) for number, name in enumerate(NAMES)}

    def publish(*more: StreamEffects, at: int | None = None, letters: list[RejectedRecords] | None = None) -> None:
        settled = {effects.stream for effects in more}
        moves = [stream.moves() for name, stream in streams.items() if name not in settled]
        pipeline.number += 1
        made = batch(
            pipeline.number, *moves, *more, token=pipeline.lease.token, rejected=letters or [], now=at or _now()
        )
        pipeline.mirror.publish(made, pipeline.store.apply(made))

    begin = _now() - 1000 * PAST
    for second in range(0, PAST, PAST_STEP):
        at, minute = begin + 1000 * second, second / 60
        if minute in {14, 31, 44}:
            streams["events"].owe(9, at)
        if minute == 20:
            streams["room_state"].owe(5, at)
        if minute in {16, 39, 45}:
            publish(streams["events"].settle(), at=at)
        elif minute == 26:
            publish(streams["room_state"].settle(), at=at)
        else:
            publish(at=at)
    sql.execute(SCHEMA_TEXT)
    taken: dict[str, list[str]] = {}
    with opened(browser, client.base_url) as page:
        page.set_viewport_size({"width": 1280, "height": 800})
        for _ in range(BATCHES):
            publish()
            time.sleep(PAUSE)
        take(page, "page-calm.png", taken)
        streams["events"].owe(42, _now() - 254_000)
        streams["room_state"].owe(9, _now() - 38_000)
        for reader, behind in (("search", 0), ("push", 0), ("mailer", 190)):
            sql.execute(
                "insert into tidemark_reader.places (reader, stream, mode, linear, positions, late, must_read, version)"
                " values (%s, 'events', 'linear', %s, '{}', 0, '[]', 1)",
                (reader, streams["events"].position - 3 - behind),
            )
        late = [LateCompletion("writer-1", 1, 3, 5, 2, "skipped")]
        publish(
            replace(moved("invites", 9, **{"writer-1": At(0, 9)}), late=late),
            letters=[rejected("facts", "conflict", range(3))],
        )
        for _ in range(2 * BATCHES):
            publish()
            time.sleep(PAUSE)
        take(page, "page-trouble.png", taken)
        open_row(page, "events")
        page.locator(".tracks .track").first.wait_for()
        page.locator(".readers .track").first.wait_for()
        page.locator(".stream", has=page.get_by_role("button", name="events", exact=True)).screenshot(
            path=DOCS / "page-stream.png"
        )
        taken["page-stream.png"] = verbs(page)
    (DOCS / "commands.json").write_text(json.dumps(taken, indent=2) + "\n")


def take(page: Page, name: str, taken: dict[str, list[str]]) -> None:
    page.screenshot(path=DOCS / name)
    taken[name] = verbs(page)


def verbs(page: Page) -> list[str]:
    """The commands on the page."""
    return sorted({text for text in page.locator("code.command").all_text_contents() if text})


def _now() -> int:
    return int(time.time() * 1000)
