"""Caches: a value is not returned after its invalidation, even if it was being loaded."""

import threading

import pytest

from tidemark.sources.rooms.tables import Caches


class CountingLoader:
    """Caches whose values all load `value`, which a test sets. Counts the loads."""

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
    """The invalidation of another key, another cache or an unknown cache does not remove the value."""
    loader = CountingLoader()
    assert (loader.get(), loader.get(), loader.loads) == ("old", "old", 1)
    loader.value = "new"
    loader.caches.invalidate("state", ["!coffee"])
    loader.caches.invalidate("members", ["!tea"])
    loader.caches.invalidate("unknown", None)
    assert loader.get() == "old"
    loader.caches.invalidate("state", ["!tea"])
    assert loader.get() == "new"


@pytest.mark.parametrize(("cache", "keys", "left"), [("state", None, 1), ("*room", ["!tea"], 1), ("*room", None, 0)])
def test_null_keys_clear_a_cache_and_a_group_name_clears_its_caches(
    cache: str, keys: list[str] | None, left: int
) -> None:
    """A group name with a key clears the key in all caches of the group; with null, all their keys."""
    loader = CountingLoader()
    for name, key in (("state", "!tea"), ("state", "!coffee"), ("members", "!tea"))[: 3 if cache == "*room" else 2]:
        loader.get(name, key)
    if cache == "state":
        loader.get("members", "!tea")
    loader.caches.invalidate(cache, keys)
    assert len(loader.caches) == left


@pytest.mark.parametrize("how", ["its key", "its group", "the cache", "all"])
def test_a_value_that_was_being_loaded_is_not_served_after_its_invalidation(how: str) -> None:
    """The invalidation comes after the load has read the old value, before it returns. The value is loaded again."""
    loader = CountingLoader()
    invalidations = {
        "its key": lambda: loader.caches.invalidate("state", ["!tea"]),
        "its group": lambda: loader.caches.invalidate("*room", ["!tea"]),
        "the cache": lambda: loader.caches.invalidate("state", None),
        "all": loader.caches.clear,
    }

    def slow() -> str:
        value = loader.load()
        if loader.loads == 1:
            loader.value = "new"
            invalidations[how]()
        return value

    assert loader.caches.get("state", ["!tea"], slow) == "new"
    assert (loader.get(), loader.loads) == ("new", 2)


def test_an_invalidation_does_not_wait_for_a_load() -> None:
    """`invalidate` returns while a load of the value is running."""
    loader, has_begun, may_end = CountingLoader(), threading.Event(), threading.Event()

    def slow() -> str:
        value = loader.load()
        has_begun.set()
        assert may_end.wait(60)
        return value

    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(loader.caches.get("state", ["!tea"], slow)))
    thread.start()
    assert has_begun.wait(60)
    loader.value = "new"
    loader.caches.invalidate("state", ["!tea"])
    may_end.set()
    thread.join()
    assert answers == ["new"]


def test_a_failed_load_stores_nothing() -> None:
    """The caller gets the error, and the next call loads again."""
    loader = CountingLoader()

    def failing() -> str:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        loader.caches.get("state", ["!tea"], failing)
    assert (loader.get(), len(loader.caches)) == ("old", 1)


def test_the_oldest_values_beyond_the_limit_are_removed() -> None:
    """With `max_entries=2`, the third value replaces the first."""
    caches = Caches({}, max_entries=2)
    for key in ("1", "2", "3"):
        caches.get("state", [key], lambda: "x")
    assert len(caches) == 2
