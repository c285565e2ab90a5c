"""The picture of the dashboard in docs/: `make pictures`. Grafana's own would look better, and show the same."""

import time

from playwright.sync_api import Browser

from tests.app.sidecar.test_page import browser
from tests.incidents.drawn import COLUMN, page, panels
from tests.incidents.pages import FOLDER
from tests.incidents.scene import Scene
from tidemark.streaming.wire.records import Join

__all__ = ["browser"]

SECONDS = 150
APPEND = "select tidemark.append(%s, '{}')"


def test_the_dashboard_is_taken(scene: Scene, browser: Browser) -> None:
    """Of services that append, one of which hangs for a minute, with a dead letter on the way."""
    began = time.time()
    with scene.service() as service, scene.service() as hung:
        for second in range(SECONDS):
            for _ in range(1 + second % 7):
                service.execute(APPEND, ["orders"])
                service.execute(APPEND, ["returns"])
            if second == 60:
                hung.execute("begin")
                hung.execute(APPEND, ["orders"])
                scene.site.send(
                    Join(stream="ledger", writer="w", epoch=2, id=0), Join(stream="ledger", writer="w", epoch=1, id=0)
                )
            if second == 120:
                hung.execute("rollback")
            time.sleep(1)
    taken = browser.new_page(viewport={"width": 24 * COLUMN, "height": 900})
    taken.set_content(page(scene.prometheus, panels(), "streams", began, time.time()))
    taken.screenshot(path=FOLDER.parents[1] / "pictures/dashboard.png", full_page=True)
