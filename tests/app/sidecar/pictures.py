"""The pictures of the live page in docs/, of a sidecar behind which twelve streams move: `make pictures`."""

import time
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from playwright.sync_api import Browser

from tests.app.sidecar.given import At, SidecarClient, moved
from tests.app.sidecar.test_page import browser, opened
from tests.sinks.given import batch, rejected
from tests.sinks.reader.given import Pipeline
from tidemark.streaming.core.effects import LateCompletion, StreamEffects
from tidemark.streaming.values.limits import Rejected

__all__ = ["browser"]

DOCS = Path(__file__).parents[3] / "docs/pictures"
NAMES = (
    *("events", "account_data", "backfill", "caches", "device_lists", "federation", "presence", "push_rules"),
    *("receipts", "room_state", "to_device", "typing"),
)
BATCHES = 20
PAUSE = 0.5  # s


@dataclass
class Moving:
    """Three writers that go on by `speed` IDs a batch; from `owe` on the third does not complete some of its IDs."""

    name: str
    speed: int
    position: int
    owed: tuple[int, int] | None = None
    since: int = 0

    def owe(self, width: int, seconds: int) -> None:
        low = self.position - 3
        self.owed, self.since = (low, low + width), _now() - 1000 * seconds

    def moves(self) -> StreamEffects:
        before, self.position = self.position, self.position + self.speed
        writers = {f"writer-{number}": At(before - number, self.position - number) for number in (1, 2, 3)}
        if self.owed is None:
            return moved(self.name, self.position - 3, **writers)
        low, high = self.owed
        writers["writer-3"] = At(low, low, pending=high + 1, since=self.since)
        return moved(self.name, low, **writers)


def test_the_calm_and_the_troubled_page_are_taken(pipeline: Pipeline, client: SidecarClient, browser: Browser) -> None:
    """For people to look at; what the page says has tests of its own."""
    streams = {name: Moving(name, 3 + number % 7, 1000 * (number + 3)) for number, name in enumerate(NAMES)}

    def publish(extra: StreamEffects | None = None, letters: list[Rejected] | None = None) -> None:
        moves = [stream.moves() for stream in streams.values()]
        if extra is not None:
            moves.append(extra)
        pipeline.number += 1
        made = batch(pipeline.number, *moves, token=pipeline.lease.token, rejected=letters or [], now=_now())
        pipeline.mirror.publish(made, pipeline.store.apply(made))

    with opened(browser, client.base_url) as page:
        page.set_viewport_size({"width": 1280, "height": 800})
        for _ in range(BATCHES):
            publish()
            time.sleep(PAUSE)
        page.screenshot(path=DOCS / "page-calm.png")
        streams["events"].owe(42, seconds=254)
        streams["room_state"].owe(9, seconds=38)
        late = [LateCompletion("writer-1", 1, 3, 5, 2, "skipped")]
        publish(
            replace(moved("invites", 9, **{"writer-1": At(0, 9)}), late=late), [rejected("facts", "conflict", range(3))]
        )
        for _ in range(3 * BATCHES):
            publish()
            time.sleep(PAUSE)
        page.screenshot(path=DOCS / "page-trouble.png")


def _now() -> int:
    return int(time.time() * 1000)
