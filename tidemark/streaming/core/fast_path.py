"""The fast path: advances all in-order streams of a batch at once, with numpy. Pure; no Spark.

A stream is *in order* in a batch if two conditions are met. The state has nothing pending, buffered or late, before and
after the batch. The batch has only runs that continue the chains of their writers, so that the linear position reaches
the highest allocated ID. Nearly all streams are in order in nearly all batches.

`core.stream` advances all streams that are not certain to be in order. For in-order streams, both modules give the same
effects and state, byte for byte.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from tidemark.streaming.core import writer_table
from tidemark.streaming.core.chain import EMPTY_RANGES_MAX
from tidemark.streaming.core.codec import FORMAT, StoredStream, StoredTable, decode_stored, encode_stored
from tidemark.streaming.core.effects import Source, SourceReport, StreamEffects, Summary, WriterAdvance, WriterRow
from tidemark.streaming.core.writer_table import COLUMNS, StoredChain, StoredWriter
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import Ids, PackedSteps, append_steps, are_distinct, last_bound
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.runs import POSITION, RDATA, Mask, RunColumns

if TYPE_CHECKING:
    from tidemark.streaming.core.store import States, StreamInput

_NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(slots=True)
class EdgeColumns:
    """The edges of some streams as parallel arrays, sorted by stream, writer and ID.

    All edges of one writer are one run, because they continue the writer's chain without a gap. IDs are magnitudes.

    Attributes:
        ids: ID of each edge.
        kinds: kind of each edge.
        run_prevs: for each run the `prev` of its first edge.
        run_firsts: for each run the index of its first edge.
        stream_firsts: for each stream the index of its first edge.
    """

    ids: Ids
    kinds: npt.NDArray[np.uint8]
    run_prevs: Ids
    run_firsts: Ids
    stream_firsts: Ids
    _non_facts: Ids = field(init=False)
    """Indexes of the edges that are not facts."""

    def __post_init__(self) -> None:
        self._non_facts = np.flatnonzero(self.kinds != RDATA)

    def reaches_head(self, linears: Ids, floors: Ids, heads: Ids) -> Mask:
        """Test for each stream whether its linear position reaches its head.

        This is so if the batch completes each ID from the floor to the head, no ID twice, and no ID up to the linear
        position.

        Args:
            linears: for each stream the linear position before the batch.
            floors: for each stream the lowest position of its active writers after the batch, or the linear position
                before the batch if that is higher.
            heads: for each stream the highest allocated ID after the batch.

        Returns:
            A mask of the streams: True if the linear position reaches the head. If the numbers are too large to test
            for repeated IDs, False.
        """
        announced = self._non_facts[self.kinds[self._non_facts] == POSITION]
        counts = np.diff(self.stream_firsts, append=len(self.ids))
        above = self.ids > np.repeat(floors, counts)
        above[announced] = False
        completed = np.add.reduceat(above, self.stream_firsts, dtype=np.int64)
        reached: Mask = completed == heads - floors
        if np.any(self.ids[self.run_firsts] <= linears[self._streams_of(self.run_firsts)]):
            passed = self.ids <= np.repeat(linears, counts)
            passed[announced] = False
            reached[self._streams_of(np.flatnonzero(passed))] = False
        if len(self.run_firsts) > len(self.stream_firsts):
            reached[self._streams_with_repeated_ids(counts, announced, linears, heads)] = False
        return reached

    def _streams_with_repeated_ids(self, counts: Ids, announced: Ids, linears: Ids, heads: Ids) -> Ids:
        """The indexes of streams in which an ID is completed twice. All streams if the test would need over 62 bits."""
        # Give each stream a separate range of numbers, as wide as the distance from its linear position to its head.
        widths = heads - linears
        if widths.sum(dtype=np.float64) >= 2**62:
            return np.arange(len(widths))
        numbers = np.repeat(np.cumsum(widths) - widths - linears, counts)
        numbers += self.ids
        if len(announced):
            numbers = np.delete(numbers, announced)
        if are_distinct(numbers):
            return _NO_IDS
        streams = self._streams_of(np.delete(np.arange(len(self.ids)), announced))
        order = np.argsort(numbers, kind="stable")
        repeated: Ids = streams[order[1:][numbers[order[1:]] == numbers[order[:-1]]]]
        return repeated

    def count_facts_and_empty(self) -> tuple[list[int], list[int]]:
        """For each run the number of facts, and the number of IDs that were declared empty (`Evidence.empty`)."""
        empty = np.add.reduceat(self.kinds != RDATA, self.run_firsts, dtype=np.int64)
        facts = np.diff(self.run_firsts, append=len(self.ids)) - empty
        announced = self._non_facts[self.kinds[self._non_facts] == POSITION]
        np.add.at(empty, self._runs_of(announced), self.ids[announced] - self._prevs_of(announced) - 1)
        return facts.tolist(), empty.tolist()

    def empty_ranges(self, count_max: int) -> list[tuple[int, PackedSteps]]:
        """The ranges that writers declared empty (`Run.empty`).

        Returns:
            For each run with such ranges: the index of the run, and its highest ranges, at most `count_max`.
        """
        runs, lows, highs = self._last_empty_ranges(count_max)
        selected = np.arange(len(runs)) >= np.searchsorted(runs, runs, side="right") - count_max
        runs, lows, highs = runs[selected], lows[selected], highs[selected]
        if not len(runs):
            return []
        firsts = np.flatnonzero(_differs_from_previous(runs))
        return list(zip(runs[firsts].tolist(), PackedSteps.split(lows, highs, firsts), strict=True))

    def _last_empty_ranges(self, count: int) -> tuple[Ids, Ids, Ids]:
        """Like `_all_empty_ranges`, but the result may lack lower ranges of a run: its highest `count` ones are right.

        In most batches, the last edges of each run are enough. Their lowest range may begin below these edges.
        """
        lengths = np.diff(self.run_firsts, append=len(self.ids))
        last_counts = np.minimum(lengths, 4 * count)
        if 2 * last_counts.sum() < len(self.ids):
            ranges = self._last_edges(last_counts)._all_empty_ranges()
            is_complete = (last_counts == lengths) | (np.bincount(ranges[0], minlength=len(lengths)) > count)
            if is_complete.all():
                return ranges
        return self._all_empty_ranges()

    def _last_edges(self, counts: Ids) -> "EdgeColumns":
        """The last `counts[i]` edges of each run `i`, at least one. The result has no streams, only runs."""
        firsts = np.append(self.run_firsts[1:], len(self.ids)) - counts
        new_firsts = np.cumsum(counts) - counts
        edges = np.arange(counts.sum()) + np.repeat(firsts - new_firsts, counts)
        return EdgeColumns(self.ids[edges], self.kinds[edges], self._prevs_of(firsts), new_firsts, _NO_IDS)

    def _all_empty_ranges(self) -> tuple[Ids, Ids, Ids]:
        """The ranges that writers declared empty: the index of the run, the lower and the upper bound of each."""
        # Masks take 1 byte for each edge, but indexes 8. There may be millions of edges, all of them void.
        is_fact, widths = self.kinds == RDATA, np.diff(self.ids, prepend=0)
        widths[self.run_firsts] = self.ids[self.run_firsts] - self.run_prevs
        has_empty = widths > is_fact
        touches_previous = has_empty.copy()
        touches_previous[1:] &= ~is_fact[:-1]
        touches_previous[self.run_firsts] = False
        firsts = np.flatnonzero(has_empty & ~touches_previous)
        lasts = np.flatnonzero(has_empty & ~np.append(touches_previous[1:], False))
        return self._runs_of(firsts), self._prevs_of(firsts), self.ids[lasts] - is_fact[lasts]

    def _prevs_of(self, edges: Ids) -> Ids:
        """The `prev` of each edge of `edges`."""
        runs = self._runs_of(edges)
        return np.where(self.run_firsts[runs] == edges, self.run_prevs[runs], self.ids[edges - 1])

    def _runs_of(self, edges: Ids) -> Ids:
        """For each edge the index of its run."""
        return np.searchsorted(self.run_firsts, edges, side="right") - 1

    def _streams_of(self, edges: Ids) -> Ids:
        """For each edge the index of its stream."""
        return np.searchsorted(self.stream_firsts, edges, side="right") - 1


class MergedRun(NamedTuple):
    """All edges of one writer in the batch, as one run.

    Attributes:
        writer_number: number of the writer, counted over the writers of all candidates.
        end: position of the writer's chain after the batch.
        fact_count: number of facts.
        empty_count: number of IDs that were declared empty.
        oldest_ms: lowest Kafka time (ms) of the records.
        newest_ms: highest Kafka time (ms) of the records.
        empty_ranges: the highest ranges that the writer declared empty in the batch; None if there are none.
    """

    writer_number: int
    end: int
    fact_count: int
    empty_count: int
    oldest_ms: int
    newest_ms: int
    empty_ranges: PackedSteps | None


class Candidate(NamedTuple):
    """A stream that may be in order. `first_writer_number`: number of its first writer, counted over all candidates."""

    name: str
    stored: StoredStream
    first_writer_number: int


class InOrderStream(NamedTuple):
    """A candidate that is in order.

    Attributes:
        head_before: the highest allocated ID before the batch.
        head: the highest allocated ID after the batch.
        edge_count: number of edges in the batch.
        runs: the edges, one run for each writer.
    """

    candidate: Candidate
    direction: int
    head_before: int
    head: int
    edge_count: int
    runs: list[MergedRun]


@dataclass(frozen=True, slots=True)
class CandidateRuns:
    """The runs of the candidates, sorted by writer and start. Each run continues its writer's chain.

    Attributes:
        candidates: the candidates, in the order of their writers' numbers.
        columns: the runs of all streams.
        run_indexes: for each run its index in `columns`.
        writer_numbers: for each run the number of its writer.
        run_candidates: for each run the index of its candidate.
        directions: for each candidate the direction of its IDs.
        heads_before: for each candidate the highest allocated ID before the batch.
        floors: for each candidate the lowest position of its active writers after the batch, or the linear position
            before the batch if that is higher.
        heads: for each candidate the highest allocated ID after the batch.
    """

    candidates: list[Candidate]
    columns: RunColumns
    run_indexes: Ids
    writer_numbers: Ids
    run_candidates: Ids
    directions: Ids
    heads_before: Ids
    floors: Ids
    heads: Ids

    @classmethod
    def of(cls, candidates: list[Candidate], columns: RunColumns, runs: Ids, writers: Ids) -> "CandidateRuns":
        """Sort the runs. Leave out each candidate with a run that does not continue its writer's chain.

        Args:
            columns: the runs of all streams.
            runs: for each run of the candidates its index in `columns`.
            writers: for each run of the candidates the number of its writer.
        """
        order = np.lexsort((columns.rows["start"][runs], writers))
        runs, writers = runs[order], writers[order]
        rows, ends = columns.rows[runs], columns.ids[columns.rows["stop"][runs] - 1]
        states = [candidate.stored for candidate in candidates]
        positions = np.array([writer.chain.position for stored in states for writer in stored.writers])
        firsts = np.array([candidate.first_writer_number for candidate in candidates])
        run_candidates = np.searchsorted(firsts, writers, side="right") - 1
        directions = np.array([stored.direction for stored in states])
        unknown = directions[run_candidates] == Direction.UNKNOWN
        directions[run_candidates[unknown]] = rows["direction"][unknown]
        begins, offsets = np.concatenate(([0], ends[:-1])), rows["first_offset"]
        is_first = _differs_from_previous(writers)
        begins[is_first] = positions[writers[is_first]]
        epochs = np.array([writer.epoch for stored in states for writer in stored.writers])
        continues = (rows["start"] == begins) & (rows["epoch"] == epochs[writers])
        continues &= rows["direction"] == directions[run_candidates]
        continues &= is_first | (offsets >= np.concatenate(([0], offsets[:-1])))
        heads_before = np.maximum(
            np.maximum.reduceat(positions, firsts), [_highest_inactive_position(stored) for stored in states]
        )
        positions[writers] = ends  # if a writer has several runs, numpy assigns the end of the last one
        floors = np.maximum(np.minimum.reduceat(positions, firsts), [stored.linear for stored in states])
        heads = np.maximum(np.maximum.reduceat(positions, firsts), heads_before)
        sorted_runs = cls(candidates, columns, runs, writers, run_candidates, directions, heads_before, floors, heads)
        return sorted_runs if continues.all() else sorted_runs._drop({*run_candidates[~continues].tolist()})

    def in_order_streams(self) -> Iterator[InOrderStream]:
        """Yield the candidates that are in order, with their merged runs."""
        if not self.candidates:
            return
        rows, begins = self.columns.rows[self.run_indexes], self.columns.begins[self.run_indexes]
        lengths = rows["stop"] - begins
        first = np.flatnonzero(_differs_from_previous(self.writer_numbers))
        starts_at = np.cumsum(lengths) - lengths
        run_candidates = self.run_candidates[first]
        first_merged = np.flatnonzero(_differs_from_previous(run_candidates))
        edges = EdgeColumns(
            *_join_edges(self.columns, begins.tolist(), rows["stop"].tolist()),
            rows["start"][first],
            starts_at[first],
            starts_at[first][first_merged],
        )
        linears = np.array([candidate.stored.linear for candidate in self.candidates])
        reaches_head = edges.reaches_head(linears, self.floors, self.heads)
        empty_ranges: list[PackedSteps | None] = [None] * len(first)
        for number, ranges in edges.empty_ranges(EMPTY_RANGES_MAX):
            empty_ranges[number] = ranges
        numbers = (
            self.writer_numbers[first],
            self.columns.ids[rows["stop"][np.append(first[1:], len(rows)) - 1] - 1],
            *map(np.array, edges.count_facts_and_empty()),
            np.minimum.reduceat(rows["oldest"], first),
            np.maximum.reduceat(rows["newest"], first),
        )
        merged_runs = [*map(MergedRun, *(column.tolist() for column in numbers), empty_ranges)]
        for candidate, is_in_order, direction, head_before, head, count, begin, end in zip(
            self.candidates,
            reaches_head.tolist(),
            self.directions.tolist(),
            self.heads_before.tolist(),
            self.heads.tolist(),
            np.add.reduceat(lengths, first[first_merged]).tolist(),
            first_merged.tolist(),
            [*first_merged[1:].tolist(), len(merged_runs)],
            strict=True,
        ):
            if is_in_order:
                yield InOrderStream(candidate, direction, head_before, head, count, merged_runs[begin:end])

    def _drop(self, dropped_candidates: set[int]) -> "CandidateRuns":
        """A copy without the candidates at the indexes `dropped_candidates`."""
        remains = np.array([index not in dropped_candidates for index in range(len(self.candidates))])
        runs = remains[self.run_candidates]
        return CandidateRuns(
            [candidate for index, candidate in enumerate(self.candidates) if index not in dropped_candidates],
            self.columns,
            self.run_indexes[runs],
            self.writer_numbers[runs],
            (np.cumsum(remains) - 1)[self.run_candidates[runs]],
            *(column[remains] for column in (self.directions, self.heads_before, self.floors, self.heads)),
        )


def _differs_from_previous(numbers: Ids) -> Mask:
    """A mask of the numbers that differ from the previous number. True for the first number."""
    return np.concatenate(([True], numbers[1:] != numbers[:-1]))


def _join_edges(columns: RunColumns, begins: list[int], stops: list[int]) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """Join the IDs and the kinds of the edges of some runs.

    Args:
        begins: for each run the index of its first edge in `columns`.
        stops: for each run the index after its last edge.
    """
    ids, kinds = columns.ids.data, columns.kinds.data
    parts = [slice(*bounds) for bounds in zip(begins, stops, strict=True)]
    joined = b"".join([ids[part] for part in parts]), b"".join([kinds[part] for part in parts])
    return np.frombuffer(joined[0], np.int64), np.frombuffer(joined[1], np.uint8)


def _highest_inactive_position(stored: StoredStream) -> int:
    """The highest position of the chains of retired writers, or the linear position if that is higher."""
    retired = 0 if stored.retired is None else int(_table_columns(stored.retired)["chain"].max())
    return max(stored.linear, retired)


def _table_columns(table: StoredTable) -> npt.NDArray[np.void]:
    """The columns (`writer_table.COLUMNS`) of an encoded table."""
    return np.frombuffer(table.columns, COLUMNS)


_DIRECTIONS = {int(direction): direction for direction in Direction}


class StreamResult(NamedTuple):
    """The effects of the batch on an in-order stream. `whole`: the complete new state (`EncodedState.whole`)."""

    effects: StreamEffects
    whole: bytes


def advance_in_order(
    inputs: "Mapping[str, StreamInput]", columns: RunColumns, states: "States", now: int, bounds: Bounds
) -> dict[str, StreamResult]:
    """Advance the streams that are certain to be in order.

    Args:
        inputs: the records of the batch, by stream.
        columns: the runs of all streams.
        states: encoded states, which are not changed.
        now: time (ms) of the batch.
        bounds: bounds of the streams' states.

    Returns:
        Name of the stream -> result, for the in-order streams. The caller advances the other streams with
        `core.stream`.
    """
    candidates: list[Candidate] = []
    runs: list[int] = []
    writers: list[int] = []
    writer_count = 0
    for name, stream_input in inputs.items():
        stored = _candidate_state(name, stream_input, states.get(name), now, bounds)
        if stored is None:
            continue
        (stream_runs,) = stream_input.runs.values()
        numbers = _writer_numbers(stored, [columns.writers[run] for run in stream_runs], writer_count)
        if numbers:
            candidates.append(Candidate(name, stored, writer_count))
            writer_count += len(stored.writers)
            runs += stream_runs
            writers += numbers
    if not candidates:
        return {}
    sorted_runs = CandidateRuns.of(candidates, columns, np.array(runs), np.array(writers))
    return {stream.candidate.name: _make_result(stream, now) for stream in sorted_runs.in_order_streams()}


def _make_result(stream: InOrderStream, now: int) -> StreamResult:
    (name, stored, first), direction, head_before, head, edges, runs = stream
    writers = [*stored.writers]
    sign = -1 if direction == Direction.BACKWARD else 1
    advances = [_writer_advance(run, writers[run.writer_number - first], sign) for run in runs]
    for run in runs:
        writers[run.writer_number - first] = _advanced_writer(writers[run.writer_number - first], run, now)
    transactions, reports = dict(sorted(stored.transactions.items())), dict(sorted(stored.reports.items()))
    encoded = encode_stored(
        StoredStream(
            FORMAT,
            direction,
            stored.home_partition,
            head,
            b"",
            writers,
            [],
            stored.timeline_number,
            stored.database,
            stored.highest_retired_position,
            None,
            stored.uncertain_up_to,
            stored.timeline_start_id,
            stored.active_count,
            transactions,
            reports,
            [],
            [],
        ),
        stored.retired,
    )
    effects = StreamEffects(
        name,
        _DIRECTIONS[direction],
        sign * stored.linear,
        sign * head,
        sign * head_before,
        sign * head,
        advances,
        [WriterRow(advance.writer, advance.epoch, advance.id, is_retired=False) for advance in advances],
        [],
        [],
        [],
        [],
        [],
        [],
        {"applied": edges},
        Summary(0, 0, None, [], 0, None, transactions, sources=_sources(writers, reports)),
        encoded.state,
    )
    return StreamResult(effects, encoded.whole)


def _sources(writers: list[StoredWriter], reports: dict[str, SourceReport]) -> list[Source]:
    if not reports:
        return []
    seen = {writer.name: writer.last_seen for writer in writers}
    return [Source(name, seen[name], report) for name, report in reports.items() if name in seen]


def _writer_advance(run: MergedRun, writer: StoredWriter, sign: int) -> WriterAdvance:
    prev, end = sign * writer.chain.position, sign * run.end
    return WriterAdvance(writer.name, writer.epoch, prev, end, run.fact_count, run.empty_count, 0, 0, run.oldest_ms)


def _advanced_writer(writer: StoredWriter, run: MergedRun, now: int) -> StoredWriter:
    empty = append_steps(writer.chain.empty_ranges, run.empty_ranges, EMPTY_RANGES_MAX)
    return StoredWriter(
        writer.name,
        writer.epoch,
        StoredChain(run.end, writer.chain.uncertain_up_to, [], empty, []),
        None,
        [],
        writer.published_position,
        writer.timeline_number,
        writer.start_token,
        max(writer.last_seen, now),
        writer.join_crc,
    )


class CaughtUpStream(NamedTuple):
    """A stream without linear lag. IDs are signed.

    Attributes:
        linear: the linear position.
        positions: the position of each active writer, by name.
        sources: the writers with a report (`SourceReport`).
    """

    linear: int
    positions: dict[str, int]
    sources: Sequence[Source] = ()


def read_if_caught_up(data: bytes) -> CaughtUpStream | None:
    """Read the positions of a stream without linear lag from its encoded state.

    Returns:
        None if the stream has linear lag, or if a writer has reported open transactions. Also None if this function
        cannot read the linear lag without decoding the whole state.
    """
    stored = decode_stored(data)
    if stored.transactions or not _has_only_positions(stored) or _head(stored) != stored.linear:
        return None
    sign = -1 if stored.direction == Direction.BACKWARD else 1
    positions = {writer.name: sign * writer.position for writer in stored.writers}
    return CaughtUpStream(sign * stored.linear, positions, _sources(stored.writers, stored.reports))


def _candidate_state(
    name: str, stream_input: "StreamInput", data: bytes | None, now: int, bounds: Bounds
) -> StoredStream | None:
    """Return the state of a stream if the stream is a candidate, else None.

    All records of a candidate are runs in its home partition. The state of a candidate has only positions, and no
    retired writer that the bounds would drop.

    Args:
        data: the encoded state; None for a new stream.
    """
    has_other_records = (
        stream_input.rows_and_markers
        or stream_input.possible_facts
        or stream_input.possible_control_facts
        or stream_input.control
    )
    if data is None or has_other_records or len(stream_input.runs) != 1:
        return None
    stored = decode_stored(data)
    if not _has_only_positions(stored):
        return None
    if stored.retired is not None:
        own, retired = bounds.for_stream(name), _table_columns(stored.retired)["retired"]
        if len(retired) > own.retired or int(retired.min()) <= now - own.retirement_ms:
            return None
    ((_, partition),) = stream_input.runs
    return stored if partition == stored.home_partition else None


def _writer_numbers(stored: StoredStream, names: list[str], first: int) -> list[int]:
    """The numbers of the writers `names`. `first` is the number of the stream's first writer. Empty if one of them is
    unknown or not in order."""
    known = {writer.name: number for number, writer in enumerate(stored.writers, first)}
    numbers = [known.get(name, -1) for name in names]
    for number in {*numbers}:
        if number < 0 or not _is_in_order(stored.writers[number - first], stored.timeline_number):
            return []
    return numbers


def _has_only_positions(stored: StoredStream) -> bool:
    """True if nothing is pending, buffered or deferred, no writer in `stored.writers` is retired, and the stream has so
    few writers that all of them are decoded."""
    if stored.completed_ids or stored.unjoined or stored.active or stored.waiting:
        return False
    for writer in stored.writers:  # a generator would be slower; at a start, a million streams are checked
        if writer.chain.pending or writer.chain.deferred or writer.retired_at is not None:
            return False
    return len(stored.writers) <= writer_table.UNPACKED_MAX


def _head(stored: StoredStream) -> int:
    """The highest allocated ID."""
    return max([_highest_inactive_position(stored), *(writer.chain.position for writer in stored.writers)])


def _is_in_order(writer: StoredWriter, timeline_number: int) -> bool:
    """True if runs that continue the writer's chain change only the chain.

    The writer has no late ranges, joined in the current timeline, was not set back, and declared no empty ranges beyond
    its position.
    """
    position = writer.chain.position
    return (
        not writer.late_ranges
        and writer.published_position <= position
        and writer.timeline_number == timeline_number
        and last_bound(writer.chain.empty_ranges) <= position
    )
