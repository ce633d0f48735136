"""Whether a step fits: as it is, or by a plan, on each of several cards, and the largest batch that does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memopt.batching.fit import FitError, StepFit
from lightning_memopt.batching.fit import fit as fit_step
from lightning_memopt.batching.plans import largest
from lightning_memopt.errors import ConfigError, InfeasibleError
from lightning_memopt.fitting.cards import CONTEXT_NBYTES, Card, cards_of
from lightning_memopt.fitting.recording import CHECKPOINTED, Recorded
from lightning_memopt.fitting.sources import Options, Source, source_of
from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, simulate
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.report.text import Table, render
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.frontier import Frontier
from lightning_memopt.solvers.rollout import keep_all
from lightning_memopt.units import format_nbytes

_SEARCH_SECONDS, _LIMIT_SECONDS = 10.0, 60.0
"""Time limits of the search for faster plans, and of all searches. A plan for the smallest card is looked for to the end."""
_LARGEST_BATCH = 1 << 14
"""The largest batch that is asked about."""


@dataclass(frozen=True)
class OnCard:
    """The answer for one card.

    card: its name.
    usable_nbytes: bytes for torch's allocator, beside the context.
    verdict: "fits": the unmodified step does. "plan": it does by a plan. "no": no plan is small enough.
    peak_nbytes: the peak of the step as it would run: unmodified, or by the plan; else the smallest budget that works.
    slowdown: predicted seconds of that step as a multiple of the unmodified one's.
    largest_batch: the largest number of samples with which the unmodified step fits; None if it is not known.
    largest_planned_batch: the same by a plan.
    """

    card: str
    usable_nbytes: int
    verdict: str
    peak_nbytes: int
    slowdown: float
    largest_batch: int | None
    largest_planned_batch: int | None

    @property
    def missing_nbytes(self) -> int:
        """Bytes by which the smallest plan is too large; 0 if the step fits."""
        return max(0, self.peak_nbytes - self.usable_nbytes)


@dataclass(frozen=True)
class Fit:
    """The answer to whether a training step fits.

    source: what was asked about.
    peak_nbytes: the allocated peak of the unmodified step.
    smallest_nbytes: that of the smallest plan.
    purposes: purpose -> bytes at the unmodified peak.
    cards: the answer for each card.
    assumed: what the recorded step asked of tensors that have no bytes -> how often.
    unsized: why the largest batch is not known; "" if it is.
    frontier: the plans of the recorded step, with the seconds of the first card.
    """

    source: str
    peak_nbytes: int
    smallest_nbytes: int
    purposes: dict[str, int]
    cards: tuple[OnCard, ...]
    assumed: dict[str, int]
    unsized: str
    frontier: Frontier

    @property
    def fits(self) -> bool:
        """Whether the step fits on every card that was asked about, perhaps by a plan."""
        return all(card.verdict != "no" for card in self.cards)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "lightning_memopt.fit",
            "schema": 1,
            "source": self.source,
            "peak_nbytes": self.peak_nbytes,
            "smallest_nbytes": self.smallest_nbytes,
            "context_nbytes": CONTEXT_NBYTES,
            "purposes": self.purposes,
            "cards": [asdict(card) | {"missing_nbytes": card.missing_nbytes} for card in self.cards],
            "assumed": self.assumed,
            "unsized": self.unsized,
        }

    def table(self) -> str:
        """The answer as text."""
        parts = ", ".join(f"{name} {format_nbytes(n)}" for name, n in sorted(self.purposes.items(), key=lambda e: -e[1]))
        lines = [
            f"{self.source}: the unmodified step peaks at {format_nbytes(self.peak_nbytes)}, the smallest plan at "
            f"{format_nbytes(self.smallest_nbytes)}.",
            f"At the peak: {parts}. Beside it: CUDA's context and libraries, about {format_nbytes(CONTEXT_NBYTES)}.",
        ]
        table = Table(title="")
        for name in ("card", "usable", "verdict", "peak", "time", *(() if self.unsized else ("largest batch", "with a plan"))):
            table.add_column(name, justify="left" if name in ("card", "verdict") else "right")
        for card in self.cards:
            batches = (_batch(card.largest_batch), _batch(card.largest_planned_batch)) if not self.unsized else ()
            table.add_row(
                card.card,
                format_nbytes(card.usable_nbytes),
                _verdict(card),
                format_nbytes(card.peak_nbytes),
                _time(card),
                *batches,
            )
        lines.append(render(table, 140))
        lines += [f"Assumed: {line}." for line in _assumed(self.assumed)]
        if self.unsized:
            lines.append(f"The largest batch is not known: {self.unsized.rstrip('.')}.")
        lines.append(
            "Peaks are allocated bytes of a step that was recorded, not computed. Workspaces of the card's kernels, and "
            "fragmentation of its allocator, come on top. Times are ratios, from peak rates."
        )
        return "\n".join(lines)


def fit(source: str | Sequence[str], cards: Sequence[str] = (), **options: Any) -> Fit:
    """Whether a training step fits on cards, without a card, memory, or weights.

    source: `package.module:function` that returns (model, optimizer, step); the path of a config.json of transformers, or of
        its folder; the id of a model; or the words of a command that runs a training script: ["python", "train.py"].
    cards: names of profiles, files of rates, or bytes ("24GiB"); none: `fitting.cards.CARDS`.
    options: how the model of a config is trained (`fitting.sources.Options`).

    Raises ConfigError if there is no such source or card, or if its step cannot be planned.
    """
    asked = cards_of(cards)
    device = asked[0].name, max(card.device.nbytes for card in asked)
    return answered(source_of(source, Options(**options), device), asked)


def answered(source: Source, cards: Sequence[Card]) -> Fit:
    """The answer for a source and cards."""
    recorded = source.record(source.batch or 1)
    graph = recorded.graph
    peak = at_peak(graph, keep_all(graph))
    plain_nbytes = peak.total
    tight = sorted({card.usable_nbytes for card in cards if card.usable_nbytes < plain_nbytes})
    timed = cards[0].timed(graph)
    frontier = planner.solve(
        timed,
        search_seconds=_SEARCH_SECONDS,
        limit_seconds=_LIMIT_SECONDS,
        budgets=tight,
        keep_nbytes=tight[0] if tight else None,
    )
    sizes = _at_sizes(source, recorded)
    batches = [(None, None) for _ in cards] if isinstance(sizes, str) else _batches(sizes, cards)
    return Fit(
        source=source.name,
        peak_nbytes=plain_nbytes,
        smallest_nbytes=frontier.smallest_nbytes,
        purposes=dict(peak.by(1)),
        cards=tuple(_on(card, graph, frontier, plain_nbytes, n) for card, n in zip(cards, batches, strict=True)),
        assumed=_counted(recorded),
        unsized=sizes if isinstance(sizes, str) else "",
        frontier=frontier,
    )


def _at_sizes(source: Source, recorded: Recorded) -> StepFit | str:
    """The step at any batch size, from two. If it is another step at another size: how they differ. One sample is often another
    step than two.
    """
    if source.batch is None:
        return "the source alone knows its batch"
    different = ""
    graphs = {source.batch: recorded.graph}
    for small, large in ((source.batch, 2 * source.batch), (2 * source.batch, 3 * source.batch)):
        try:
            for size in (small, large):
                if size not in graphs:
                    graphs[size] = source.record(size).graph
            return fit_step(graphs[small], graphs[large], (small, large))
        except (ConfigError, FitError) as error:
            different = str(error)
    return different


def _on(card: Card, graph: Graph, frontier: Frontier, plain_nbytes: int, batches: tuple[int | None, int | None]) -> OnCard:
    usable = card.usable_nbytes
    if plain_nbytes <= usable:
        return OnCard(card.name, usable, "fits", plain_nbytes, 1.0, *batches)
    try:
        plan, verdict = frontier.plan(usable), "plan"
        peak_nbytes = plan.predicted.needed_nbytes
    except InfeasibleError:
        plan, verdict = frontier.smallest_plan(), "no"
        peak_nbytes = plan.budget_nbytes
    timed = card.timed(graph)
    slowdown = 1 + simulate(timed, plan.lives).predicted.seconds / timed.step_seconds
    return OnCard(card.name, usable, verdict, peak_nbytes, slowdown, *batches)


def _batches(sizes: StepFit, cards: Sequence[Card]) -> list[tuple[int, int]]:
    """For each card, the largest batches that fit: unmodified, and by a plan; 0 if no batch does. The plan is the smallest one
    of the largest batch, where activations matter most.
    """

    def most(lives: tuple[Life, ...], usable_nbytes: int) -> int:
        return largest(lambda n: simulate(sizes.at(n), lives).predicted.peak_nbytes <= usable_nbytes, 1, _LARGEST_BATCH)

    plain = [most(keep_all(sizes.large), card.usable_nbytes) for card in cards]
    smallest = planner.smallest(sizes.at(max(1, *plain))).lives
    return [(n, max(n, most(smallest, card.usable_nbytes))) for n, card in zip(plain, cards, strict=True)]


def _counted(recorded: Recorded) -> dict[str, int]:
    return dict(recorded.assumed + Counter({f"ran {name}": n for name, n in recorded.ran.items()}))


def _verdict(card: OnCard) -> str:
    if card.verdict == "no":
        return f"no: {format_nbytes(card.missing_nbytes)} missing"
    return {"fits": "fits as it is", "plan": "fits by a plan"}[card.verdict]


def _time(card: OnCard) -> str:
    return "x1" if card.verdict == "fits" else f"x{card.slowdown:.2f}"


def _batch(size: int | None) -> str:
    return f"{size}+" if size == _LARGEST_BATCH else str(size)


def _assumed(assumed: dict[str, int]) -> list[str]:
    texts = {
        "aten::_local_scalar_dense": "numbers that the step asked of tensors without bytes are 1.0, 0 or False",
        CHECKPOINTED: "gradient checkpointing is off, since a plan replaces it",
        "aten::topk": "topk of scores without bytes takes all equally often, as a balanced router of experts",
    }
    return [texts.get(name, f"{name.removeprefix('ran ')} ran on memory that nobody filled") for name in assumed]
