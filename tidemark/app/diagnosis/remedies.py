"""What ends the waiting for a writer: one function for the verbs and the live page alike. Pure."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["open transaction", "alive", "silent", "fenced", "unknown", "no heartbeat", "blocked"]

_PROCESS = re.compile(r"\bpid (\d+)\b")
_PREPARED = re.compile(r"\bprepared transaction (.+?)(?: in database .*| since .*|, user .*|)$")


@dataclass(frozen=True, slots=True)
class Remedy:
    """`advice` is a sentence for people; `command` is what to type, empty if only the writer itself can help."""

    advice: str
    command: str


def remedy(
    verdict: Verdict,
    stream: str,
    writer: str,
    *,
    id: int,
    epoch: int,
    transactions: Sequence[str],
    relayed: bool,
    bridged: bool,
    cause: str = "",
) -> Remedy:
    """What settles the open IDs of a writer, or ends the waiting for it.

    Args:
        verdict: what is known of the writer's life.
        id: the highest ID that the writer has completed, signed: everything up to it may be settled.
        epoch: the epoch in which it is waited for.
        transactions: the transactions that hold its IDs, a line each, as an OPEN record has them.
        relayed: whether it joined as the relay of a database does, so that `tidemark relay blockers` knows it.
        bridged: whether `tidemark synapse` sends the stream's records.
        cause: why its relay or bridge sends nothing new, with what to do, as an OPEN record has it.
    """
    if verdict == "blocked":
        return Remedy(f"{cause}.", "")
    if verdict == "no heartbeat":
        program = "the bridge to Synapse" if bridged else f"the relay of {writer}" if relayed else writer
        return Remedy(f"Start {program}; the end of its log says why it ended.", "")
    blockers = f"tidemark {'synapse' if bridged else 'relay'} blockers"
    if verdict == "open transaction":
        if statement := _ending(transactions):
            return Remedy("End the transaction, by this statement in its own database:", statement)
        return Remedy("In its database, this names the transaction and how to end it:", blockers)
    if verdict == "alive":
        if relayed or bridged:
            return Remedy(
                f"{writer} is alive, so a transaction of it is open. In its database, this names the transaction:",
                blockers,
            )
        return Remedy(f"{writer} is alive and has not completed these IDs: look at its own log.", "")
    if bridged:
        return Remedy(
            f"{_WAITING[verdict].format(writer, epoch)} If it is gone for good:", _synapse_retire(stream, writer)
        )
    named = ["--epoch", str(epoch)] if verdict == "unknown" else []
    options = shlex.join([*named, f"--id={id}"])
    command = f'tidemark retire {options} --by "$USER" --why "gone for good" {shlex.join(arguments(stream, writer))}'
    return Remedy(f"{_WAITING[verdict].format(writer, epoch)} If it is gone for good:", command)


_WAITING = {
    "silent": "Start {0}, or the relay of its database.",
    "fenced": "Start {0}, in an epoch above {1}.",
    "unknown": "Let {0} join.",
}


def arguments(*words: str) -> list[str]:
    """Names as arguments of a command, of which none passes for an option."""
    return [*(["--"] if any(word.startswith("-") for word in words) else []), *words]


def _synapse_retire(stream: str, writer: str) -> str:
    """The bridge proves from Synapse's tables what an operator could only claim."""
    return f"tidemark synapse retire {shlex.join(arguments(writer, stream))}"


def _ending(transactions: Sequence[str]) -> str:
    """The statement that ends the first of them, which is the oldest; empty if its line does not say who it is."""
    if not transactions:
        return ""
    if found := _PROCESS.search(transactions[0]):
        return f"select pg_terminate_backend({found[1]})"
    if found := _PREPARED.search(transactions[0]):
        return "rollback prepared '{}'".format(found[1].replace("'", "''"))
    return ""
