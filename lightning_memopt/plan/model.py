"""The plan of a step: the lives of every saved tensor, the parameters that are updated early, and their predicted cost.

A tensor that is dropped and rebuilt is in memory several times. So a plan does not have one decision per tensor. It has the
tensor's *lives*: disjoint intervals on the graph's axis of points, each with the way in which the bytes come into being.
Everything else follows from the lives: which ops run again, in which order, and what is freed when. `lower` defines how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_memopt.plan.forms import tier_of
from lightning_memopt.plan.tiers import taken
from lightning_memopt.units import format_nbytes

How = Literal["original", "rebuild", "fetch"]
Objective = Literal["throughput", "flops"]
"""What the frontier trades bytes for: extra seconds ("throughput") or extra FLOPs ("flops"). Among plans with equal FLOPs, the
fastest wins.

Plans with the fewest FLOPs use measured times only to break ties, so they are better where measured times mean little.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """An interval of points during which the plan has a tensor in memory.

    tensor: id of the tensor in the graph.
    born_at: the first point of the interval.
    freed_at: the last point of the interval.
    how: how the bytes come into being. `original`: the user's forward makes the tensor, and the plan holds it beyond the point
        at which user code lets go of it. `rebuild`: recorded ops make it again at the unpack point `born_at`. `fetch`: the
        tensor has been parked since its previous life, and the copy back, or the decoding, begins at the unpack point
        `born_at`.
    form: the form in which a fetched tensor was parked (plan/forms.py); "" for the others.
    parked_nbytes: bytes that a fetched tensor took in that form; 0 for the others.
    """

    tensor: int
    born_at: int
    freed_at: int
    how: How
    form: str = ""
    parked_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted cost of a plan. All seconds and FLOPs are on top of the unmodified step.

    peak_nbytes: the peak of allocated bytes on the device.
    extra_seconds: seconds of the ops that run again.
    extra_flops: FLOPs of the ops that run again.
    rebuilt_nbytes: bytes that these ops make.
    rebuilt_ops: how many ops run again; an op that runs twice counts twice.
    overhead_seconds: seconds of the engine's own work in recording and rebuilding, as measured on the machine; 0 if not
        measured.
    reserved_nbytes: the most bytes that the device's allocator reserves; 0 if it reserves nothing (on the CPU).
    moved_nbytes: bytes copied over links, both ways.
    copy_seconds: seconds of these copies.
    stall_seconds: seconds in which the step waits for a copy.
    codec_seconds: seconds of encoding and decoding.
    tier_nbytes: the most bytes that are in tiers at once.
    update_seconds: how many seconds longer it takes to update single parameters in backward than to update all at once.
    """

    peak_nbytes: int
    extra_seconds: float
    extra_flops: int
    rebuilt_nbytes: int
    rebuilt_ops: int
    overhead_seconds: float = 0.0
    reserved_nbytes: int = 0
    moved_nbytes: int = 0
    copy_seconds: float = 0.0
    stall_seconds: float = 0.0
    codec_seconds: float = 0.0
    tier_nbytes: int = 0
    update_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """All extra seconds of a step."""
        parts = self.extra_seconds, self.overhead_seconds, self.stall_seconds, self.codec_seconds, self.update_seconds
        return sum(parts)

    @property
    def overlap(self) -> float:
        """The share of the copies' time that is hidden behind compute."""
        return 1.0 - self.stall_seconds / self.copy_seconds if self.copy_seconds else 1.0

    @property
    def needed_nbytes(self) -> int:
        """Bytes to compare with a budget and with measurements: reserved bytes where the allocator reserves, else the peak."""
        return self.reserved_nbytes or self.peak_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """The part of a plan that is about one compiled region.

    key: identifies the joint graph of its forward and backward.
    lives: the lives of the tensors of that graph; None if the region runs as torch splits it.
    calls: how often a forward calls the region.
    flops: FLOPs of its ops if each runs once.
    extra_flops: FLOPs of the ops that run again.
    rebuilt_ops: how many ops run again.
    saved_nbytes: the bytes that a call keeps for its backward, as modelled.
    peak_nbytes: the most bytes that it takes while it runs, as modelled.
    """

    key: str
    lives: tuple[Life, ...] | None
    calls: float
    flops: int
    extra_flops: int
    rebuilt_ops: int
    saved_nbytes: int
    peak_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHead:
    """A loss head that runs in tiles: the logits, what the loss makes of them, and their gradients are never whole.

    module: the path of the module that makes the logits; "" for the model itself.
    classes, tokens: the numbers of columns and rows of the logits.
    rows: how many rows a tile of rows has: in the forward, and for the gradient of the hidden states.
    columns: how many columns a tile of columns has, for the gradient of the weight; 0 if the weight is frozen.
    unmade_nbytes: bytes of the largest tensor that is never whole.
    ops: names of the ops that run in tiles. An op that was not seen when tiles were compared with whole ops runs whole.
    assembled: names of the ops that read whole tensors, which are assembled from tiles of rows.
    rounded: names of the ops whose tiles differ from the whole ops by rounding (`tile="rounding"`).
    threads: the number of threads with which they were compared: with another one, bits may differ.
    """

    module: str
    classes: int
    tokens: int
    rows: int
    columns: int
    unmade_nbytes: int
    ops: tuple[str, ...] = ()
    assembled: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    threads: int = 0


Read = Literal["state", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateParking:
    """What the update of a parameter reads is parked in a tier until then: its optimizer state, since the update before, or its
    gradient, since backward. The graph is that of a step in which it is.

    parameter: the name of the parameter.
    what: which of the two.
    tier: the name of the tier.
    nbytes: bytes of it that are parked.
    copy_seconds: how long the copies of a step take, out and back.
    seconds: how long the step waits for them.
    tier_nbytes: bytes that it takes in the tier.
    comes_after: the parameter whose early update begins the copy back of this state. "": the step waits for the copy.
    leaves_before: the parameter whose gradient is computed while this is copied out. "": the step waits for the copy.
    """

    parameter: str
    what: Read = "state"
    tier: str
    nbytes: int
    copy_seconds: float
    seconds: float
    tier_nbytes: int
    comes_after: str = ""
    leaves_before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParking:
    """The weights of a module are parked in a tier, and on the device only while the module runs, or they are updated. The
    graph is that of a step in which they are.

    module: the module's path in the model.
    tier: the name of the tier.
    nbytes: bytes of its weights.
    tier_nbytes: bytes that they take in the tier.
    beside: for each time that a step copies them to the device, the module that computes meanwhile: the copy begins when the
        weights of that module are there. "": the copy begins when this module is called, or its backward begins.
    moved_nbytes: bytes that a step copies, both ways.
    copy_seconds: how long the copies of a step take.
    seconds: how long the step waits for them.
    """

    module: str
    tier: str
    nbytes: int
    beside: tuple[str, ...]
    moved_nbytes: int
    copy_seconds: float
    seconds: float
    tier_nbytes: int

    @property
    def are_trained(self) -> bool:
        """Whether some are copied out, too."""
        return self.moved_nbytes > len(self.beside) * self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """The addresses that a plan gives to the requests of a step, in one arena that serves every step.

    nbytes: the bytes of each request of the step, in order.
    offsets: for each request, the bytes from the beginning of the arena; None if the ordinary allocator serves it.
    until: for each request, the number of the first request after its memory is freed, which may be in the next step; 0 if it
        has no address.
    arena_nbytes: bytes that the arena needs.
    needed_nbytes: bytes of the arena and of all other memory when it was planned. A budget must have room for them.
    max_live_nbytes: the most planned bytes that are live at one moment, rounded up as addresses are. No arena can be smaller.
    """

    nbytes: tuple[int, ...] = field(repr=False)
    offsets: tuple[int | None, ...] = field(repr=False)
    until: tuple[int, ...] = field(repr=False)
    arena_nbytes: int
    max_live_nbytes: int
    needed_nbytes: int

    @property
    def planned(self) -> int:
        """How many requests have an address."""
        return sum(offset is not None for offset in self.offsets)

    @property
    def fragmentation(self) -> float:
        """The share by which the arena is larger than max-live."""
        return self.arena_nbytes / self.max_live_nbytes - 1 if self.max_live_nbytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every decision for the steps of one graph, made for one budget.

    fingerprint: identifies the graph (`graph.fingerprint`).
    lives: the lives of all tensors that autograd saves, and of tensors that are held to rebuild them, sorted by (tensor,
        born_at).
    updates: ids of the parameters that are updated in backward, in the order of their updates. The others keep their gradients
        until the update after backward.
    regions: what was decided for each compiled region of the step. A region is a stage of the graph.
    tiles: the loss heads that run in tiles. The graph is that of a step in which they do.
    states: the optimizer state and the gradients that are parked until an update reads them. The graph is that of a step in
        which they are.
    weights: the weights that are on the device only while their module runs. The graph is that of such a step.
    tier_limits: the most bytes of each tier that the plan could take, with their names; empty where no limit was known.
    addresses: the addresses of a step's requests; None without a planned pool, and until a step by this plan has shown its
        requests.
    solver: name of the solver that found the plan.
    budget_nbytes: the budget that the plan was made for.
    predicted: the predicted cost.
    unmodified_peak_nbytes: the predicted peak of the step without a plan.
    step_seconds: seconds of the unmodified step, as observed.
    lower_bound_seconds: no plan within the budget that only rebuilds takes fewer extra seconds than this. If this plan parks,
        the same holds for all plans that rebuild and park.
    solve_seconds: how long solving took.
    """

    fingerprint: str
    lives: tuple[Life, ...]
    solver: str
    budget_nbytes: int
    predicted: Prediction
    unmodified_peak_nbytes: int
    updates: tuple[int, ...] = ()
    regions: tuple[RegionPlan, ...] = ()
    tiles: tuple[TiledHead, ...] = ()
    states: tuple[StateParking, ...] = ()
    weights: tuple[WeightParking, ...] = ()
    tier_limits: tuple[tuple[str, int], ...] = ()
    addresses: Addresses | None = None
    step_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    solve_seconds: float = 0.0

    @property
    def parks(self) -> bool:
        """Whether tensors are copied to a tier, or compressed, until backward."""
        return any(life.how == "fetch" for life in self.lives)

    @property
    def in_tiers(self) -> dict[str, int]:
        """Tier -> the bytes that a run by this plan takes there: for saved tensors, optimizer state, gradients and weights."""
        nbytes = saved_in_tiers(self.lives)
        rests: tuple[StateParking | WeightParking, ...] = (*self.states, *self.weights)
        for each in rests:
            nbytes[each.tier] = nbytes.get(each.tier, 0) + each.tier_nbytes
        return nbytes

    @property
    def predicted_peak_nbytes(self) -> int:
        return self.predicted.peak_nbytes


def saved_in_tiers(lives: Iterable[Life]) -> dict[str, int]:
    """Tier -> the bytes that saved tensors take there."""
    fetched = {life.tensor: life for life in lives if life.how == "fetch"}  # one may be fetched several times
    nbytes: dict[str, int] = {}
    for life in fetched.values():
        if tier := tier_of(life.form):
            nbytes[tier] = nbytes.get(tier, 0) + taken(life.form, life.parked_nbytes)
    return nbytes


def tiers_text(plan: Plan) -> str:
    """A text: how many bytes the plan takes in which tier, of how many; "" if it parks nothing there."""
    limits = dict(plan.tier_limits)
    texts = []
    for tier, nbytes in plan.in_tiers.items():
        of = f" of {format_nbytes(limits[tier])}" if tier in limits else ""
        texts.append(f"{format_nbytes(nbytes)}{of} in the {tier} tier")
    return " and ".join(texts)


def states_text(states: Sequence[StateParking]) -> str:
    """A text: how much optimizer state and how many gradients are parked, and where."""
    texts = []
    for what, name in (("state", "the optimizer state"), ("gradient", "the gradients")):
        if own := [state.nbytes for state in states if state.what == what]:
            texts.append(f"{name} of {len(own)} parameters ({format_nbytes(sum(own))})")
    meanwhile = ", copied while backward goes on" if any(state.leaves_before for state in states) else ""
    return f"{' and '.join(texts)}, in the {states[0].tier} tier{meanwhile}"


def weights_text(weights: Sequence[WeightParking]) -> str:
    """A text: how many weights are parked, and where."""
    nbytes = format_nbytes(sum(unit.nbytes for unit in weights))
    ahead = ", each copied while the one before it computes" if any(any(unit.beside) for unit in weights) else ""
    frozen = "" if any(unit.are_trained for unit in weights) else "frozen "
    return f"the {frozen}weights of {len(weights)} modules ({nbytes}), in the {weights[0].tier} tier{ahead}"


def tiles_text(tiles: Sequence[TiledHead]) -> str:
    """A text: which loss heads run in tiles, and of which sizes."""
    texts = []
    for head in tiles:
        by_columns = f" and {head.columns:,} columns" if head.columns else ""
        name = head.module or "the model"
        text = f"the loss head of {name} runs in tiles of {head.rows:,} rows{by_columns}; "
        if head.assembled:
            text += f"for {', '.join(head.assembled)}, {format_nbytes(head.unmade_nbytes)} are whole at a time"
        else:
            text += f"{format_nbytes(head.unmade_nbytes)} of logits are never whole"
        texts.append(f"{text}; {', '.join(head.rounded)} differ by rounding" if head.rounded else text)
    return "; ".join(texts)


def regions_text(regions: Sequence[RegionPlan]) -> str:
    """A text: how many compiled regions run ops again, and which share of all FLOPs that is."""
    planned = [region for region in regions if region.lives is not None]
    text = f"{len(planned)} of {len(regions)} compiled regions run ops again"
    if not planned:
        return text
    share = sum(region.extra_flops for region in planned) / (sum(region.flops for region in regions) or 1)
    return f"{text} ({sum(region.rebuilt_ops for region in planned)} ops, {100 * share:.1f} % of all FLOPs)"
