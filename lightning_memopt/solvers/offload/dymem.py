"""Choose the tensors to park, and when they come back, by the dependencies between layers alone.

Input: an observed graph and the rates of a link. Output: lives and trips. Every saved feature map is parked, except those of
layers that hold very little. There is no budget and no search among plans. Source: Yang, Cheng, *Efficient GPU Memory
Management for Nonlinear DNNs* (HPDC 2020; "Dymem"), 3.1 and 3.2, Algorithms 1 and 2. The differences from the source:
docs/formulation.md, "Away".

A copy out begins when its tensor is packed. The bytes are freed when the copy has ended, and no layer waits for it. A copy in
begins when the search of a layer finds its tensor, which is at most two compute-heavy layers ahead, the searching layer
included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.solvers.offload.policy import comes_back, kinds, layer_of, unpacks
from lightning_memopt.solvers.offload.trips import Form, Gap, Trip, TripPlanner
from lightning_memopt.solvers.rollout import keep_all

STAYING = frozenset(
    {"addmm", "mm", "bmm", "linear", "_softmax", "_log_softmax", "native_dropout", "nll_loss_forward", "cross_entropy_loss"}
)
"""Layers whose tensors are not moved, because they hold less than a hundredth of all bytes (Dymem, 2.3, 3.3.2)."""
HEAVY_AHEAD = 2


def flow(graph: Graph) -> list[int]:
    """Forward ops in depth-first order of forks and joins: a join comes when its last branch has been walked (Algorithm 1)."""
    makers = {op.id: {graph.producers[t].id for t in op.inputs if t in graph.producers} for op in graph.forward}
    readers: dict[int, list[int]] = {}
    for op, sources in makers.items():
        for maker in sources:
            readers.setdefault(maker, []).append(op)
    met = dict.fromkeys(makers, 0)
    order = []
    stack = [op for op in reversed(makers) if not makers[op]]
    while stack:
        op = stack.pop()
        met[op] += 1
        if met[op] >= len(makers[op]):
            order.append(op)
            stack.extend(reversed(readers.get(op, ())))
    return order


def prefetches(graph: Graph, gaps: Mapping[int, Gap]) -> dict[int, int]:
    """Tensor -> the unpack at which the search of a layer finds it (Algorithm 2).

    When the backward of a layer begins, the layer searches the reversed flow for parked tensors. It stops at the third heavy
    layer; light layers do not count. A tensor that no search finds in time is fetched when it is read.
    """
    order = flow(graph)[::-1]
    place = {op: i for i, op in enumerate(order)}
    of_layer: dict[int, list[int]] = {}
    begins: dict[int, int] = {}
    for save in graph.saves:
        layer = layer_of(graph, save)
        if layer is not None and layer.id in place and save.tensor in gaps and save.unpacked_at:
            of_layer.setdefault(layer.id, []).append(save.tensor)
            begins[layer.id] = min(save.unpacked_at[0], begins.get(layer.id, save.unpacked_at[0]))
    found_at: dict[int, int] = {}
    for begun, point in sorted(begins.items(), key=lambda item: item[1]):
        heavy = int(graph.ops[begun].heavy)
        for after in order[place[begun] + 1 :]:
            heavy += graph.ops[after].heavy
            if heavy > HEAVY_AHEAD:
                break
            for t in of_layer.get(after, ()):
                found_at.setdefault(t, point)
    return found_at


def dymem_trips(graph: Graph, rates: TransferRates, tier: str = "host") -> tuple[tuple[Life, ...], list[Trip]]:
    """The trips of all tensors that layers save, except layers in `STAYING`; copies in begin where `prefetches` says."""
    lives = keep_all(graph)
    planner = TripPlanner(graph, lives, rates)
    read_by = kinds(graph)
    forms: dict[int, Form] = {t: (tier, graph.tensors[t].nbytes) for t in planner.gaps if not read_by.get(t, set()) <= STAYING}
    prefetch_at = prefetches(graph, {t: planner.gaps[t] for t in forms})
    asked = unpacks(graph, forms)
    trips = []
    for trip in planner.plan(forms):
        wanted = prefetch_at.get(trip.gap.tensor, trip.gap.needed)
        trips.append(replace(trip, back_at=comes_back(trip.gap, wanted, trip.gone_at, graph, asked)))
    return lives, trips
