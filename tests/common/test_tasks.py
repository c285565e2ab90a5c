"""Tasks that are cancelled until they end."""

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from tidemark.common import tasks
from tidemark.common.tasks import cancel_until_done


def test_a_task_that_swallows_cancellations_is_cancelled_again_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CANCELLATIONS_UNTIL_LOGGED", 2)

    async def swallows(cancellations: int) -> None:
        for _ in range(cancellations):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.create_task(swallows(3))
        await asyncio.sleep(0)
        await cancel_until_done(task)
        assert task.done()

    with capture_logs() as logs:
        asyncio.run(run())
    (entry,) = logs
    assert "swallows" in entry["waits_in"][0]
    assert "sleep" in entry["waits_in"][1]
