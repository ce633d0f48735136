"""What offload policies share: the type of a policy, how its trips are carried out, and helpers that look up saves.

A policy takes a graph, the rates of links and the tier at their other end, and returns lives and trips. `dymem` is one, and
`policies` has the others. `carry_out` turns lives and trips into the lives of a plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from lightning_memopt.graph import Graph, Op, Save
from lightning_memopt.plan import Life
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.plan.readers import short
from lightning_memopt.solvers.offload.trips import Gap, Trip, TripPlanner, send_away

Policy = Callable[[Graph, TransferRates, str], tuple[tuple[Life, ...], list[Trip]]]
"""(graph, rates, tier) -> the lives of a step in which nothing is parked, and the trips of the tensors to park."""


def carry_out(
    policy: Policy, graph: Graph, rates: TransferRates, tier: str = "host", budget_nbytes: int | None = None
) -> tuple[tuple[Life, ...], bool]:
    """The lives of a policy, and whether they fit the budget.

    If memory runs out, the step waits for copies (Dymem, 3.2.1).
    """
    lives, trips = policy(graph, rates, tier)
    if budget_nbytes is not None:
        forms = {trip.gap.tensor: (trip.form, trip.parked_nbytes) for trip in trips}
        within = TripPlanner(graph, lives, rates).within(forms, budget_nbytes, planned=trips)
        return send_away(lives, trips if within is None else within), within is not None
    return send_away(lives, trips), True


def layer_of(graph: Graph, save: Save) -> Op | None:
    """The forward op for whose backward a tensor was saved: the one that reads it when it is packed, else its maker."""
    packed = graph.packed(save)
    if save.op < len(graph.forward) and packed in graph.ops[save.op].inputs:
        return graph.ops[save.op]
    return graph.producers.get(packed)


def kinds(graph: Graph) -> dict[int, set[str]]:
    """Saved tensor -> the names of the layers whose backward reads it."""
    names: dict[int, set[str]] = {}
    for save in graph.saves:
        layer = layer_of(graph, save)
        names.setdefault(save.tensor, set()).add(short(layer.name) if layer else "")
    return names


def unpacks(graph: Graph, tensors: Iterable[int]) -> list[int]:
    """The points at which autograd asks for one of these tensors, made by an op of the step."""
    wanted = {t for t in tensors if t in graph.producers}
    return sorted({p for s in graph.saves if s.tensor in wanted for p in s.unpacked_at})


def comes_back(gap: Gap, wanted: int, gone_at: int, graph: Graph, asked: list[int]) -> int:
    """The unpack at which a tensor begins to come back.

    It is the first one from the point `wanted` on at which the tensor is parked; if there is none, `gap.needed`.
    """
    after = max(gone_at, graph.tensors[gap.tensor].freed_at) + 1
    i = bisect_right(asked, max(wanted, after) - 1)
    return min(gap.needed, asked[i]) if i < len(asked) else gap.needed
