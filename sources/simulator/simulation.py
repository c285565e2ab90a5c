"""Many writers of several streams, played from a seed. Pure: the clock is passed in, and nothing is sent.

Facts complete out of order and roll back; writers idle, announce, hang, crash and come back with a new epoch, join late
and retire; records come twice, and the dead send after they were fenced. What is true is known at every moment.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from random import Random

from sources.simulator.agenda import Agenda
from sources.simulator.cast import Cast, StreamMark, WriterMark, direction
from sources.simulator.play import Held, StreamPlay
from sources.simulator.stream import SimulatedStream, SimulatedWriter
from streaming.wire import Record


class Simulation:
    """One play. `past` is what earlier plays on the same topic left; without it the streams are new.

    The same seed, cast and past give the same records, however the time is sliced into steps. A record must be sent
    in its place: the order of a stream's records is part of the play. Not thread-safe.
    """

    def __init__(self, seed: int, cast: Cast, past: Mapping[str, StreamMark] | None = None) -> None:
        self._random = Random(seed)
        self._agenda = Agenda()
        self._rate = cast.rate
        self._kinds: Counter[str] = Counter()
        self._unsent: list[Record] = []
        self._plays: dict[str, StreamPlay] = {}
        past = past or {}
        names = cast.stream_names()
        for name in dict.fromkeys((*names, *past)):
            before = past.get(name, StreamMark(0, {}))
            stream = SimulatedStream(name, direction(name), before.last)
            play = self._plays[name] = StreamPlay(stream, cast.habits, self._agenda, self._random)
            self._unsent += play.open(cast.writer_names() if name in names else [], before.writers)
        self._acting = [self._plays[name] for name in names]
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

    def marks(self) -> dict[str, StreamMark]:
        """The past for the next play. To be kept (`sources.simulator.ledger`) before the records of a step are sent."""
        return {
            stream.name: StreamMark(
                stream.last, {w.name: WriterMark(w.epoch, w.retired) for w in stream.writers.values()}
            )
            for stream in self.streams()
        }

    def _reserve(self, now: float) -> list[Record]:
        self._agenda.plan(now + self._random.expovariate(self._rate), self._reserve)
        self._random.choice(self._acting).reserve(now)
        return []

    def _counted(self, records: list[Record]) -> list[Record]:
        self._kinds.update(type(record).__name__.upper() for record in records)
        return records
