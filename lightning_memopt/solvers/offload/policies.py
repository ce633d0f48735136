"""The offload and compression policies of published papers, to compare with and to start from.

Each is a `policy.Policy`. In: a graph, the rates of a link, and the tier at its other end. Out: lives and trips. `joint`
tries all of them as starts.

Sources: Rhu et al., *vDNN* (MICRO 2016), layer by layer with a barrier; Wang et al., *SuperNeurons* (PPoPP 2018), 3.2 to 3.4;
both as Dymem (HPDC 2020, 2.3 and 4.1) and FreeLunch (III and IV) describe and measure them. All are priced by `simulate`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.plan.readers import short
from lightning_memopt.solvers.offload.dymem import dymem_trips
from lightning_memopt.solvers.offload.policy import Policy, comes_back, kinds, unpacks
from lightning_memopt.solvers.offload.trips import Form, Trip, TripPlanner
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from lightning_memopt.units import ceil_div

Lives = tuple[Life, ...]
LivesAndTrips = tuple[Lives, list[Trip]]

CONVOLUTIONS = frozenset({"convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "convolution_overrideable"})
CHEAP = frozenset(
    {
        *("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "mean"),
        *("relu", "relu_", "threshold", "local_response_norm"),
        *("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "add", "add_", "cat"),
    }
)
"""Layers that run again: pooling, activation, LRN and normalisation (SuperNeurons, 3.4), and joins, for which autograd saves
nothing.
"""
_AHEAD = 2
"""A tensor begins to come back when backward asks for the tensor this many places before it (FreeLunch, III-A: two are
enough).
"""


def liveness(graph: Graph, rates: TransferRates, tier: str) -> LivesAndTrips:
    """Nothing moves; every tensor is freed after its last reader, as PyTorch does by itself."""
    return keep_all(graph), []


def _raw(graph: Graph, tensors: Collection[int], tier: str) -> dict[int, Form]:
    return {t: (tier, graph.tensors[t].nbytes) for t in tensors}


def _layer_before(graph: Graph) -> dict[int, int]:
    """Unpack -> the first unpack of the layer whose backward comes just before."""
    asked = unpacks(graph, graph.producers)
    firsts: list[int] = []
    first_before: dict[int, int] = {}
    last = -1
    for p in asked:
        if not firsts or any(graph.points[q].kind == "op" for q in range(last, p)):
            firsts.append(p)
        first_before[p] = firsts[-2] if len(firsts) > 1 else p
        last = p
    return first_before


def vdnn(graph: Graph, rates: TransferRates, tier: str, layers: str = "all") -> LivesAndTrips:
    """Layer by layer: the copy out of a map must end with the last layer that reads it. Its copy in begins one layer ahead, so
    only that layer can hide it. `layers`: "all", or "conv" for the inputs of convolutions.
    """
    lives = keep_all(graph)
    planner = TripPlanner(graph, lives, rates)
    chosen = planner.gaps if layers == "all" else sorted(_convolutions_read(graph, planner))
    before = _layer_before(graph)
    asked = unpacks(graph, graph.producers)
    trips = []
    for t, (form, nbytes) in _raw(graph, chosen, tier).items():
        gap = planner.gaps[t]
        gone = min(max(gap.leaves, graph.tensors[t].freed_at), max(gap.leaves, graph.backward_begins - 1))
        back = comes_back(gap, before.get(gap.needed, gap.needed), gone, graph, asked)
        trips.append(Trip(gap, gone, back, form, nbytes))
    return lives, trips


def one_stream(graph: Graph, rates: TransferRates, tier: str) -> LivesAndTrips:
    """Copies and compute take turns: the step waits for every copy from its beginning to its end (Dymem, 5.3, "baseline")."""
    lives = keep_all(graph)
    planner = TripPlanner(graph, lives, rates)
    return lives, _in_place(planner, _raw(graph, planner.gaps, tier))


def _ahead(graph: Graph, planner: TripPlanner, forms: dict[int, Form], ahead: int = _AHEAD) -> list[Trip]:
    """Bytes are freed when their copy has ended. They begin to come back when backward asks for the tensor `_AHEAD` places
    before.
    """
    asked = unpacks(graph, forms)
    order = sorted(planner.plan(forms), key=lambda trip: (trip.gap.needed, -trip.gap.tensor))
    wanted = [trip.gap.needed for trip in order]
    return [
        replace(trip, back_at=comes_back(trip.gap, wanted[max(0, i - ahead)], trip.gone_at, graph, asked))
        for i, trip in enumerate(order)
    ]


def asynchronous(graph: Graph, rates: TransferRates, tier: str) -> LivesAndTrips:
    """Everything is moved, without barriers, and comes back two tensors ahead (FreeLunch, IV-B, "async swapping")."""
    lives = keep_all(graph)
    planner = TripPlanner(graph, lives, rates)
    return lives, _ahead(graph, planner, _raw(graph, planner.gaps, tier))


def recompute_cheap(graph: Graph, rates: TransferRates, tier: str) -> LivesAndTrips:
    """The results of light layers are rebuilt, a segment at a time; all others are held (SuperNeurons, 3.4)."""
    made = {t for op in graph.forward if short(op.name) not in CHEAP for t in op.outputs}
    roll = Rollout(graph)
    held = made - graph.overwritten | unrepeatable(graph)
    roll.serve(sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at), set(held))
    return roll.lives(), []


def superneurons(graph: Graph, rates: TransferRates, tier: str) -> LivesAndTrips:
    """Inputs and results of convolutions are moved; results of light layers are rebuilt (SuperNeurons, 3.2 to 3.4)."""
    return _convolutions_away(graph, rates, recompute_cheap(graph, rates, tier)[0], tier)


def superneurons_swap(graph: Graph, rates: TransferRates, tier: str) -> LivesAndTrips:
    """The same without recomputation, as Dymem compares with it (4.1)."""
    return _convolutions_away(graph, rates, keep_all(graph), tier)


def _convolutions_away(graph: Graph, rates: TransferRates, lives: Lives, tier: str) -> LivesAndTrips:
    planner = TripPlanner(graph, lives, rates)
    chosen = {t for t in planner.gaps if t in graph.producers and short(graph.producers[t].name) in CONVOLUTIONS}
    chosen |= _convolutions_read(graph, planner)
    return lives, _ahead(graph, planner, _raw(graph, sorted(chosen), tier), 1)


def _convolutions_read(graph: Graph, planner: TripPlanner) -> set[int]:
    read_by = kinds(graph)
    return {t for t in planner.gaps if read_by.get(t, set()) & CONVOLUTIONS}


def _encoded(graph: Graph, tensors: Collection[int], bits: int) -> dict[int, Form]:
    """Fixed-rate forms of tensors of 32-bit floats, with `bits` bits a value."""
    floats = (t for t in tensors if graph.tensors[t].dtype in ("", "float32"))
    return {t: (f"block{bits}", ceil_div(graph.tensors[t].nbytes * bits, 32)) for t in floats}


def _in_place(planner: TripPlanner, forms: dict[int, Form]) -> list[Trip]:
    gaps = planner.gaps
    return [Trip(gaps[t], gaps[t].leaves, gaps[t].needed, *form) for t, form in forms.items()]


def compression(graph: Graph, rates: TransferRates, tier: str, bits: int = 6) -> LivesAndTrips:
    """Every map stays on the device, encoded (FreeLunch, III). With 6 of 32 bits, the ratio is near the source's, which is
    five.
    """
    lives = keep_all(graph)
    planner = TripPlanner(graph, lives, rates)
    return lives, _in_place(planner, _encoded(graph, planner.gaps, bits))


def hybrid(graph: Graph, rates: TransferRates, tier: str, bits: int = 4) -> LivesAndTrips:
    """Inputs of convolutions are encoded, 8 to 1, and all others are moved (FreeLunch, IV-C)."""
    lives = keep_all(graph)
    planner = TripPlanner(graph, lives, rates)
    encoded = _encoded(graph, sorted(_convolutions_read(graph, planner)), bits)
    rest = _raw(graph, [t for t in planner.gaps if t not in encoded], tier)
    return lives, [*_in_place(planner, encoded), *_ahead(graph, planner, rest)]


POLICIES: dict[str, Policy] = {
    "liveness": liveness,
    "one stream": one_stream,
    "vDNN (conv)": partial(vdnn, layers="conv"),
    "vDNN (all)": vdnn,
    "SuperNeurons (swap)": superneurons_swap,
    "recompute cheap": recompute_cheap,
    "SuperNeurons": superneurons,
    "async swapping": asynchronous,
    "Dymem": dymem_trips,
    "compression": compression,
    "compression + swapping": hybrid,
}
"""Name in tables -> policy."""
