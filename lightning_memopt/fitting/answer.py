"""Whether a step fits: as it is, or by a plan, on each of several cards, and the largest batch that does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from lightning_memopt.batching.fit import StepFit
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import MemOptError
from lightning_memopt.fitting import plans
from lightning_memopt.fitting.allowed import SEARCH_SECONDS, GivenBudget, config_of
from lightning_memopt.fitting.cards import CONTEXT_NBYTES, Card, cards_of, of_the_host
from lightning_memopt.fitting.checkpointing import CHECKPOINTED, Checkpointed
from lightning_memopt.fitting.found import OFFLOAD, Other
from lightning_memopt.fitting.options import Options
from lightning_memopt.fitting.recording import Recorded
from lightning_memopt.fitting.resting import resting_text
from lightning_memopt.fitting.sharding import SHARDED, StepOf, numbers_of
from lightning_memopt.fitting.sizes import LARGEST, Most, at_sizes, most, most_unmodified, needed_nbytes
from lightning_memopt.fitting.sources import Source, source_of
from lightning_memopt.fitting.techniques import LIMIT_SECONDS, Techniques, check
from lightning_memopt.fitting.values import GIVEN
from lightning_memopt.graph import Graph
from lightning_memopt.plan import TiledHead, tiles_text
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.report.text import Table, render
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.collector import collector_paused
from lightning_memopt.solvers.frontier import Frontier
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.units import format_nbytes

_VERDICT = 27
"""Maximum width of a verdict; longer ones take several lines."""
_BITS = (
    "Bits of tiles are compared on the card itself: where the smallest ones do not give those of the whole ops, a run takes "
    "larger ones, and more memory."
)


@dataclass(frozen=True)
class OnCard:
    """The answer for one card.

    card: its name.
    ranks: number of such cards over which the model is sharded.
    usable_nbytes: bytes for the step, beside the context and the workspaces of libraries.
    verdict: "fits": the unmodified step does. "plan": it does by a plan. "no": no plan is small enough.
    techniques: what the plan uses: "recompute", "loss head in tiles", "offload", "early updates".
    offloaded_nbytes: bytes that a step by the plan copies to the tier, and back.
    tier_nbytes: bytes that a run by the plan takes there.
    early_updates: number of parameters that are updated in backward.
    tiles: the loss heads that run in tiles under the plan, in the smallest ones that a run tries.
    at_rest: which optimizer state, gradients and weights the plan parks while they rest; "" if none.
    others: where no plan fits, what options would bring that were not given.
    checkpointed: the step with gradient checkpointing; None if nobody asked about it, or it was not recorded.
    peak_nbytes: the peak of the step as it would run: unmodified, or by the plan; else the smallest budget that works.
    slowdown: predicted seconds of that step as a multiple of the unmodified one's.
    largest_batch: the largest number of samples with which the unmodified step fits; None if it is not known.
    largest_planned_batch: the same by a plan that recomputes, or runs the loss head in tiles if it may; or the one of the step
        if another plan makes it fit.
    longest: the largest number of tokens of a sample with which the unmodified step fits; None if it is not known.
    longest_planned: the same by a plan, as for the batch.
    """

    card: str
    usable_nbytes: int
    verdict: str
    peak_nbytes: int
    slowdown: float
    largest_batch: int | None
    largest_planned_batch: int | None
    longest: int | None
    longest_planned: int | None
    ranks: int = 1
    techniques: tuple[str, ...] = ()
    offloaded_nbytes: int = 0
    tier_nbytes: int = 0
    early_updates: int = 0
    tiles: tuple[TiledHead, ...] = ()
    at_rest: str = ""
    others: tuple[Other, ...] = ()
    checkpointed: Checkpointed | None = None

    @property
    def missing_nbytes(self) -> int:
        """Bytes by which the smallest plan is too large; 0 if the step fits."""
        return max(0, self.peak_nbytes - self.usable_nbytes)


@dataclass(frozen=True)
class Fit:
    """The answer to whether a training step fits.

    source: what was asked about.
    steps: the unmodified step and the smallest plan, for each number of cards.
    cards: the answer for each card.
    assumed: what the recorded step asked of tensors that have no bytes -> how often.
    unsized: size ("batch", "length") -> why the largest one is not known.
    frontier: the plans of the first of the steps, with the seconds of the first card.
    device: type of the device whose operators the step has.
    as_usual: why no plan updates parameters in backward although plans may; "" otherwise.
    whole: why no plan runs the loss head in tiles although plans may; "" otherwise.
    not_checkpointed: why the step was not recorded with gradient checkpointing although somebody asked; "" otherwise.
    """

    source: str
    steps: tuple[StepOf, ...]
    cards: tuple[OnCard, ...]
    assumed: dict[str, int]
    unsized: dict[str, str]
    frontier: Frontier
    device: str = "cuda"
    as_usual: str = ""
    whole: str = ""
    not_checkpointed: str = ""

    def save_plan(self, path: str) -> str:
        """Write the plan for the card, which a run takes by `plan=path`. Returns what was written, in words. Raises ConfigError
        if several cards were asked about, and InfeasibleError if no plan fits.
        """
        return plans.save(self.frontier, self.cards, path)

    @property
    def context_nbytes(self) -> int:
        """What a process takes of the device beside torch's allocator."""
        return 0 if kind_of(self.device).is_host else CONTEXT_NBYTES

    @property
    def peak_nbytes(self) -> int:
        """What torch's allocator reserves for the first of the steps, unmodified."""
        return self.steps[0].peak_nbytes

    @property
    def allocated_nbytes(self) -> int:
        """What it gives out of that at the peak."""
        return self.steps[0].allocated_nbytes

    @property
    def smallest_nbytes(self) -> int:
        """What it reserves for the smallest plan."""
        return self.steps[0].smallest_nbytes

    @property
    def purposes(self) -> dict[str, int]:
        """Purpose -> allocated bytes at the unmodified peak."""
        return self.steps[0].purposes

    @property
    def fits(self) -> bool:
        """Whether the step fits on every card that was asked about, perhaps by a plan."""
        return all(card.verdict != "no" for card in self.cards)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "lightning_memopt.fit",
            "schema": 1,
            "source": self.source,
            "context_nbytes": self.context_nbytes,
            "steps": [asdict(step) for step in self.steps],
            "cards": [asdict(card) | {"missing_nbytes": card.missing_nbytes} for card in self.cards],
            "assumed": self.assumed,
            "unsized": self.unsized,
            "as_usual": self.as_usual,
            "whole": self.whole,
            "not_checkpointed": self.not_checkpointed,
        }

    def table(self) -> str:
        """The answer as text."""
        lines = [f"{self.source}: {step.text(kind_of(self.device).has_segments)}" for step in self.steps]
        if self.context_nbytes:
            lines[-1] += (
                f" Beside it: CUDA's context and libraries, about {format_nbytes(self.context_nbytes)}, and cuBLAS's "
                "workspaces, 16 to 64 MiB."
            )
        several = any(step.ranks > 1 for step in self.steps)
        table = Table(title="")
        sized = [(what, at, of) for size, what, at, of in _COLUMNS if size not in self.unsized]
        for name in (
            *(("cards",) if several else ()),
            "card",
            "usable",
            "verdict",
            "peak",
            "time",
            *(part for what, *_ in sized for part in (what, "with a plan")),
        ):
            table.add_column(name, justify="left" if name in ("card", "verdict") else "right")
        for card in self.cards:
            table.add_row(
                *((str(card.ranks),) if several else ()),
                card.card,
                format_nbytes(card.usable_nbytes),
                _verdict(card),
                format_nbytes(card.peak_nbytes),
                _time(card),
                *(_size(n) for _, at, _ in sized for n in at(card)),
            )
            if card.checkpointed is not None:
                table.add_row(
                    *(("",) * (3 if several else 2)),
                    _checkpointed_verdict(card.checkpointed),
                    format_nbytes(card.checkpointed.peak_nbytes),
                    f"x{card.checkpointed.slowdown:.2f}",
                    *(cell for *_, size in sized for cell in (_size(size(card.checkpointed)), "")),
                )
        lines.append(render(table, 148 if several else 140))
        lines += [f"{card.card}: {other.text}." for card in self.cards for other in card.others]
        lines += [f"{card.card}: parked while it rests: {card.at_rest}." for card in self.cards if card.at_rest]
        taken = {format_nbytes(card.tier_nbytes): card.card for card in self.cards if card.tier_nbytes}
        lines += [f"{card}: a run takes {nbytes} beside the device for what it parks." for nbytes, card in taken.items()]
        tiles = dict.fromkeys(card.tiles for card in self.cards if card.tiles)
        lines += [f"In tiles: {tiles_text(heads)}." for heads in tiles]
        if tiles or any(other.tile for card in self.cards for other in card.others):
            lines.append(_BITS)
        if self.whole:
            lines.append(f"No loss head runs in tiles: {self.whole.rstrip('.')}.")
        if self.as_usual:
            lines.append(f"No parameter is updated in backward: {self.as_usual}")
        if self.not_checkpointed:
            lines.append(f"No row has gradient checkpointing: {self.not_checkpointed.rstrip('.')}.")
        asked = any(card.checkpointed is not None for card in self.cards) or bool(self.not_checkpointed)
        lines += [f"{line}." for line in _assumed(self.assumed, asked)]
        for why in filter(None, dict.fromkeys(self.unsized.values())):
            sizes = " and ".join(size for size, other in self.unsized.items() if other == why)
            lines.append(f"The largest {sizes} cannot be told: {why.rstrip('.')}.")
        if several:
            lines.append(SHARDED)
        lines.append(
            "Peaks are what torch's allocator would reserve for a step that was recorded, not computed. Workspaces of other "
            "kernels come on top. Times are ratios, from the card's rates."
        )
        return "\n".join(lines)


def fit(
    source: str | Sequence[str],
    cards: Sequence[str] = (),
    ranks: Sequence[int] = (1,),
    *,
    offload: str = "none",
    host_budget: GivenBudget = None,
    disk_budget: GivenBudget = None,
    optimizer_in_backward: str = "never",
    tile: str = "exact",
    **options: Any,
) -> Fit:
    """Whether a training step fits on cards, without a card, memory, or weights.

    source: `package.module:function` that returns (model, optimizer, step); the path of a config.json of transformers, or of
        its folder; the id of a model; or the words of a command that runs a training script: ["python", "train.py"].
    cards: names of profiles, files of rates, or bytes ("24GiB"); none: `fitting.cards.CARDS`.
    ranks: numbers of cards, over which the model of a config is sharded by FSDP2. All sizes are of one card.
    offload, optimizer_in_backward, tile: what plans may do beside recomputing, as of `MemOptConfig`; on one card.
    host_budget, disk_budget: the most bytes that a plan may take there, as of `MemOptConfig`; None: as many as it likes.
    options: how the model of a config is trained (`fitting.options.Options`).

    Raises ConfigError if there is no such source or card, or if its step cannot be planned.
    """
    budgets = {"host": host_budget, "disk": disk_budget}
    given, config = Options(**options), config_of(offload, optimizer_in_backward, tile, budgets=budgets)
    asked = cards_of(cards) if given.cuda else of_the_host(cards_of(cards))
    check(config, given.device, asked, ranks)
    device = asked[0].name, max(card.device.nbytes for card in asked)
    sources = [(n, source_of(source, given, device, n)) for n in numbers_of(ranks)]
    answers = []
    for n, at in sources:
        with contextlib.closing(at):
            answers.append(answered(at, asked, n, config))
    rows = tuple(card for on in zip(*(answer.cards for answer in answers), strict=True) for card in on)
    return replace(answers[0], cards=rows, steps=tuple(answer.steps[0] for answer in answers))


def answered(source: Source, cards: Sequence[Card], ranks: int = 1, config: MemOptConfig | None = None) -> Fit:
    """The answer for a source and cards; `ranks` of each, over which the source shards its model. `config`: what plans may use;
    None: recomputation.
    """
    sizes = {"batch": source.batch or 1, "length": source.length or 1}
    recorded = source.record(*sizes.values())
    graph = recorded.graph
    peak, plain_nbytes = at_peak(graph, keep_all(graph)), needed_nbytes(graph, keep_all(graph))
    tight = sorted({card.usable_nbytes for card in cards if card.usable_nbytes < plain_nbytes})
    timed = cards[0].timed(graph)
    frontier = planner.solve(
        timed,
        search_seconds=SEARCH_SECONDS if tight else 0.0,
        limit_seconds=LIMIT_SECONDS,
        budgets=tight,
        keep_nbytes=tight[0] if tight else None,
    )
    ways = Techniques(source, graph, frontier, cards, tight, config or config_of(), recorded.resting)
    unsized: dict[str, str] = {}
    largest: dict[str, list[Most]] = {}
    for size, here in (("batch", source.batch), ("length", source.length)):
        plain_at = cache(partial(_graph_at, source.record, sizes, size))
        fitted = source.unsized if here is None else at_sizes(here, plain_at, graph)
        if isinstance(fitted, str):
            unsized[size] = fitted
            largest[size] = [(None, None)] * len(cards)
        else:
            largest[size] = most(fitted, cards, LARGEST[size], here or 1, ways.tiled_at_sizes(size, here or 1, plain_at))
    checkpointed = _checkpointed(source, sizes, recorded, cards)
    not_checkpointed, of_cards = (checkpointed, [None] * len(cards)) if isinstance(checkpointed, str) else ("", checkpointed)
    on_cards = tuple(
        replace(_on(card, graph, ways, plain_nbytes, batch, length), ranks=ranks, checkpointed=on)
        for card, batch, length, on in zip(cards, largest["batch"], largest["length"], of_cards, strict=True)
    )
    return Fit(
        source=source.name,
        steps=(StepOf(ranks, plain_nbytes, peak.total, ways.smallest_nbytes, dict(peak.by(1))),),
        cards=tuple(_at_least(on, source) for on in on_cards),
        assumed=_counted(recorded),
        unsized=unsized,
        frontier=frontier,
        device=source.device,
        as_usual=ways.as_usual,
        whole=ways.whole,
        not_checkpointed=not_checkpointed,
    )


def _graph_at(record: Callable[[int, int], Recorded], sizes: dict[str, int], size: str, n: int) -> Graph:
    """The step with one of its sizes changed to `n`."""
    return record(*(sizes | {size: n}).values()).graph


def _checkpointed(
    source: Source, sizes: dict[str, int], plain: Recorded, cards: Sequence[Card]
) -> list[Checkpointed | None] | str:
    """The step with gradient checkpointing, on each card: None if nobody asks about it. If it could not be recorded: why."""
    record = source.checkpointed
    if record is None or not (source.asks or CHECKPOINTED in plain.assumed):
        return [None] * len(cards)
    try:
        graph = record(*sizes.values()).graph
    except MemOptError as error:
        return str(error)
    nbytes = needed_nbytes(graph, keep_all(graph))
    largest: dict[str, list[int] | list[None]] = {size: [None] * len(cards) for size in sizes}
    for size, here in (("batch", source.batch), ("length", source.length)):
        fitted = None if here is None else at_sizes(here, partial(_graph_at, record, sizes, size), graph)
        if isinstance(fitted, StepFit):
            largest[size] = most_unmodified(fitted, cards, LARGEST[size], here or 1)
    return [
        Checkpointed(
            nbytes <= card.usable_nbytes,
            nbytes,
            max(0, nbytes - card.usable_nbytes),
            card.timed(graph).step_seconds / card.timed(plain.graph).step_seconds,
            batch,
            longest,
        )
        for card, batch, longest in zip(cards, largest["batch"], largest["length"], strict=True)
    ]


@collector_paused()
def _on(card: Card, graph: Graph, ways: Techniques, plain_nbytes: int, batch: Most, length: Most) -> OnCard:
    usable = card.usable_nbytes
    if plain_nbytes <= usable and not ways.always:
        return OnCard(card.name, usable, "fits", plain_nbytes, 1.0, *batch, *length)
    found = ways.best(card)
    return OnCard(
        card.name,
        usable,
        "plan" if found.fits else "no",
        found.nbytes,
        1 + found.seconds / card.timed(graph).step_seconds,
        *batch,
        *length,
        techniques=found.techniques,
        offloaded_nbytes=found.offloaded_nbytes,
        tier_nbytes=sum(found.plan.in_tiers.values()),
        early_updates=len(found.plan.updates),
        tiles=found.plan.tiles,
        at_rest=resting_text(found.plan.states, found.plan.weights),
        others=() if found.fits else ways.others(card, found),
    )


def _at_least(on: OnCard, source: Source) -> OnCard:
    """The answer with the sizes of the step itself where a plan makes it fit that does more than recompute."""
    if on.verdict != "plan":
        return on
    batch, longest = on.largest_planned_batch, on.longest_planned
    return replace(
        on,
        largest_planned_batch=None if batch is None else max(batch, source.batch or 0),
        longest_planned=None if longest is None else max(longest, source.length or 0),
    )


def _counted(recorded: Recorded) -> dict[str, int]:
    return dict(recorded.assumed + Counter({f"ran {name}": n for name, n in recorded.ran.items()}))


def _verdict(card: OnCard) -> str:
    if card.verdict == "no":
        return f"no: {format_nbytes(card.missing_nbytes)} missing"
    if card.verdict == "fits":
        return "fits as it is"
    parts = [f"offload {format_nbytes(card.offloaded_nbytes)}" if name == OFFLOAD else name for name in card.techniques]
    lines = ["fits by a plan:"]
    for part in (*(f"{part}," for part in parts[:-1]), *parts[-1:]):
        lines[-1:] = [f"{lines[-1]} {part}"] if len(lines[-1]) + len(part) < _VERDICT else [lines[-1], part]
    return "\n".join(lines)


def _checkpointed_verdict(on: Checkpointed) -> str:
    return "checkpointing: fits" if on.fits else f"checkpointing:\n{format_nbytes(on.missing_nbytes)} missing"


def _time(card: OnCard) -> str:
    return "x1" if card.verdict == "fits" else f"x{card.slowdown:.2f}"


def _size(size: int | None) -> str:
    return f"{size}+" if size in LARGEST.values() else str(size)


_COLUMNS: tuple[tuple[str, str, Callable[[OnCard], Most], Callable[[Checkpointed], int | None]], ...] = (
    ("batch", "largest batch", lambda card: (card.largest_batch, card.largest_planned_batch), lambda c: c.largest_batch),
    ("length", "longest sample", lambda card: (card.longest, card.longest_planned), lambda c: c.longest),
)
"""Size -> its column, and what is in it and in the next one, of plans; and what is in it with gradient checkpointing."""


def _assumed(assumed: dict[str, int], checkpointed: bool) -> list[str]:
    """Lines about what was assumed. `checkpointed`: whether the step was asked about with gradient checkpointing, too."""
    off = "is off but in the rows that name it, since a plan replaces it"
    if not checkpointed:
        off = "is off, since a plan replaces it; --gradient-checkpointing asks about it, too"
    texts = {
        "aten::_local_scalar_dense": "numbers asked of tensors without bytes are 1.0 or 0, and conditions on all of them hold",
        CHECKPOINTED: f"{CHECKPOINTED} {off}",
        "aten::topk": "topk of scores without bytes takes all equally often, as a balanced router of experts",
    }
    given = sum(n for name, n in assumed.items() if name.startswith(GIVEN))
    others = [name for name in assumed if not name.startswith(GIVEN)]
    lines = [texts.get(name, f"{name.removeprefix('ran ')} ran on memory that nobody filled") for name in others]
    return [f"Assumed: {line}" for line in lines] + [f"Values that steer the step were given {given} times"] * (given > 0)
