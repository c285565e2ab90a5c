"""Many writers of several streams, played from a seed. Pure: the clock is passed in, and nothing is sent.

Facts complete out of order and roll back; writers idle, announce, hang, crash and come back with a new epoch, join late
and retire; records come twice, and the dead send after they were fenced. What is true is known at every moment.
"""

from collections import Counter
from collections.abc import Collection
from random import Random

from tests.play.agenda import Agenda
from tests.play.cast import Cast, direction
from tests.play.play import Held, StreamPlay
from tests.play.stream import SimulatedStream, SimulatedWriter
from tidemark.streaming.wire.records import Record


class Simulation:
    """One play, of streams that are new.

    The same seed and cast give the same records, however the time is sliced into steps. A record must be sent in its
    place: the order of a stream's records is part of the play. Not thread-safe.
    """

    def __init__(self, seed: int, cast: Cast) -> None:
        self._random = Random(seed)
        self._agenda = Agenda()
        self._rate = cast.rate
        self._kinds: Counter[str] = Counter()
        self._unsent: list[Record] = []
        self._plays: dict[str, StreamPlay] = {}
        for name in cast.stream_names():
            stream = SimulatedStream(name, direction(name))
            play = self._plays[name] = StreamPlay(stream, cast.habits, self._agenda, self._random)
            self._unsent += play.open(cast.writer_names())
        self._acting = list(self._plays.values())
        if self._acting and cast.rate > 0:
            self._agenda.plan(0.0, self._reserve)

    def step(self, now: float) -> list[Record]:
        """What goes to Kafka up to `now`, in order. `now` is in seconds since the play began and never goes back."""
        records, self._unsent = self._unsent, []
        for happened in self._agenda.play(now):
            records += happened
        return self._counted(records)

    def drain(self, leaving: Collection[Held] = ()) -> list[Record]:
        """End the play: the crashed come back, all transactions but those of `leaving` complete, everyone announces.

        With nothing left, all positions stand at their sequence's last ID. Call it again to complete the rest.
        """
        records, self._unsent = self._unsent, []
        for name, play in self._plays.items():
            records += play.close({held.id for held in leaving if held.stream == name})
        self._agenda.clear()
        return self._counted(records)

    def held(self) -> list[Held]:
        """The transactions that hang now, longest first."""
        return sorted((held for play in self._plays.values() for held in play.held()), key=lambda held: held.since)

    def down(self) -> list[SimulatedWriter]:
        """Writers that crashed and are not back yet; what they had in flight holds their stream."""
        return [writer for play in self._plays.values() for writer in play.down()]

    def streams(self) -> list[SimulatedStream]:
        """Each knows its true positions: what a reader of all that was given out so far must find."""
        return [play.stream for play in self._plays.values()]

    def sent(self) -> Counter[str]:
        """Records given out, by kind; and among them those to be refused, as `duplicate` and `zombie`."""
        return sum((play.refused for play in self._plays.values()), Counter(self._kinds))

    def _reserve(self, now: float) -> list[Record]:
        self._agenda.plan(now + self._random.expovariate(self._rate), self._reserve)
        self._random.choice(self._acting).reserve(now)
        return []

    def _counted(self, records: list[Record]) -> list[Record]:
        self._kinds.update(type(record).__name__.upper() for record in records)
        return records
