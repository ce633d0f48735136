"""Whether a step fits: as it is, or by a plan, on each of several cards, and the largest batch that does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from lightning_memopt.batching.fit import FitError, StepFit
from lightning_memopt.batching.fit import fit as fit_step
from lightning_memopt.batching.plans import largest
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting import plans
from lightning_memopt.fitting.cards import CONTEXT_NBYTES, Card, cards_of, of_the_host
from lightning_memopt.fitting.options import Options
from lightning_memopt.fitting.recording import CHECKPOINTED, Recorded
from lightning_memopt.fitting.sharding import SHARDED, StepOf, numbers_of
from lightning_memopt.fitting.sources import Source, source_of
from lightning_memopt.fitting.techniques import (
    LIMIT_SECONDS,
    OFFLOAD,
    SEARCH_SECONDS,
    Other,
    Techniques,
    check,
    config_of,
)
from lightning_memopt.fitting.values import GIVEN
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, Machine, Schedule, lower, simulate
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.report.text import Table, render
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.collector import collector_paused
from lightning_memopt.solvers.frontier import Frontier
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.units import format_nbytes

_BEYOND = 8
"""How many times the largest unmodified step the one is for which a plan is made. A plan makes room for about as many."""
_NEAR = 0.02
"""The share by which a largest size may be too small."""
_LARGEST = {"batch": 1 << 14, "length": 1 << 22}
"""The largest sizes that are asked about."""
_VERDICT = 27
"""Maximum width of a verdict; longer ones take several lines."""
Most = tuple[int | None, int | None]
"""The largest size of a step that fits unmodified, and by a plan; None if it is not known."""


@dataclass(frozen=True)
class OnCard:
    """The answer for one card.

    card: its name.
    ranks: number of such cards over which the model is sharded.
    usable_nbytes: bytes for the step, beside the context and the workspaces of libraries.
    verdict: "fits": the unmodified step does. "plan": it does by a plan. "no": no plan is small enough.
    techniques: what the plan uses: "recompute", "offload", "early updates".
    offloaded_nbytes: bytes that a step by the plan copies to the tier, and back.
    tier_nbytes: the most bytes that are there at once.
    early_updates: number of parameters that are updated in backward.
    others: where no plan fits, what options would bring that were not given.
    peak_nbytes: the peak of the step as it would run: unmodified, or by the plan; else the smallest budget that works.
    slowdown: predicted seconds of that step as a multiple of the unmodified one's.
    largest_batch: the largest number of samples with which the unmodified step fits; None if it is not known.
    largest_planned_batch: the same by a plan that only recomputes, or the one of the step if another plan makes it fit.
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
    others: tuple[Other, ...] = ()

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
    """

    source: str
    steps: tuple[StepOf, ...]
    cards: tuple[OnCard, ...]
    assumed: dict[str, int]
    unsized: dict[str, str]
    frontier: Frontier
    device: str = "cuda"
    as_usual: str = ""

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
        sized = [(what, at) for size, what, at in _COLUMNS if size not in self.unsized]
        for name in (
            *(("cards",) if several else ()),
            "card",
            "usable",
            "verdict",
            "peak",
            "time",
            *(part for what, _ in sized for part in (what, "with a plan")),
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
                *(_size(n) for _, at in sized for n in at(card)),
            )
        lines.append(render(table, 148 if several else 140))
        lines += [f"{card.card}: {other.text}." for card in self.cards for other in card.others]
        if self.as_usual:
            lines.append(f"No parameter is updated in backward: {self.as_usual}")
        lines += [f"{line}." for line in _assumed(self.assumed)]
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
    optimizer_in_backward: str = "never",
    **options: Any,
) -> Fit:
    """Whether a training step fits on cards, without a card, memory, or weights.

    source: `package.module:function` that returns (model, optimizer, step); the path of a config.json of transformers, or of
        its folder; the id of a model; or the words of a command that runs a training script: ["python", "train.py"].
    cards: names of profiles, files of rates, or bytes ("24GiB"); none: `fitting.cards.CARDS`.
    ranks: numbers of cards, over which the model of a config is sharded by FSDP2. All sizes are of one card.
    offload, optimizer_in_backward: what plans may do beside recomputing, as of `MemOptConfig`; on one card.
    options: how the model of a config is trained (`fitting.options.Options`).

    Raises ConfigError if there is no such source or card, or if its step cannot be planned.
    """
    given, config = Options(**options), config_of(offload, optimizer_in_backward)
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
    peak, plain_nbytes = at_peak(graph, keep_all(graph)), _needs(graph, keep_all(graph))
    tight = sorted({card.usable_nbytes for card in cards if card.usable_nbytes < plain_nbytes})
    timed = cards[0].timed(graph)
    frontier = planner.solve(
        timed,
        search_seconds=SEARCH_SECONDS if tight else 0.0,
        limit_seconds=LIMIT_SECONDS,
        budgets=tight,
        keep_nbytes=tight[0] if tight else None,
    )
    ways = Techniques(source, graph, frontier, cards, tight, config or config_of())
    unsized: dict[str, str] = {}
    most: dict[str, list[Most]] = {}
    for size, here in (("batch", source.batch), ("length", source.length)):
        fitted = source.unsized if here is None else _at_sizes(here, partial(_graph_at, source, sizes, size), graph)
        if isinstance(fitted, str):
            unsized[size] = fitted
            most[size] = [(None, None)] * len(cards)
        else:
            most[size] = _most(fitted, cards, _LARGEST[size], here or 1)
    on_cards = tuple(
        replace(_on(card, graph, ways, plain_nbytes, batch, length), ranks=ranks)
        for card, batch, length in zip(cards, most["batch"], most["length"], strict=True)
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
    )


def _graph_at(source: Source, sizes: dict[str, int], size: str, n: int) -> Graph:
    """The step with one of its sizes changed to `n`."""
    return source.record(*(sizes | {size: n}).values()).graph


def _at_sizes(here: int, graph_at: Callable[[int], Graph], graph: Graph) -> StepFit | str:
    """The step at any size, from two; `here` is the one of `graph`. If it is another step at another size: how they differ. One
    sample is often another step than two.
    """
    different = ""
    graphs = {here: graph}
    for small, large in ((here, 2 * here), (2 * here, 3 * here)):
        try:
            for size in (small, large):
                if size not in graphs:
                    graphs[size] = graph_at(size)
            return fit_step(graphs[small], graphs[large], (small, large))
        except (ConfigError, FitError) as error:
            different = str(error)
    return different


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
        tier_nbytes=found.plan.predicted.tier_nbytes,
        early_updates=len(found.plan.updates),
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


def _needs(graph: Graph, lives: tuple[Life, ...], schedule: Schedule | None = None) -> int:
    """What torch's allocator reserves for a plan."""
    reserve = Machine().reserve(graph)
    return simulate(graph, lives, schedule).predicted.peak_nbytes if reserve is None else reserve(lives, schedule)


@collector_paused()
def _most(sizes: StepFit, cards: Sequence[Card], cap: int, here: int) -> list[Most]:
    """For each card, the largest sizes that fit, at most `cap`; 0 if none does. The plan is the smallest one of a step that is
    larger than any unmodified one that fits: in smaller ones, what is not rebuilt may matter more than activations.

    here: the size of the step that was recorded.
    """

    def most(lives: tuple[Life, ...]) -> list[int]:
        schedule = lower(sizes.at(here), lives)  # the points of the step are the same at every size
        peaks: dict[int, int] = {}
        needed: dict[int, int] = {}

        def peak(n: int) -> int:
            return simulate(sizes.at(n), lives, schedule).predicted.peak_nbytes

        def needs(n: int) -> int:
            return _needs(sizes.at(n), lives, schedule)

        def on(usable_nbytes: int) -> int:
            """Reserved bytes take long to ask for: first, allocated bytes bound the size."""
            high = largest(peak, usable_nbytes, 1, cap, known=peaks)
            found = largest(needs, usable_nbytes, here, high, _NEAR, needed)
            return found or largest(needs, usable_nbytes, 1, min(high, here), _NEAR, needed)

        largest_first = sorted({card.usable_nbytes for card in cards}, reverse=True)
        sizes_on = {usable_nbytes: on(usable_nbytes) for usable_nbytes in largest_first}
        return [sizes_on[card.usable_nbytes] for card in cards]

    plain = most(keep_all(sizes.large))
    planned = most(planner.smallest(sizes.at(_BEYOND * max(1, *plain))).lives)
    return [(n, max(n, by_plan)) for n, by_plan in zip(plain, planned, strict=True)]


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


def _time(card: OnCard) -> str:
    return "x1" if card.verdict == "fits" else f"x{card.slowdown:.2f}"


def _size(size: int | None) -> str:
    return f"{size}+" if size in _LARGEST.values() else str(size)


_COLUMNS: tuple[tuple[str, str, Callable[[OnCard], Most]], ...] = (
    ("batch", "largest batch", lambda card: (card.largest_batch, card.largest_planned_batch)),
    ("length", "longest sample", lambda card: (card.longest, card.longest_planned)),
)
"""Size -> its column, and what is in it and in the next one, of plans."""


def _assumed(assumed: dict[str, int]) -> list[str]:
    texts = {
        "aten::_local_scalar_dense": "numbers asked of tensors without bytes are 1.0 or 0, and conditions on all of them hold",
        CHECKPOINTED: "gradient checkpointing is off, since a plan replaces it",
        "aten::topk": "topk of scores without bytes takes all equally often, as a balanced router of experts",
    }
    given = sum(n for name, n in assumed.items() if name.startswith(GIVEN))
    others = [name for name in assumed if not name.startswith(GIVEN)]
    lines = [texts.get(name, f"{name.removeprefix('ran ')} ran on memory that nobody filled") for name in others]
    return [f"Assumed: {line}" for line in lines] + [f"Values that steer the step were given {given} times"] * (given > 0)
