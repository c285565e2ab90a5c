"""The forms for threads are generated from those for asyncio."""

from pathlib import Path

import pytest

from tests.async_to_sync import GENERATED, ROOT, sync_form

SOURCE = '''"""Module."""

import asyncio
from collections.abc import Awaitable, Callable


async def ask(call: Callable[[], Awaitable[int]]) -> int:
    """Ask.

    Cancellation: it ends at
    once.

    Returns a number.
    """
    task = asyncio.current_task()  # async only
    try:
        # what they await is kept
        return await call() + await asyncio.to_thread(len, "await")
    except asyncio.CancelledError:  # async only
        print(task)
        raise
'''


@pytest.mark.parametrize("source", GENERATED, ids=str)
def test_sync_form_is_what_its_source_generates(source: Path) -> None:
    """If this fails, run `make format`."""
    assert (ROOT / GENERATED[source]).read_text() == sync_form((ROOT / source).read_text(), str(source))


def test_sync_form_leaves_out_what_only_asyncio_has() -> None:
    """Keywords, awaitables, threads, cancellation and marked statements go; comments and texts stay."""
    text = sync_form(SOURCE, str(next(iter(GENERATED))))
    assert "Generated from" in text
    assert "async" not in text.replace("async_positions", "")
    assert "def ask(call: Callable[[], int]) -> int:" in text
    assert '    """Ask.\n\n    Returns a number.\n    """\n    # what they await is kept\n' in text
    assert text.endswith('    return call() + len("await")\n')
