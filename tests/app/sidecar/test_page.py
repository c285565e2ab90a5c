"""The live page in a real Chromium, on a real sidecar with real servers behind it."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Literal

import psycopg
import pytest
import redis
from msgspec.structs import replace
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.app.lines.given import NO_POSITION
from tests.app.sidecar.given import At, SidecarClient, moved, sidecar
from tests.fix_synapse import begun_by_a_bridge
from tests.needs import CHROMIUM, chromium
from tests.sinks.given import batch, rejected
from tests.sinks.reader.given import Pipeline
from tests.streaming.builders import Shard, join, position, rdata
from tests.streaming.builders import opened as reports
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.sidecar.app import AppConfig
from tidemark.app.stack.processes import free_port
from tidemark.streaming.core.effects import LateCompletion
from tidemark.streaming.wire.records import DatabaseStart

PATIENCE = 60_000  # ms; also of `expect` without a word
expect.set_options(timeout=PATIENCE)


# Not longer than this module: Playwright keeps an event loop running in this thread, where others begin theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    assert path, str(CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # root in CI
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: object) -> Iterator[Page]:
    """The page in a profile of its own; whatever its scripts or the security policy complain of fails the test."""
    complaints: list[str] = []
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda told: complaints.append(told.text) if "Security Policy" in told.text else None)
        page.goto(str(url))
        yield page
    assert complaints == []


@pytest.fixture
def page(browser: Browser, client: SidecarClient) -> Iterator[Page]:
    with opened(browser, client.base_url) as page:
        yield page


def says(page: Page, selector: str, text: str | re.Pattern[str]) -> None:
    expect(page.locator(selector)).to_have_text(text, timeout=PATIENCE)


def names(page: Page) -> list[str]:
    """The streams that are shown, from top to bottom."""
    return page.locator(".stream:not([hidden]) .name").all_text_contents()  # a row that is not yet drawn has one too


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))


def held(name: str, seconds: float, *, deferred: bool = False) -> At:
    """A writer that owes 8 to 11 for so long."""
    since = int((time.time() - seconds) * 1000)
    return At(7, 7, pending=12, since=since, transactions=("pid 4711, idle in transaction",), deferred=deferred)


def test_gap_appears_is_named_and_closes(pipeline: Pipeline, page: Page) -> None:
    """Who holds the stream, which IDs and for how long stands there within seconds, and goes as the gap closes."""
    pipeline.publish(moved("orders", 7, shop=At(0, 7), web=At(0, 7)))
    says(page, "#headline", "The only stream is complete")
    pipeline.publish(moved("orders", 7, shop=held("shop", 200), web=At(7, 9)))
    says(page, "#headline", "The only stream is blocked")
    says(page, "#subline", re.compile(r"orders: shop has not completed 8\.\.11, for 3 min \d+ s\."))
    says(page, "#spoken", re.compile(r"orders is blocked: shop has not completed 8\.\.11"))
    says(page, ".problem strong", re.compile(r"shop has not completed 8\.\.11, for 3 min"))
    says(page, ".problem .explanation", "1 completed ID waits above the gap")
    says(
        page,
        ".problem .advice",
        re.compile("^Open: pid 4711, idle in transaction. End the transaction with this statement"),
    )
    says(page, ".problem .command", "select pg_terminate_backend(4711)")
    expect(page.locator(".lane .gap")).to_be_visible()
    assert page.locator(".lane .strip").first.get_attribute("aria-label") == "shop at 7"
    pipeline.publish(moved("orders", 7, shop=held("shop", 200, deferred=True), web=At(9, 10)))
    says(
        page,
        ".problem .explanation",
        re.compile("more of its records are deferred, and are read again once there is room$"),
    )
    pipeline.publish(moved("orders", 12, shop=At(7, 12), web=At(10, 12)))
    says(page, "#headline", "The only stream is moving")
    says(page, "#spoken", "orders is not blocked any more.")
    expect(page.locator(".strip .gap")).to_have_count(0)


def test_a_dead_writer_is_named_without_a_gap(pipeline: Pipeline, page: Page) -> None:
    """For whom the line waits, since when, when that writer was last seen, and what to do about it."""
    shard = Shard(now=int((time.time() - 200) * 1000))
    pipeline.publish(shard.left_by_a_dead_writer())
    says(page, "#headline", "The only stream is blocked")
    says(page, "#subline", re.compile(r"events: w1 has announced nothing beyond 7, for 3 min \d+ s\."))
    says(page, ".problem .explanation", re.compile(r"the linear position waits for it; last seen .* ago"))
    says(page, ".problem .command", re.compile(r"tidemark retire .* events w1"))
    pipeline.publish(shard.feed(position("w1", 7, 20, epoch=1)))
    says(page, "#headline", re.compile("The only stream is (moving|complete)"))


def test_a_stream_whose_relay_is_silent_is_not_called_complete(pipeline: Pipeline, page: Page, dsn: str) -> None:
    """Nothing is seen to be missing, and nobody knows whether something is; with a heartbeat it is complete again."""
    with psycopg.connect(dsn, autocommit=True) as sql:
        sql.execute("update tidemark.query_lease set since = now() - interval '1 hour'")
    now = int(time.time() * 1000)
    shard = Shard(now=now - 200_000)
    told = join("shop", 0, timeline=DatabaseStart("shop", "start-1")), rdata("shop", 1, epoch=1)
    pipeline.publish(shard.feed(*told, reports("shop", heartbeat=30)))
    says(page, "#headline", "The only stream is blocked")
    says(page, "#subline", re.compile(r"events: shop has sent no heartbeat, for 3 min \d+ s\."))
    says(page, ".problem .explanation", "whether the stream is complete is not known")
    expect(page.locator(".problem .advice")).to_contain_text("Start the relay of shop")
    shard.now = now
    pipeline.publish(shard.feed(reports("shop", heartbeat=30)))
    says(page, "#headline", re.compile("The only stream is (moving|complete)"))
    shard.now = now - 30_000
    pipeline.publish(shard.feed(reports("shop", heartbeat=3000, blocked="the sequence has CACHE 20")))
    says(page, "#subline", re.compile(r"events: shop has sent nothing new, for \d+ s\."))
    expect(page.locator(".problem .advice")).to_contain_text("the sequence has CACHE 20")


def test_of_a_stream_that_a_bridge_tells_its_own_verbs_are_shown(pipeline: Pipeline, page: Page, dsn: str) -> None:
    """Of a silent writer, of one that never joined, and of one with a gap."""
    begun_by_a_bridge(dsn, "events", "w1")
    shard = Shard(now=int((time.time() - 200) * 1000))
    pipeline.publish(shard.left_by_a_dead_writer())
    says(page, ".problem .command", "tidemark synapse retire w1 events")
    expect(page.locator(".problem .advice")).to_contain_text("Start w1")
    told = position("w1", 7, 8, epoch=1), rdata("w1", 30, 29, epoch=1)
    pipeline.publish(shard.feed(rdata("desk", 40, epoch=3), *told))
    expect(page.locator(".problem .command")).to_have_text(
        ["tidemark synapse retire w1 events", "tidemark synapse retire desk events"], timeout=PATIENCE
    )


def test_page_catches_up_when_the_sidecar_was_away(
    pipeline: Pipeline, servers: ReadSideConfig, browser: Browser
) -> None:
    """It says since when it knows nothing new, and shows what happened meanwhile when another sidecar answers."""
    pipeline.publish(moved("orders", 7, shop=At(0, 7)))
    port = free_port()
    with opened(browser, "about:blank") as page:
        with sidecar(servers, port=port):
            page.goto(f"http://127.0.0.1:{port}")
            says(page, ".numbers div:first-child dd", "7")
        says(page, "#headline", "No connection to the sidecar")
        says(page, "#subline", re.compile("This page shows data from .* ago"))
        pipeline.publish(moved("orders", 9, shop=At(7, 9)), moved("parcels", 3, shop=At(0, 3)))
        with sidecar(servers, port=port):
            # Complete at once where the sidecar's first look found Redis too slow, and the page met the stream anew.
            says(page, "#headline", re.compile("All 2 streams are (fine|complete)"))
            expect(page.locator(".numbers div:first-child dd")).to_have_text(["9", "3"])


def test_two_hundred_streams(pipeline: Pipeline, page: Page) -> None:
    """Held ones stand on top, open; a filter finds the others; no row moves while somebody points at one."""
    pipeline.publish(*(moved(f"s{number:03}", 7, w=At(0, 7)) for number in range(200)))
    pipeline.publish(moved("s150", 7, w=held("w", 60)))
    says(page, "#headline", "1 of 200 streams is blocked")
    assert names(page)[:2] == ["s150", "s000"]
    page.hover("text=s005")
    pipeline.publish(moved("s190", 7, w=held("w", 30)))
    says(page, "#sort", "1 blocked stream further down: move to the top")
    assert names(page)[:2] == ["s150", "s000"]
    page.click("#sort")
    assert names(page)[:3] == ["s150", "s190", "s000"]
    page.fill("#filter", "S17")
    says(page, "#shown", "10 of 200")
    assert names(page) == [f"s{number}" for number in range(170, 180)]
    page.fill("#filter", "")
    page.check("#only")
    assert names(page) == ["s150", "s190"]


def test_everything_by_keyboard(pipeline: Pipeline, page: Page) -> None:
    """Filter, go through the streams, open one, jump to what is held, and back."""
    pipeline.publish(*(moved(name, 7, **{f"of-{name}": At(0, 7)}) for name in ("a", "b", "c")))
    expect(page.locator(".stream")).to_have_count(3, timeout=PATIENCE)
    page.keyboard.press("ArrowDown")
    assert focused(page) == "a"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    says(page, ".lane .writer", "of-b")
    pipeline.publish(moved("c", 7, w=held("w", 60)))
    expect(page.locator("[data-state=blocked]")).to_have_count(1, timeout=PATIENCE)
    assert names(page) == ["a", "b", "c"]  # somebody is among them
    page.keyboard.press("n")
    assert focused(page) == "c"
    page.keyboard.press("/")
    assert focused(page) == "filter"
    page.keyboard.type("of-a")
    assert names(page) == ["a"]
    page.keyboard.press("Escape")
    # Nobody is among the rows now, so the blocked stream may be at the top by then.
    assert names(page) in (["a", "b", "c"], ["c", "a", "b"])


def test_page_asks_for_a_token(pipeline: Pipeline, servers: ReadSideConfig, browser: Browser, tmp_path: Path) -> None:
    """A sidecar with tokens shows nothing before one is given; it lasts for the tab and stands in no address."""
    pipeline.publish(moved("orders", 7, shop=At(0, 7)))
    (tmp_path / "tokens").write_text("sesame\n")
    with (
        sidecar(servers, AppConfig(tokens_file=tmp_path / "tokens")) as client,
        opened(browser, client.base_url) as page,
    ):
        says(page, "#headline", "A token is needed")
        expect(page.locator("#board")).to_be_hidden()
        assert focused(page) == "token"
        page.keyboard.type("open\n")
        says(page, "#headline", "The token is not valid")
        page.keyboard.type("sesame\n")
        says(page, "#headline", "The only stream is complete")
        page.reload()
        says(page, "#headline", "The only stream is complete")
        assert "sesame" not in page.url


def test_rejected_and_late_records_are_told(pipeline: Pipeline, page: Page) -> None:
    """Dead letters by reason with the age of the newest, late completions with their stream."""
    late = replace(moved("orders", 9, shop=At(0, 9)), late=[LateCompletion("shop", 1, 3, 5, 2, "skipped")])
    letters = [rejected("facts", "zombie", range(3)), rejected("facts", "conflict", range(8, 9))]
    now = int(time.time() * 1000)
    made = batch(1, late, token=pipeline.lease.token, rejected=letters, now=now)
    pipeline.mirror.publish(made, pipeline.store.apply(made))
    says(page, "#dead-letters", "4")
    says(page, "#late", "1")
    says(page, ".late", "1 late")
    said = r"Records were rejected, the last \d+ s ago: 3 zombie, 1 conflict in all\."
    expect(page.locator("#notices li").nth(1).locator("span")).to_have_text(re.compile(said), timeout=PATIENCE)
    expect(page.locator("#notices .command")).to_have_text(["tidemark late list", "tidemark dead-letters list"])


def test_partitions_with_lag_are_listed(pipeline: Pipeline, page: Page) -> None:
    """The three that wait longest, with their age; the number of the others."""
    pipeline.publish(moved("orders", 9, shop=At(0, 9)))
    lag = [
        ("facts", partition, records, 600.0 - partition, None, None) for partition, records in enumerate([7, 0, 1, 5])
    ]
    pipeline.store.note_lagging_partitions(lag)
    shown = page.locator("#notices li span")
    expect(shown).to_have_count(4, timeout=PATIENCE)
    unread = "Partition 0 of facts has a lag of 7 records, the oldest has been unread for 10 min."
    expect(shown.nth(0)).to_have_text(unread)
    expect(shown.nth(1)).to_have_text("Partition 1 of facts has an unknown lag: Kafka has not answered for 10 min.")
    expect(shown.nth(3)).to_have_text("1 more partition has lag.")


def test_copies_that_differ_and_what_operators_did_are_told(pipeline: Pipeline, redis_url: str, page: Page) -> None:
    """A Redis that knows more than Postgres, once that has lasted; an act with who did it, and in whose name; a writer
    that never joined with the command that would end the waiting."""
    pipeline.publish(moved("orders", 7, shop=At(0, 7)))
    says(page, "#headline", re.compile("The only stream is (moving|complete)"))
    expect(page.locator("#audit")).to_be_hidden()
    pipeline.store.policies.change("orders", {"gap_seconds": 5}, "ada", "customers wait")
    with redis.Redis.from_url(redis_url) as client:
        client.set("tidemark:{orders}:linear", "9")
    says(
        page,
        "#overrides li span",
        re.compile(r"POLICY of orders, \d+ s ago, by ada \(as \w+\): customers wait \(gap_seconds:"),
    )
    says(page, "#subline", re.compile(r"orders: Redis is at 9 and Postgres at 7, for \d+ s\."))
    says(page, ".problem .command", "tidemark verify")
    shard = Shard()
    pipeline.publish(shard.feed(rdata("desk", 4, epoch=3)))
    says(page, ".problem .command >> nth=0", re.compile(r"tidemark retire --epoch 3 --id=4 .* events desk"))


def test_numbers_are_grouped_and_strips_say_where_they_begin(pipeline: Pipeline, page: Page) -> None:
    """Also beyond 2^53, and of a strip both ends; a command stands there by itself."""
    low, high, since = 12_345_678, 9_007_199_254_740_993, int((time.time() - 60) * 1000)
    writers = {"shop": At(0, low, pending=low + 9, since=since), "web": At(0, high)}
    pipeline.publish(moved("orders", low, **writers))
    says(page, "#subline", re.compile(r"has not completed 12,345,679\.\.12,345,686, for 1 min"))
    says(page, ".numbers div:first-child dd", "12,345,678")
    says(page, ".command", re.compile(r"tidemark retire --id=.* orders shop"))
    says(page, ".ends .allocated", "allocated to 9,007,199,254,740,993")
    expect(page.locator(".ends .first")).to_have_text(re.compile(r"from [\d,]+"))
    assert page.locator(".lane .position").all_text_contents() == ["12,345,678", "9,007,199,254,740,993"]


def test_labels_name_the_linear_lag(pipeline: Pipeline, page: Page) -> None:
    """The figures, the columns and the legend use the words of the glossary."""
    pipeline.publish(moved("orders", 7, shop=At(0, 7)))
    says(page, "#headline", "The only stream is complete")
    expect(page.locator(".figures dt")).to_have_text(
        ["IDs a second", "Lag (IDs)", "Late completions", "Dead letters", "Last batch"]
    )
    expect(page.locator(".column-heads span")).to_have_text(
        ["stream", "up to the highest ID", "linear", "lag (IDs)", "IDs/s", "lag, past hour", "state"]
    )
    expect(page.locator(".legend")).to_contain_text("allocated, unknown")
    says(page, "#lag", "0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_parts_of_a_strip_can_be_told_apart(page: Page, scheme: Literal["light", "dark"]) -> None:
    """By their brightness alone: what is complete, what is complete above the linear position, and the rest."""
    page.emulate_media(color_scheme=scheme)
    parts = [brightness(page, f".swatch.{name}") for name in ("complete", "settled", "open")]
    for one, other in pairwise(sorted(parts)):
        assert (other + 0.05) / (one + 0.05) > 1.9


def brightness(page: Page, selector: str) -> float:
    """The relative luminance of its background, as WCAG has it."""
    colour = page.locator(selector).evaluate("it => getComputedStyle(it).backgroundColor")
    channels = [int(it) / 255 for it in re.findall(r"\d+", colour)[:3]]
    linear = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in channels]
    return sum(weight * it for weight, it in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_phone_shows_no_hints_for_keys(browser: Browser, client: SidecarClient) -> None:
    """It has no keyboard; what it means to be held is told there too, and nothing is wider than the screen."""
    with browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as context:
        page = context.new_page()
        page.goto(str(client.base_url))
        says(page, "#headline", "No stream yet")
        expect(page.locator(".keys")).to_be_hidden()
        expect(page.locator("footer")).to_contain_text("Blocked: an ID has been missing")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_pages_do_not_come_back_all_at_once(browser: Browser) -> None:
    """Between half and one and a half times a pause, by chance."""
    with browser.new_context() as context:
        page = context.new_page()
        page.add_init_script(
            "window.pauses = []; const set = setTimeout; Math.random = () => 1;"
            "window.setTimeout = (act, pause) => { pauses.push(pause); return set(act, pause); };"
        )
        with sidecar(NO_POSITION) as client:
            page.goto(str(client.base_url))
            says(page, "#headline", "No stream yet")
        says(page, "#headline", "No connection to the sidecar")
        assert 750 in page.evaluate("pauses")


def test_a_note_of_whoever_runs_it_stands_above_the_streams(servers: ReadSideConfig, browser: Browser) -> None:
    """Its first line always; a further one may be about a stream. It is text, whatever it looks like."""
    note = "staging of <b>Ada</b>\norders: what was bought\n\nAsk her first."
    with sidecar(servers, AppConfig(banner=note)) as client, opened(browser, client.base_url) as page:
        says(page, "#note summary", "staging of <b>Ada</b>")
        says(page, "#note p >> nth=0", "orders: what was bought")
        says(page, "#note strong", "orders:")
        expect(page.locator("#note p")).to_have_count(2)
        expect(page.locator("#note p").first).to_be_visible()
        page.set_viewport_size({"width": 390, "height": 844})
        page.reload()
        says(page, "#note summary", "staging of <b>Ada</b>")
        expect(page.locator("#note p").first).not_to_be_visible()
        page.locator("#note summary").click()
        expect(page.locator("#note p").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_without_a_note_there_is_no_room_for_one(client: SidecarClient, page: Page) -> None:
    """As before; the file is there, and empty."""
    assert client.get("/page/note.txt").text == ""
    expect(page.locator("#note")).to_be_hidden()


def test_files_are_guarded_and_kept(client: SidecarClient) -> None:
    """Nothing may run or load from elsewhere, and a browser that has a file is told that it is the same."""
    for path in ("/", "/page/page.js", "/page/page.css"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/../page.py").status_code == 404
