"""Caches of what the tables say, which follow the stream `caches`: rows `[name, keys or null, ms]`.

A value that was loaded before an invalidation is never handed out after it was `invalidated`, also where the load was
under way. So a reader first applies the invalidations up to a position, and from then on serves nothing older.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

ALL_OF_ROOM = "*room"
"""In place of a cache's name: every cache whose key is the room."""
STATE, MEMBERS, ROOMS_OF = "state", "members", "rooms_of"
"""Caches of a room's current state, of its members, and of a member's rooms."""

V = TypeVar("V")

Entry = tuple[str, tuple[str, ...]]


class Caches:
    """Any thread may call. `groups` are names that stand for several caches of one key; `most` entries are kept."""

    def __init__(self, groups: Mapping[str, Collection[str]], most: int = 10_000) -> None:
        self._groups = groups
        self._most = most
        self._values: dict[Entry, Any] = {}
        self._loading: dict[Entry, list[set[str]]] = {}
        """Loads under way; one that is not empty was overtaken by an invalidation."""
        self._lock = Lock()

    def get(self, cache: str, keys: Sequence[str], load: Callable[[], V]) -> V:
        """The cached value, or what `load` gives; that is called again where an invalidation came meanwhile."""
        entry = cache, tuple(keys)
        while True:
            overtaken: set[str] = set()
            with self._lock:
                if entry in self._values:
                    found: V = self._values[entry]
                    return found
                self._loading.setdefault(entry, []).append(overtaken)
            try:
                value = load()
            finally:
                with self._lock:
                    self._ended(entry, overtaken)
            with self._lock:
                if not overtaken:
                    self._values[entry] = value
                    while len(self._values) > self._most:
                        del self._values[next(iter(self._values))]
                    return value

    def invalidated(self, cache: str, keys: Sequence[str] | None) -> None:
        """Forget what was cached for the keys; without keys, all of that cache. Names of other readers' caches are no
        error."""
        with self._lock:
            for name in self._groups.get(cache, (cache,)):
                self._forget(
                    [entry for entry in (*self._values, *self._loading) if entry[0] == name]
                    if keys is None
                    else [(name, tuple(keys))]
                )

    def clear(self) -> None:
        """Forget everything: where invalidations may have been missed."""
        with self._lock:
            self._forget([*self._values, *self._loading])

    def __len__(self) -> int:
        return len(self._values)

    def _forget(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._values.pop(entry, None)
            for load in self._loading.get(entry, ()):
                load.add("overtaken")

    def _ended(self, entry: Entry, load: set[str]) -> None:
        loads = self._loading[entry]
        loads[:] = [other for other in loads if other is not load]
        if not loads:
            del self._loading[entry]
