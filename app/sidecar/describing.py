"""A snapshot as it is answered, and the tag by which a client knows that it has it already. Pure."""

from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import blake2b

import msgspec

from tidemark.app.sidecar import answers
from tidemark.app.sidecar.durable import Details
from tidemark.app.sidecar.snapshots import Snapshot
from tidemark.sinks.reader.token import Token
from tidemark.streaming.effects import Blocker


def described(snapshot: Snapshot, now: float) -> answers.Stream:
    """`now` is of the clock that the snapshot was read by."""
    known, details, read_at = snapshot.known, snapshot.details, snapshot.details_read_at
    return answers.Stream(
        stream=snapshot.stream,
        state="recovering" if known is None else "known",
        linear=None if known is None else known.linear,
        vector={} if known is None else dict(sorted(known.vector.items())),
        token=None if known is None else str(Token.of(known.linear, known.vector)),
        epochs=None if details is None else dict(sorted(details.epochs.items())),
        retired=None if details is None else sorted(details.retired),
        pending=None if details is None else details.pending,
        blockers=None if details is None else [blocker(it) for it in holding(details)],
        source=None if known is None else known.source,
        age_seconds=None if known is None else _age(now, known.read_at),
        details_age_seconds=None if read_at is None else _age(now, read_at),
    )


def holding(details: Details) -> Iterable[Blocker]:
    """The gaps that hold a position back now: of each writer the nearest, and writers that never joined."""
    nearest: dict[tuple[str, int, bool], Blocker] = {}
    for gap in details.gaps:
        key = gap.writer, gap.epoch, gap.unknown
        if key not in nearest or abs(gap.low) < abs(nearest[key].low):
            nearest[key] = gap
    return sorted(nearest.values(), key=lambda gap: (gap.since, gap.writer))


def blocker(gap: Blocker) -> answers.Blocker:
    return answers.Blocker(
        writer=gap.writer,
        epoch=gap.epoch,
        low=None if gap.unknown else gap.low,
        top=None if gap.unknown else gap.top,
        since=datetime.fromtimestamp(gap.since / 1000, UTC),
    )


def tag(body: answers.Stream | answers.Streams) -> str:
    """Equal for answers that say the same at different times; weak, because their bytes differ."""
    streams = body.streams if isinstance(body, answers.Streams) else [body]
    same = [_ageless(stream) for stream in streams]
    return f'W/"{blake2b(msgspec.json.encode(same), digest_size=12).hexdigest()}"'


def _ageless(stream: answers.Stream) -> answers.Stream:
    return msgspec.structs.replace(stream, age_seconds=None, details_age_seconds=None)


def _age(now: float, then: float) -> float:
    return round(max(0.0, now - then), 3)
