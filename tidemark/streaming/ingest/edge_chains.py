"""Sorts the edges of a task and links them into chains."""

import numpy as np
import numpy.typing as npt

from tidemark.streaming.ingest.jit_loader import load_kernels
from tidemark.streaming.ingest.record_batch import Edges
from tidemark.streaming.values.intervals import Ids

Order = npt.NDArray[np.intp]

FEW = 16_384
"""Edges that numpy sorts in two milliseconds. `decode.Decoder.FEW` bytes hold fewer, so a process that never has more
bytes loads no compiled code."""

_SPARSE = 4
"""If there are as many times more groups than edges, the counting sort is not used."""


def link(edges: Edges, max_edges: int) -> tuple[Edges, Order]:
    """Sort edges and link them into chains.

    Args:
        edges: at least one, in the order of arrival. `prevs` and `ids` are magnitudes, `incarnations` group numbers.
        max_edges: of a chain. Chains of duplicates may be longer.

    Returns:
        The edges chain by chain, and the index of each chain's first edge.
    """
    ordered = _arranged(edges)
    same = ordered.incarnations[1:] == ordered.incarnations[:-1]
    if np.any(same & (ordered.prevs[1:] < ordered.ids[:-1])):
        order, firsts = _link_tangled(edges.incarnations, edges.prevs, edges.ids, np.arange(len(edges.ids)))
        return edges.take(order), firsts
    return ordered, _cut(_firsts(same & (ordered.prevs[1:] == ordered.ids[:-1])), len(edges.ids), max_edges)


def _cut(firsts: Order, count: int, max_edges: int) -> Order:
    lengths = np.diff(firsts, append=count)
    cuts = [
        np.arange(firsts[chain] + max_edges, firsts[chain] + lengths[chain], max_edges)
        for chain in np.flatnonzero(lengths > max_edges)
    ]
    return np.sort(np.concatenate((firsts, *cuts)))


def _arranged(edges: Edges) -> Edges:
    """Sort by group and `prev`."""
    count, groups = len(edges.ids), int(edges.incarnations.max()) + 1
    if count > FEW and groups < _SPARSE * count and (kernels := load_kernels()) is not None:
        arranged = Edges.allocate(count)
        if kernels.arrange(edges, arranged, np.zeros(groups + 2, np.int64), Edges.allocate(1)):
            return arranged
    return edges.take(_by_group_and_prev(edges.incarnations, edges.prevs))


def _by_group_and_prev(groups: Ids, prevs: Ids) -> Order:
    """Like `lexsort((prevs, groups))` at a third of the cost: a radix sort of the groups, then a stable sort."""
    order = np.argsort(groups.astype(np.uint16), kind="stable")  # numpy's radix sort: 16 bits at most
    for shift in range(16, int(groups.max()).bit_length(), 16):
        order = order[np.argsort((groups[order] >> shift).astype(np.uint16), kind="stable")]
    grouped, within = groups[order], prevs[order]
    ranks = np.cumsum(np.concatenate(([0], grouped[1:] != grouped[:-1])))
    low = int(within.min())
    span = int(within.max()) - low + 1
    if (int(ranks[-1]) + 1) * span >= 2**63:
        return np.lexsort((prevs, groups))
    return order[np.argsort(ranks * span + (within - low), kind="stable")]


def _firsts(joined: npt.NDArray[np.bool_]) -> Order:
    """The first index of each chain; `joined[i]` says whether edge `i + 1` continues the chain of edge `i`."""
    return np.flatnonzero(np.concatenate(([True], ~joined)))


def _link_tangled(groups: Ids, prevs: Ids, ids: Ids, arrival: Order) -> tuple[Order, Order]:
    order = np.lexsort((arrival, ids, prevs, groups))
    groups, prevs, ids, arrival = groups[order], prevs[order], ids[order], arrival[order]
    indexes = np.arange(len(groups))
    again = np.concatenate(([False], (groups[1:] == groups[:-1]) & (prevs[1:] == prevs[:-1]) & (ids[1:] == ids[:-1])))
    layers = indexes - np.maximum.accumulate(np.where(again, 0, indexes))
    clashing = _clashing(groups[~again], prevs[~again], ids[~again])[np.cumsum(~again) - 1]

    order = np.lexsort((prevs, layers, groups))  # each layer begins below the end of the one before
    groups, prevs, ids, clashing = groups[order], prevs[order], ids[order], clashing[order]
    joined = (groups[1:] == groups[:-1]) & (prevs[1:] == ids[:-1])
    return arrival[order], _firsts(joined & ~clashing[1:] & ~clashing[:-1])


def _clashing(groups: Ids, prevs: Ids, ids: Ids) -> npt.NDArray[np.bool_]:
    """Which of the edges, all different and sorted by group and `prev`, overlap another, directly or through others."""
    by_id = np.lexsort((ids, groups))
    ranks = np.empty_like(by_id)
    ranks[by_id] = np.arange(len(by_id))
    reach = ids[by_id][np.maximum.accumulate(ranks)]  # ranks ascend with groups, so no group reaches into the next
    begins = np.concatenate(([True], (groups[1:] != groups[:-1]) | (prevs[1:] >= reach[:-1])))
    clusters = np.cumsum(begins) - 1
    sizes = np.bincount(clusters)
    clashing: npt.NDArray[np.bool_] = sizes[clusters] > 1
    return clashing
