"""Transactions of every kind, two relays a step at a time, kills and crashes: what relays say is true for ever."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.examples import examples
from tests.sources.relay.world import MakeDecider, SteppedRelay, World
from tidemark.sources.relay.decider import Decider

services = st.integers(0, 2)
relays = st.integers(0, 1)
writers = st.sampled_from(["", "till", "web"])
ISOLATIONS = st.sampled_from(["read committed", "repeatable read", "serializable"])


class Appending(RuleBasedStateMachine):
    """`make` gives the deciders of the relays; a mutant of it must be caught."""

    dsn: str
    make: MakeDecider = Decider

    @initialize(direction=st.sampled_from(["forward", "backward"]))
    def made(self, direction: str) -> None:
        self.world = World(self.dsn, type(self).make, direction=direction)

    @rule(service=services, isolation=ISOLATIONS, durable=st.sampled_from(["on", "off"]))
    def begin(self, service: int, isolation: str, durable: str) -> None:
        if not self.world.services[service].open:
            self.world.services[service].begin(isolation, durable)

    @rule(service=services, rows=st.integers(0, 2), writer=writers)
    def append(self, service: int, rows: int, writer: str) -> None:
        self.world.services[service].append(self.world.stream, rows, writer)

    @rule(service=services, rows=st.integers(0, 3), writer=writers)
    def append_many(self, service: int, rows: int, writer: str) -> None:
        self.world.services[service].append_many(self.world.stream, rows, writer)

    @rule(service=services, writer=writers)
    def reserve(self, service: int, writer: str) -> None:
        if self.world.services[service].open:
            self.world.services[service].reserve(self.world.stream, writer)

    @rule(service=services, rows=st.integers(0, 2))
    def complete(self, service: int, rows: int) -> None:
        if self.world.services[service].reserved:
            self.world.services[service].complete(self.world.stream, rows)

    @rule(who=st.integers(0, 5), writer=st.sampled_from(["till", "web"]), relay=relays, back=st.booleans())
    def retire(self, who: int, writer: str, relay: int, *, back: bool) -> None:
        """Of a writer that has appended, mostly by an operator, also in a transaction of a service, whatever becomes of
        that; and perhaps it is back at once."""
        operator = self.world.operator
        operator.append(self.world.stream, 1, writer)
        self.tell(relay)
        by = self.world.services[who] if who < len(self.world.services) else operator
        by.retire(self.world.stream, writer)
        if back:
            operator.append(self.world.stream, 1, writer)

    @rule(relay=relays, step=st.booleans())
    def drop(self, relay: int, *, step: bool) -> None:
        """The stream is dropped and made again, and a relay may have looked in between."""
        self.tell(relay)
        if self.world.drop() and step:
            self.tell(relay)
        self.world.make_again()

    @rule(service=services)
    def savepoint(self, service: int) -> None:
        found = self.world.services[service]
        if found.open:
            found.savepoints += 1
            found.run(f"savepoint s{found.savepoints}")

    @rule(service=services, how=st.sampled_from(["rollback to", "release"]))
    def end_savepoint(self, service: int, how: str) -> None:
        found = self.world.services[service]
        if found.savepoints:
            found.run(f"{how} s{found.savepoints}")
            found.savepoints -= 1

    @rule(service=services, how=st.sampled_from(["commit", "commit", "rollback"]))
    def end(self, service: int, how: str) -> None:
        found = self.world.services[service]
        if found.open:
            found.run(how)
            found.end()

    @rule(service=services)
    def prepare(self, service: int) -> None:
        if self.world.services[service].open:
            self.world.prepare(self.world.services[service])

    @precondition(lambda self: self.world.prepared)
    @rule(how=st.sampled_from(["commit", "rollback"]))
    def resolve(self, how: str) -> None:
        self.world.resolve(self.world.prepared[0], how)

    @rule(service=services)
    def terminate(self, service: int) -> None:
        if self.world.services[service].open:
            self.world.terminate(self.world.services[service])

    @rule()
    def bystander(self) -> None:
        """A transaction that has nothing to do with the stream, and may stay open as long as it likes."""
        found = self.world.bystander
        if found.open:
            found.run("rollback")
            found.end()
        else:
            found.begin("read committed", "on")
            found.run("select pg_current_xact_id()::text::bigint")

    @rule(relay=relays, steps=st.integers(1, 6))
    def look(self, relay: int, steps: int) -> None:
        self.relay(relay, lambda it: [it.look() for _ in range(steps)])

    @rule(relay=relays)
    def tell(self, relay: int) -> None:
        """Rounds, of which Kafka takes everything: who is new is met, joins, and is told."""

        def send_all(it: SteppedRelay) -> None:
            for _ in range(3):
                it.round()
                while it.unacknowledged:
                    it.acknowledge(first=True)
                it.settle()
                if it.begun:
                    return

        self.relay(relay, send_all)

    @rule(relay=relays)
    def acknowledge(self, relay: int) -> None:
        self.world.relays[relay].acknowledge()

    @rule(relay=relays)
    def settle(self, relay: int) -> None:
        self.world.relays[relay].settle()

    @rule(relay=relays)
    def cut_chains(self, relay: int) -> None:
        self.world.relays[relay].cut_chains()

    @rule(relay=relays)
    def die(self, relay: int) -> None:
        self.world.relays[relay].die()

    @rule(relay=relays)
    def break_off(self, relay: int) -> None:
        self.world.relays[relay].break_off()

    def relay(self, number: int, act: object) -> None:
        assert callable(act)
        act(self.world.relays[number])

    @invariant()
    def true(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.finish()
            finally:
                self.world.close()


class Crashing(Appending):
    """The same, and the server dies now and then."""

    @rule()
    def crash(self) -> None:
        self.world.crash()


def test_no_void_is_ever_committed_and_no_fact_is_missed(ready: str) -> None:
    """Savepoints, prepared transactions, isolation levels, killed sessions, two relays: all IDs are told, and truly."""
    Appending.dsn = ready
    run_state_machine_as_test(
        Appending, settings=settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
    )


def test_a_crash_of_the_server_takes_nothing_back(ready: str) -> None:
    """Also where services commit without waiting for the disk, what was told stands after it, and nothing else does."""
    Crashing.dsn = ready
    run_state_machine_as_test(
        Crashing, settings=settings(max_examples=examples(15), stateful_step_count=40, deadline=None)
    )
