"""What `tidemark replay` prints: for people in sentences, for programs one object."""

from collections.abc import Iterator
from typing import Final

import msgspec

from tidemark.app.printed import as_object, for_people, plain
from tidemark.app.verbs import recordings
from tidemark.app.verbs.explain import clock, evidence
from tidemark.app.verbs.replay import PartCompared, Parting, ReplayReport, named

SHOWN: Final = 10  # streams; the JSON has all


def as_json(found: ReplayReport) -> str:
    parted = [
        plain(it) | {"record": None if it.record is None else msgspec.Raw(recordings.as_line(it.record).encode())}
        for it in found.parted
    ]
    return as_object(plain(found) | {"parted": parted})


def as_text(found: ReplayReport) -> str:
    lines = [line for it in found.parted[:SHOWN] for line in _parting(it)]
    if len(found.parted) > SHOWN:
        lines.append(f"{len(found.parted) - SHOWN} streams more part from their history")
    unknown = [f"{stream}: nothing of it could be compared: {why}" for stream, why in found.unknown.items()]
    lines += unknown[:SHOWN]
    if len(unknown) > SHOWN:
        lines.append(f"nothing could be compared of {len(unknown) - SHOWN} streams more")
    parts = [f"{stream}: compared {_part(it)}" for stream, it in found.parts.items()]
    lines += parts[:SHOWN]
    if len(parts) > SHOWN:
        lines.append(f"{len(parts) - SHOWN} streams more were compared in part")
    if found.absent:
        named = ", ".join(found.absent[:SHOWN]) + (", ..." if len(found.absent) > SHOWN else "")
        lines.append(f"not compared, as there is no record of them: {len(found.absent)} streams: {named}")
    said = f"{found.records} records give the history of {len(found.alike)} of"
    every = len(found.alike) + len(found.parted) + len(found.unknown)
    return for_people([*lines, f"{said} {every} stream{'' if every == 1 else 's'}: {found.batches} batches"])


def _part(it: PartCompared) -> str:
    told = []
    if it.after is not None:
        missing = f"the recording begins at offset {it.offset}" if it.offset else "older days of history are dropped"
        line = "its line nowhere" if it.line_from is None else f"its line beyond {it.line_from}"
        told.append(f"behind {named(it.after)} only, as {missing}; {line}")
    if it.behind:
        upto = "no batch" if it.upto is None else named(it.upto)
        told.append(f"up to {upto} only, where the recording ends: {it.behind} came behind it")
    return ", and ".join(told)


def _parting(it: Parting) -> Iterator[str]:
    where = "after the last record" if it.record is None else "at the record below"
    when = "in the end" if it.time is None else f"after batch {it.batch} of {clock(it.time)}"
    whose = "the line" if it.writer is None else it.writer
    if it.evidence is None:
        yield (
            f"{it.stream}: they part {where}: {when} {whose} is at {it.history} in the history, and at"
            f" {it.replayed} in the replay"
        )
    else:
        told, now = map(evidence, it.evidence)
        yield (
            f"{it.stream}: they part {where}: {when} {whose} is at {it.history} by {told} in the history,"
            f" and by {now} in the replay"
        )
    if it.record is not None:
        yield f"    {recordings.as_text(it.record)}"
