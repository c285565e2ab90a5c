"""A stream, its keys in Redis and its tables in Postgres in a few lines: what a follower is held to.

Every write to `StreamModel` is the world's; `answer` is a shell's answer. Magnitudes inside, `sign` at the edges.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidemark.sinks.reader.events import Advance, Late, Place
from tidemark.sinks.reader.redis import parse_entry
from tidemark.sinks.reader.requests import (
    Answer,
    ListEntry,
    ReadHistory,
    ReadKeys,
    ReadList,
    ReadNewest,
    Request,
    StreamHistory,
    StreamKeys,
)
from tidemark.streaming.values.direction import is_beyond

Fields = dict[str, str]


@dataclass
class ModelEdge:
    """`what` is `fact`, `void`, `announced`, (a join over facts that nobody announced) `unseen`, or (an operator's act)
    `skipped`."""

    prev: int
    id: int
    what: str
    delivered: bool = False


@dataclass
class ModelWriter:
    last: int
    epoch: int = 0
    position: int = 0
    edges: list[ModelEdge] = field(default_factory=list)
    retired: bool = False
    forgotten: bool = False

    def settle(self) -> None:
        for edge in self.edges:
            if edge.prev >= self.position:
                if edge.prev > self.position or not edge.delivered:
                    return
                self.position = edge.id


class StreamModel:
    def __init__(self, sign: int) -> None:
        self.sign = sign
        self.head = 0
        self.line = 0
        self.writers: dict[str, ModelWriter] = {}
        self.facts: dict[int, str | None] = {}  # the table: ID -> writer, of all that is committed
        self.completed: set[int] = set()
        self.batch = 0
        self.late = 0
        # Postgres
        self.history: list[tuple[str, Fields]] = []
        self.positions: dict[str, int] = {}
        # Redis
        self.known = False
        self.shown: dict[str, int] = {}
        self.list: list[ListEntry] = []
        self.ticks = 1000
        self._listed: set[tuple[str, tuple[str, ...]]] = set()
        self.shown_late = 0
        self.shown_line = 0
        self.skipped: list[tuple[str, ModelEdge]] = []  # facts whose completion is still to come
        self.zombies: set[int] = set()  # facts that nobody will be told of
        self.thrown: set[int] = set()  # facts that were told late, and that their writer's next epoch calls empty
        self._waiting_late: list[Fields] = []

    # -- what writers and operators do

    def old_table(self, writers: Sequence[str | None]) -> None:
        """Rows from before the stream, each of a writer or of none; the first writer joins behind them."""
        self.facts |= {self.sign * id: who for id, who in enumerate(writers, 1)}
        self.head = len(writers)
        self.completed |= {*range(1, self.head + 1)}
        (writer,) = self.writers.values()
        if self.head:
            writer.edges.append(ModelEdge(0, self.head, "unseen", delivered=True))
            writer.last = self.head

    def join(self, name: str) -> None:
        """A new epoch of a writer that has nothing open: all of it up to the head is empty."""
        writer = self.writers.setdefault(name, ModelWriter(0))
        if writer.last < self.head:
            writer.edges.append(ModelEdge(writer.last, self.head, "announced", delivered=True))
            writer.last = self.head
        writer.retired = writer.forgotten = False
        writer.epoch += 1
        for who, edge in [*self.skipped]:
            if who == name:  # its late completion would be a zombie now
                self.skipped.remove((who, edge))
                self.zombies.add(self.sign * edge.id)

    def reserve(self, name: str, what: str) -> None:
        writer = self.writers[name]
        self.head += 1
        writer.edges.append(ModelEdge(writer.last, self.head, what))
        writer.last = self.head

    def announce(self, name: str) -> None:
        writer = self.writers[name]
        if writer.last < self.head:
            writer.edges.append(ModelEdge(writer.last, self.head, "announced"))
            writer.last = self.head

    def open(self) -> list[tuple[str, ModelEdge]]:
        return [(name, edge) for name, it in sorted(self.writers.items()) for edge in it.edges if not edge.delivered]

    def deliver(self, name: str, edge: ModelEdge) -> None:
        edge.delivered = True
        if edge.what == "fact":
            self.facts[self.sign * edge.id] = name
        if edge.what != "announced":
            self.completed.add(edge.id)

    def skip(self, name: str, edge: ModelEdge, *, early: bool) -> None:
        """An operator settles it. Its fact may be in the table already (`early`); its completion comes late."""
        if edge.what == "fact":
            self.skipped.append((name, edge))
            if early:
                self.facts[self.sign * edge.id] = name
        edge.what, edge.delivered = "skipped", True

    def come_late(self, name: str, edge: ModelEdge) -> None:
        """The completion of a fact that was skipped."""
        self.skipped.remove((name, edge))
        self.facts[self.sign * edge.id] = name
        self.completed.add(edge.id)
        self._tell_late(name, self.writers[name].epoch, edge.prev, edge.id, 1)

    def throw_out(self, name: str, facts: int) -> None:
        """The writer's next incarnation never joined; what it wrote is late, and empty for the one after it.

        Its JOIN also says that all which the first left open was rolled back; so its own IDs lie beyond both.
        """
        prev = self.head
        self.head += facts
        ids = range(prev + 1, self.head + 1)
        self.completed.update(ids)
        self.facts |= {self.sign * id: name for id in ids}
        self.thrown |= {self.sign * id for id in ids}
        writer = self.writers[name]
        writer.epoch += 1
        self._tell_late(name, writer.epoch, prev, self.head, facts)
        for edge in writer.edges:
            if not edge.delivered:
                edge.what, edge.delivered = "void", True
        self.join(name)

    def _tell_late(self, name: str, epoch: int, prev: int, id: int, facts: int) -> None:
        self.late += 7  # numbers are shared by all streams
        ids = {"prev": str(self.sign * prev), "id": str(self.sign * id)}
        fields = {"number": str(self.late), "writer": name, "epoch": str(epoch), **ids, "facts": str(facts)}
        self._waiting_late.append({"kind": "LATE", **fields, "why": "skipped"})

    def retire(self, name: str) -> None:
        writer = self.writers[name]
        if all(edge.delivered for edge in writer.edges):
            writer.retired = True

    def untold(self) -> set[int]:
        """Facts that nobody was told of yet, or only too late."""
        return self.zombies | self._waiting() | {self.sign * edge.id for _, edge in self.skipped}

    def _waiting(self) -> set[int]:
        spans = [(abs(int(it["prev"])), abs(int(it["id"])), it["writer"]) for it in self._waiting_late]
        told = ((fact, span) for fact in self.facts.items() for span in spans)
        return {id for (id, who), (prev, last, name) in told if prev < abs(id) <= last and who == name}

    # -- what the pipeline does

    def commit(self) -> list[Fields]:
        """One batch into Postgres; gives its entries."""
        self.batch += 1
        entries: list[Fields] = []
        for name, writer in sorted(self.writers.items()):
            prev = writer.position
            writer.settle()
            if writer.position > prev:
                edges = [edge for edge in writer.edges if prev < edge.id <= writer.position]
                entries.append(self._entry(name, prev, writer.position, edges))
            self.positions[name] = self.sign * writer.position
        active = [it.position for it in self.writers.values() if not it.retired]
        if self.writers:
            floor = min(active) if active else max(it.position for it in self.writers.values())
            self.line = max(self.line, floor)
        while self.line + 1 in self.completed:
            self.line += 1
        for entry in entries:
            entry["linear"] = str(self.sign * self.line)
        entries += [{**fields, **self._stamp()} for fields in self._waiting_late]
        self._waiting_late = []
        self.history += [(fields["writer"], fields) for fields in entries]
        return entries

    def publish(self) -> None:
        """Commit, and show it; where Redis lost what came before, all that Postgres has."""
        entries = self.commit()
        if not self.known:
            self.refill(newest=3)
            return
        self._show(entries)

    def forget(self, name: str) -> None:
        """A retired writer leaves state and Redis, once its moves were told and the line has passed it."""
        writer = self.writers[name]
        told = abs(self.positions.get(name, 0)) == writer.position == writer.last
        if writer.retired and told and writer.position <= self.line and self.known:
            writer.forgotten = True
            self.shown.pop(name, None)

    def trim(self, count: int) -> None:
        del self.list[:count]

    def flush(self, *, clock_back: bool) -> None:
        self.known = False
        self.shown, self.list, self.shown_late, self.shown_line = {}, [], 0, 0
        if clock_back:
            self.ticks = 0

    def refill(self, newest: int) -> None:
        """What Postgres holds, with the `newest` advances of each writer; none where late completions are left out."""
        if self.known:
            return
        chosen: list[Fields] = []
        late = [it for _, it in self.history if it["kind"] == "LATE"]
        for name, writer in self.writers.items():
            if not writer.forgotten and (not newest or len(late) <= newest):
                chosen += [it for who, it in self.history if who == name and it["kind"] == "POSITION"][-newest:]
        chosen.sort(key=lambda it: int(it["batch"]))
        chosen += late[-newest:]
        self._show(chosen)

    def prune(self, count: int) -> None:
        """Postgres's history of advances is dropped from its old end."""
        advances = [it for it in self.history if it[1]["kind"] == "POSITION"][count:]
        self.history = advances + [it for it in self.history if it[1]["kind"] == "LATE"]

    def _show(self, entries: Iterable[Fields]) -> None:
        self.known = True
        for fields in entries:
            if fields["kind"] == "POSITION" and fields["writer"] in self.shown:
                here = self.shown[fields["writer"]]
                if abs(int(fields["id"])) <= abs(here):
                    continue
            self.list.append(self._listed_now(fields))
            if fields["kind"] == "POSITION":
                self.shown[fields["writer"]] = int(fields["id"])
            else:
                self.shown_late = int(fields["number"])
        for name, position in self.positions.items():
            if not self.writers[name].forgotten:
                self.shown[name] = position
        self.shown_line = self.sign * self.line

    def _listed_now(self, fields: Fields) -> ListEntry:
        """A clock that went back shows a millisecond again; that the same entry comes in it again, nobody will see."""
        while True:
            self.ticks += 1
            here = f"{self.ticks}-0", tuple(fields.values())
            if here not in self._listed:
                self._listed.add(here)
                return ListEntry(here[0], dict(fields))

    def _entry(self, name: str, prev: int, id: int, edges: list[ModelEdge]) -> Fields:
        counts = {"facts": 0, "empty": 0, "unseen": 0, "skipped": 0}
        for edge in edges:
            kind, width = {
                "fact": ("facts", 1),
                "void": ("empty", 1),
                "announced": ("empty", edge.id - edge.prev),
                "unseen": ("unseen", edge.id - edge.prev),
                "skipped": ("skipped", edge.id - edge.prev),
            }[edge.what]
            counts[kind] += width
        ids = {"prev": str(self.sign * prev), "id": str(self.sign * id)}
        evidence = {kind: str(count) for kind, count in counts.items()}
        return {
            "kind": "POSITION",
            "writer": name,
            "epoch": str(self.writers[name].epoch),
            **ids,
            **evidence,
            **self._stamp(),
        }

    def _stamp(self) -> Fields:
        return {"batch": str(self.batch), "time": str(self.batch)}

    # -- what a shell answers

    def answer(self, request: Request, *, postgres: bool) -> Answer:
        match request:
            case ReadList(after=after):
                page = 4
                names = [entry.name for entry in self.list]
                start = 0
                if after is not None:
                    if after not in self.list:
                        return self._seen([], joined=False, more=False)
                    start = names.index(after.name) + 1
                found = self.list[start : start + page]
                return self._seen(found, joined=True, more=len(self.list) > start + page)
            case ReadNewest():
                return self._seen(self.list[-1:], joined=True, more=False)
            case ReadKeys():
                return self._seen([], joined=True, more=False)
            case ReadHistory(place=place) if postgres:
                return self._page(place)
            case _:
                return None

    def _page(self, place: Place, most: int = 3) -> StreamHistory:
        """What `sinks.postgres.history.page_after` gives."""
        chains: dict[str, tuple[int, list[Advance]]] = {}
        left = most
        for name, position in self.positions.items():
            here = place.positions.get(name, place.linear)
            if left and is_beyond(position, here):
                found = [it for it in self._advances(name) if is_beyond(it.id, here)][:left]
                left -= len(found)
                chains[name] = (position if left else found[-1].id, found)
        late = [parse_entry(ListEntry("", it)) for _, it in self.history if it["kind"] == "LATE"]
        lates = [it for it in late if isinstance(it, Late) and it.number > place.late][:most]
        return StreamHistory(chains, lates, has_more=not left or len(lates) == most)

    def _advances(self, name: str) -> list[Advance]:
        items = [parse_entry(ListEntry("", it)) for who, it in self.history if who == name and it["kind"] == "POSITION"]
        return [it for it in items if isinstance(it, Advance)]

    def _seen(self, entries: list[ListEntry], *, joined: bool, more: bool) -> StreamKeys:
        linear = self.shown_line if self.known else None
        last = entries[-1].name if entries else "0-0"
        return StreamKeys(linear, dict(self.shown), self.shown_late, None, entries, joined, more, last)
