"""docs/explanation/benchmarks.md, made from the results that are there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench import (
    append,
    attacks,
    cores,
    flat,
    gap,
    history,
    idle,
    latency,
    outbox,
    quiet,
    race,
    results,
    rooms,
    runs,
    sidecar,
    soak,
    standing,
)

PAGE = Path(__file__).parents[2] / "docs/explanation/benchmarks.md"

Renderer = Callable[[Mapping[str, Any]], list[str]]

SECTIONS: dict[str, tuple[str, Renderer]] = {
    "throughput": ("Throughput, few streams", race.render),
    "cores": ("What one core does", cores.render),
    "streams": ("Throughput, 10 000 streams", race.render),
    "runs": ("Many facts in one record", runs.render),
    "latency": ("Latency", latency.render),
    "quiet": ("Quiet systems", quiet.render),
    "gap": ("One gap with a million pending IDs", gap.render),
    "flat": ("100 million IDs", flat.render),
    "append": ("What `tidemark.append` costs a service", append.render),
    "outbox": ("How large the outbox of `tidemark.append` grows", outbox.render),
    "sidecar": ("One sidecar with 2 500 clients", sidecar.render),
    "attacks": ("One sidecar under attack", attacks.render),
    "history": ("The history in Postgres", history.render),
    "standing": ("What a batch does not touch", standing.render),
    "idle": ("A million idle streams", idle.render),
    "rooms": ("The room DAG", rooms.render),
    "soak": ("Memory over time", soak.render),
}

_HEAD = """\
# Benchmarks

Written by `make bench` (`python -m tests.bench`; `soak` only by name); do not edit. Every figure comes from real
servers started for it on the machine named beside it, and a run whose final positions in Redis are not exactly those
of the workload gives no figure.

How it is measured: the topic is filled before; each contestant is a process of its own, started afresh each round, and
gets the machine to itself. Tidemark is a `tidemark pipeline` with default settings. Its rate is taken between the
transactions of two batches, so it holds reading, computing and both sinks in full. The two on Spark are timed by
Spark's own progress of each batch. Core time is what all processes of a contestant but the broker took, by /proc, over
the stretch of its rate: of Tidemark the driver, the JVM, the Python workers, Postgres and Redis. Facts complete out of
order: each writer has several transactions open at a time, one in a hundred takes twenty times as long as the others,
one in 33 rolls back.

The competitors write their positions nowhere, keep no evidence of how an ID was settled and no history, know no linear
position and refuse no record, which is to their advantage. They are shown all the same: who needs none of that may well
write one. Those on the JVM (tests/bench/java) are built by Maven, and left out with a word where there is no `mvn` or
no `javac`. They read to the end of the topic, and have no figure unless every writer's position is the true one there.
Kafka Streams has no changelog topic, a cache of 64 MiB before RocksDB and larger polls; what else it has are defaults.
The Java loop is a consumer a thread and a map.
"""


def write() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join([_HEAD, *_sections()]))


def _sections() -> list[str]:
    lines: list[str] = []
    for name, (title, render) in SECTIONS.items():
        result = results.load(name)
        if result is None:
            continue
        try:
            found = [*render(result.figures), "", f"`{result.command}`, {result.date}: {result.machine}."]
        except KeyError:  # figures have no versions: what changes their shape makes them worthless
            found = [f"Measured by an older benchmark; run `{result.command}` again."]
        lines += [f"## {title}", "", *found, ""]
    return lines
