"""docs/explanation/benchmarks.md, made from the results that are there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench import (
    append,
    attacks,
    cores,
    costs,
    flat,
    gap,
    history,
    idle,
    latency,
    outbox,
    quiet,
    race,
    results,
    rights,
    rooms,
    runs,
    sidecar,
    soak,
    standing,
    take,
)

PAGE = Path(__file__).parents[2] / "docs/explanation/benchmarks.md"
README = Path(__file__).parents[2] / "README.md"

Renderer = Callable[[Mapping[str, Any]], list[str]]

SECTIONS: dict[str, tuple[str, Renderer]] = {
    "throughput": ("Throughput, few streams", race.render),
    "costs": ("Cost and latency at four rates", costs.render),
    "cores": ("What one core does", cores.render),
    "streams": ("Throughput, 10 000 streams", race.render),
    "runs": ("Many facts in one record", runs.render),
    "latency": ("Latency", latency.render),
    "quiet": ("Quiet systems", quiet.render),
    "gap": ("One gap with a million pending IDs", gap.render),
    "flat": ("100 million IDs", flat.render),
    "append": ("What `tidemark.append` costs a service", append.render),
    "outbox": ("How large the outbox of `tidemark.append` grows", outbox.render),
    "take": ("Readers in SQL", take.render),
    "sidecar": ("One sidecar with 2 500 clients", sidecar.render),
    "attacks": ("One sidecar under attack", attacks.render),
    "rights": ("What logins with few rights do", rights.render),
    "history": ("The history in Postgres", history.render),
    "standing": ("What a batch does not touch", standing.render),
    "idle": ("A million idle streams", idle.render),
    "rooms": ("The room DAG", rooms.render),
    "soak": ("Memory over time", soak.render),
}

_HEAD = """\
# Benchmarks

For engineers who compare Tidemark with alternatives, or plan its size. `make bench` writes this page; `soak` runs
only by name. Every figure comes from real servers that were started for it on the machine named beside it. A run
whose final positions in Redis are wrong gives no figure.

**How it is measured.** The topic is filled before. Each contestant is a process of its own, started anew in each
round, and has the machine to itself. Tidemark is a `tidemark pipeline` with default settings. Its rate is measured
between the transactions of two batches, so it includes reading, computing and both sinks. The contestants on Spark
are timed by Spark's progress reports. Core time is the time of all processes of a contestant except the broker: for
Tidemark the driver, the JVM, the Python workers, Postgres and Redis.

**The workload.** Facts complete out of order. Each writer has several transactions open at a time. One in a hundred
takes twenty times as long as the others, and one in 33 rolls back.

**The alternatives** write their positions nowhere. They keep no evidence and no history, have no linear position, and
reject no record. All of this is to their advantage: if you need none of it, one of them may be enough. Those on the
JVM (tests/bench/java) are built by Maven, and are left out if there is no `mvn` or `javac`. They read to the end of
the topic, and have no figure unless every writer's position is right there. Kafka Streams has no changelog topic, a
cache of 64 MiB before RocksDB and larger polls, and otherwise its defaults. The Java loop is one consumer for each
thread, and a map.
"""


def write() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join([_HEAD, *_sections()]))
    if (result := results.load("costs")) is not None:
        lines = [line for line in README.read_text().splitlines() if not line.startswith(costs.README_ROW)]
        after = next(at for at, line in enumerate(lines) if line.startswith("| throughput"))
        lines.insert(after + 1, costs.readme_row(result.figures))
        README.write_text("\n".join(lines) + "\n")


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
