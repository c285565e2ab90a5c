"""Caches: what was invalidated is never served again, also where it was being loaded."""

import threading

import pytest

from tidemark.sources.rooms.tables import Caches


class Shelf:
    """Values that a test sets; each load is counted."""

    def __init__(self) -> None:
        self.caches = Caches({"*room": ["state", "members"]})
        self.value = "old"
        self.loads = 0

    def load(self) -> str:
        self.loads += 1
        return self.value

    def get(self, cache: str = "state", *keys: str) -> str:
        return self.caches.get(cache, keys or ("!tea",), self.load)


def test_a_value_is_loaded_once_until_it_is_invalidated() -> None:
    """By its own name and key; another key's or cache's invalidation leaves it."""
    shelf = Shelf()
    assert (shelf.get(), shelf.get(), shelf.loads) == ("old", "old", 1)
    shelf.value = "new"
    shelf.caches.invalidate("state", ["!coffee"])
    shelf.caches.invalidate("members", ["!tea"])
    shelf.caches.invalidate("never heard of", None)
    assert shelf.get() == "old"
    shelf.caches.invalidate("state", ["!tea"])
    assert shelf.get() == "new"


@pytest.mark.parametrize(("cache", "keys", "left"), [("state", None, 1), ("*room", ["!tea"], 1), ("*room", None, 0)])
def test_null_clears_a_cache_and_a_reserved_name_a_group(cache: str, keys: list[str] | None, left: int) -> None:
    """Of one key, or all of them."""
    shelf = Shelf()
    for name, key in (("state", "!tea"), ("state", "!coffee"), ("members", "!tea"))[: 3 if cache == "*room" else 2]:
        shelf.get(name, key)
    if cache == "state":
        shelf.get("members", "!tea")
    shelf.caches.invalidate(cache, keys)
    assert len(shelf.caches) == left


@pytest.mark.parametrize("how", ["its key", "its group", "the cache", "all"])
def test_a_value_that_was_being_loaded_is_not_served_after_its_invalidation(how: str) -> None:
    """The load read the older state; the invalidation came before it was done: it is loaded again."""
    shelf = Shelf()
    tell = {
        "its key": lambda: shelf.caches.invalidate("state", ["!tea"]),
        "its group": lambda: shelf.caches.invalidate("*room", ["!tea"]),
        "the cache": lambda: shelf.caches.invalidate("state", None),
        "all": shelf.caches.clear,
    }

    def slow() -> str:
        found = shelf.load()
        if shelf.loads == 1:
            shelf.value = "new"
            tell[how]()
        return found

    assert shelf.caches.get("state", ["!tea"], slow) == "new"
    assert (shelf.get(), shelf.loads) == ("new", 2)


def test_an_invalidation_does_not_wait_for_a_load() -> None:
    """The database may be slow; who invalidates goes on."""
    shelf, begun, go = Shelf(), threading.Event(), threading.Event()

    def slow() -> str:
        found = shelf.load()
        begun.set()
        assert go.wait(60)
        return found

    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(shelf.caches.get("state", ["!tea"], slow)))
    thread.start()
    assert begun.wait(60)
    shelf.value = "new"
    shelf.caches.invalidate("state", ["!tea"])
    go.set()
    thread.join()
    assert answers == ["new"]


def test_a_load_that_fails_leaves_nothing() -> None:
    """The error is the caller's; the next one loads again."""
    shelf = Shelf()

    def failing() -> str:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        shelf.caches.get("state", ["!tea"], failing)
    assert (shelf.get(), len(shelf.caches)) == ("old", 1)


def test_no_more_than_so_many_values_are_kept() -> None:
    """The oldest go."""
    caches = Caches({}, max_entries=2)
    for key in ("1", "2", "3"):
        caches.get("state", [key], lambda: "x")
    assert len(caches) == 2
