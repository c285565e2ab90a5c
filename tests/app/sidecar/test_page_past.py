"""The live page's past hour and readers in a real Chromium, and what axe-core says of the page in both themes."""

import re
import time
from importlib.resources import files
from typing import Literal

import psycopg
import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Page, expect

from tests.app.sidecar.given import At, SidecarClient, moved
from tests.app.sidecar.test_history import blocked, publish
from tests.app.sidecar.test_page import browser, opened, page, says
from tests.sinks.given import rejected
from tests.sinks.reader.conftest import brisk, service
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tidemark.streaming.core.effects import Gap, LateCompletion

__all__ = ["brisk", "browser", "page", "service"]

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def open_row(page: Page, stream: str) -> None:
    button = page.get_by_role("button", name=stream, exact=True)
    if button.get_attribute("aria-expanded") != "true":
        button.click()


@pytest.fixture
def past(pipeline: Pipeline) -> None:
    """A stream `s` that was blocked for twenty minutes. It is there before a page is opened."""
    blocked(pipeline)


def test_a_new_visitor_sees_the_past_hour(past: None, page: Page) -> None:
    """The lag in each row, and the moves and gaps of each writer in an open one."""
    expect(page.locator(".stream > svg.lag")).to_have_attribute(
        "aria-label", re.compile(r"^Lag in the past hour: at most (19|20) min.*, now 0 s$")
    )
    open_row(page, "s")
    says(page, ".hour .largest", re.compile("^at most (19|20) min.*, now 0 s$"))
    tracks = page.locator(".tracks .track")
    expect(tracks).to_have_count(2)
    expect(tracks.nth(1).locator(".strip")).to_have_attribute("aria-label", "w moved by 5 IDs in the past hour, 1 gap")
    expect(tracks.nth(1).locator(".was-gap")).to_have_count(1)
    width = tracks.nth(1).locator(".was-gap").evaluate("gap => gap.offsetWidth / gap.parentElement.offsetWidth")
    assert 0.25 < width < 0.4
    expect(page.locator(".readers")).to_have_count(0)


def test_readers_of_an_open_stream_are_shown(
    past: None, page: Page, service: ReadingService, sql: psycopg.Connection
) -> None:
    """Each with its position, and what is wrong with it; one that is gone leaves the page."""
    service.write(1)
    service.until(lambda: service.place().linear == 6)
    sql.execute("update tidemark_reader.places set linear = 3, updated_at = now() - interval '9 min'")
    sql.execute("insert into tidemark_reader.parked (reader, stream, id, reason) values ('copier', 's', 2, 'x')")
    open_row(page, "s")
    says(page, ".readers .writer", "copier")
    says(page, ".readers .position", "3")
    says(page, ".readers .remark", re.compile(r"^not running for (9|10) min.*, 1 parked$"))
    sql.execute("delete from tidemark_reader.places")
    expect(page.locator(".readers")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(
    pipeline: Pipeline,
    client: SidecarClient,
    browser: Browser,
    service: ReadingService,
    sql: psycopg.Connection,
    scheme: Literal["light", "dark"],
    width: int,
) -> None:
    """Of a page with a blocked stream, its past, a reader, late facts and dead letters; contrast is AA."""
    blocked(pipeline)
    service.write(1)
    service.until(lambda: service.place().linear == 6)
    sql.execute("update tidemark_reader.places set linear = 3, updated_at = now() - interval '9 min'")
    gap = Gap("shop", 1, 7, 11, int((time.time() - 254) * 1000))
    late = [LateCompletion("shop", 1, 3, 5, 2, "skipped")]
    publish(pipeline, 300, moved("orders", 7, shop=At(0, 7), web=At(0, 7)))
    publish(
        pipeline,
        0,
        replace(moved("orders", 7, shop=At(7, 7, pending=12, since=gap.since), web=At(7, 12)), gaps=[gap], late=late),
        rejected=[rejected("facts", "conflict", range(3))],
    )
    with opened(browser, client.base_url) as page:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 800})
        says(page, "#headline", "1 of 2 streams is blocked")
        open_row(page, "s")
        expect(page.locator(".readers .track")).to_have_count(1)
        expect(page.locator(".tracks .track")).to_have_count(4)
        page.evaluate(AXE)
        found = page.evaluate("tags => axe.run(document, {runOnly: tags})", TAGS)
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) == 0


def test_everything_is_reached_by_the_keyboard(past: None, page: Page) -> None:
    """Tab goes through filter, switch and streams in order; Enter opens a row; nothing traps the focus."""
    expect(page.locator(".numbers dd").first).to_have_text("6")
    reached = []
    for _ in range(4):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached[:3] == ["filter", "only", "s"]
    page.locator("#only").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="s", exact=True)).to_have_attribute("aria-expanded", "true")
    expect(page.locator(".tracks .track")).to_have_count(2)
