"""The programs that docs/how-to/write-facts.md shows: each places an order, takes one back, and places another."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.services.shop import Shop

HERE = Path(__file__).parent


def places_orders(shop: Shop, command: Sequence[str | Path], changes: Mapping[str, str] | None = None) -> None:
    """Run by this command, it leaves two facts, and an ID between that is void."""
    before = shop.head()
    known = shop.proved().keys() if before else set()
    done = subprocess.run(
        command, env=shop.environment | dict(changes or {}), timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = shop.proved()
    new = {id: row for id, row in found.items() if id not in known}
    assert new == {before + 1: {"total": 40}, before + 3: {"total": 42}}
