"""A writer of one stream of Synapse: what it said, how far it was told, and who may still commit IDs of it. Pure."""

from dataclasses import dataclass, field

from tidemark.streaming.values.intervals import EMPTY, Intervals


@dataclass(frozen=True, slots=True)
class Barrier:
    """Who of a dead incarnation may still commit an ID up to `head` is one of those who are waited for."""

    head: int
    waiting: frozenset[int]


@dataclass(slots=True)
class SynapseWriter:
    """`doubted`: its next word may be a successor's; `spoken`: it has spoken since."""

    told: int
    word: int = 0
    doubted: bool = True
    spoken: bool = False
    barriers: list[Barrier] = field(default_factory=list)
    since: int = 0
    """IDs beyond were given out in its present life."""
    empty: Intervals = EMPTY
    """What it has announced to be empty of those, beyond what is told."""
    moved: bool = False
    """Whether there is reason to look at the table since it was last told."""
    answers: int = 0
    """How often it may say where it is and is no successor by that: it was asked."""
    owes: bool = False
    """Others had been told beyond its facts when it joined: those are to be read once all of them have ended."""
    retiring: bool = False
    ends: int | None = None
    """Of one that retires: where it ends; None: nobody has looked yet."""
    beyond: int = 0
    """A word that named more than was given out, and so counts for nothing; 0: none since."""

    def say(self, id: int, *, again: bool = False) -> None:
        """`again`: it tells of no move. It was asked, or has begun."""
        if again and self.answers:
            self.answers -= 1
        else:
            self.doubted |= again
        self.retiring = False
        self.beyond = 0
        self.spoken = True
        self.moved |= id > self.told
        self.word = max(self.word, id)

    def check(self, head: int) -> bool:
        """No word counts that names an ID that is not given out: the sequence went back, and of what it gives out again
        the writer has said nothing. `head` was read after the word was heard. Whether this was one."""
        if self.word <= head:
            return False
        self.beyond, self.word, self.moved = self.word, self.told, False
        self.doubted, self.spoken, self.empty = True, False, EMPTY
        return True

    @property
    def may_be_told(self) -> bool:
        return self.moved and self.told < self.word and not (self.doubted or self.owes)

    @property
    def may_pay(self) -> bool:
        return self.word >= self.told and not (self.doubted or self.barriers)

    @property
    def has_ended(self) -> bool:
        return self.ends is not None and self.told >= self.ends and not self.owes

    @property
    def guarded(self) -> int:
        """Up to here an ID that stands nowhere may still come."""
        return max((barrier.head for barrier in self.barriers), default=0)
