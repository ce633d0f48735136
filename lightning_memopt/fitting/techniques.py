"""Plans that do more than recompute: that run the loss head in tiles (`tiling.py`), that park saved tensors in a tier, at the
rates of a card's links, and that update parameters in backward. They are made as a session makes them (`session/parking`,
`plan/updates.py`).

A plan uses only what the user allows, as a run does. For a card that no such plan fits, the other techniques are tried, and the
answer says what they would bring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from lightning_memopt.batching.fit import StepFit
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import ConfigError, InfeasibleError, MemOptError
from lightning_memopt.fitting.allowed import SEARCH_SECONDS, GivenBudget, config_of
from lightning_memopt.fitting.cards import Card
from lightning_memopt.fitting.found import Found, Other
from lightning_memopt.fitting.offloading import OfCard, tier_of
from lightning_memopt.fitting.recording import Recorded
from lightning_memopt.fitting.resting import Resting
from lightning_memopt.fitting.sizes import at_sizes
from lightning_memopt.fitting.sources import SIZES, Source
from lightning_memopt.fitting.tiling import InTiles, recorded_in_tiles
from lightning_memopt.graph import EarlyUpdate, Graph, unmodified_levels
from lightning_memopt.plan import LoweringError, Machine, Plan, TiledHead, simulate
from lightning_memopt.plan.forms import TIERS
from lightning_memopt.plan.logits import are_worth_tiles
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.plan.resting import Parked, with_rest
from lightning_memopt.session.parking.joint_frontier import JointFrontier
from lightning_memopt.session.tiling import why_not
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.frontier import Candidate, Frontier
from lightning_memopt.solvers.parking import Parking, Tried
from lightning_memopt.units import ceil_div

LIMIT_SECONDS = 60.0
"""Time limit of all searches with what the user allows. A plan for the smallest card is looked for to the end."""
_OTHER_SECONDS, _LEAST_SECONDS = 3.0, 1.0
"""Time limits of a search with what the user did not allow, and of one for a plan that does not fit: of these the answer says
only about how long a step takes."""
_STARTS = 8
"""Maximum number of plans that recompute from which such a search starts."""
_AS_IT_IS = "This step can only be asked about as it is."
Heads = tuple[TiledHead, ...]


def check(config: MemOptConfig, device: str, cards: Sequence[Card], ranks: Sequence[int] = (1,)) -> None:
    """Before anything is recorded: raise ConfigError where these techniques cannot be asked about, for such a device, a card
    without a link to the tier, or several cards.
    """
    tier = tier_of(device, config)
    for card in cards if tier else ():
        if card.rates is None or tier not in card.rates.links:
            raise ConfigError(f"the rates of {card.name} have no link to the tier {tier!r}: measure it by memopt profile")
    if any(n > 1 for n in ranks):
        if tier:
            raise ConfigError(
                f"offload={config.offload!r}: a model that FSDP2 shards parks nothing. Leave ranks or offload out"
            )
        if config.optimizer_in_backward != "never":
            raise ConfigError("early updates are asked about on one card only. Leave ranks or optimizer_in_backward out")


@dataclass(frozen=True)
class _Try(Tried):
    """What was found for a step on a card.

    found: the plan that fits; None if none does.
    """

    found: Found | None = None


class Techniques:
    """The plans for cards, of a step that was recorded.

    config: what plans may use.
    smallest_nbytes: what the smallest of the plans that were made with that needs.
    as_usual: why no plan updates parameters in backward although the user allows it; "" if some may.
    whole: why no plan runs the loss head in tiles although the user allows it; "" if some may.
    """

    def __init__(
        self,
        source: Source,
        graph: Graph,
        frontier: Frontier,
        cards: Sequence[Card],
        budgets: Sequence[int],
        config: MemOptConfig,
        resting: Resting | None = None,
    ) -> None:
        """`frontier`: plans that recompute, with the seconds of the first card. `budgets`: bytes of the cards on which the
        unmodified step does not fit. `resting`: what rests in the training.
        """
        self.config = config
        self.as_usual = self.whole = ""
        self.smallest_nbytes = frontier.smallest_nbytes
        self._frontier = frontier
        self._source = source
        self._graph = graph
        self._first = cards[0]
        self._budgets = budgets or [card.usable_nbytes for card in cards[:1]]
        self._joined: dict[tuple[int, MemOptConfig], JointFrontier] = {}
        self._updating: dict[tuple[float, Heads], Frontier | str] = {}
        self._early_steps: dict[Heads, Recorded | str] = {}
        self._tiled: dict[float, list[Frontier]] = {}
        self._resting = resting
        self._parked: dict[Any, Frontier] = {}

    @property
    def always(self) -> bool:
        """Whether parameters are updated in backward even where the unmodified step fits."""
        return self.config.optimizer_in_backward == "always"

    def best(self, card: Card) -> Found:
        """The plan for a card, by what the user allows. Raises ConfigError if it must update parameters in backward, and
        cannot.
        """
        frontiers, self.as_usual = self._allowed(card, self.config)
        if self.as_usual and self.always:
            raise ConfigError(
                f"optimizer_in_backward='always' would be wrong: {self.as_usual} Or set optimizer_in_backward='auto'"
            )
        if not self.always:
            frontiers.append(self._frontier)
        fitting, frontiers = self._fitting(card, self.config, frontiers)
        self.smallest_nbytes = min([self.smallest_nbytes, *(frontier.smallest_nbytes for frontier in frontiers)])
        if fitting:
            return min(fitting, key=_seconds)
        small = min(frontiers, key=lambda frontier: frontier.smallest_nbytes)
        if isinstance(small, JointFrontier) and card.rates is not None:  # how long it takes matters little
            offload = self.config.offload
            quick = config_of(offload, budgets=self._given(offload), solver_seconds=_LEAST_SECONDS)
            small = replace(small, offloading=OfCard(self._source.device, quick, card.rates))
        return self._found(card, small, small.smallest_plan(), False)

    def others(self, card: Card, found: Found) -> tuple[Other, ...]:
        """What the other techniques would bring where no plan fits: the first of them, or both, with which one does; if none
        does, the one with which the fewest bytes are missing. Empty if they bring nothing.
        """
        usable = card.usable_nbytes
        missing, best = found.nbytes - usable, None
        for config in self._more():
            if (
                config.optimizer_in_backward != self.config.optimizer_in_backward
                and self._least_updating(card, config) > usable
            ):
                continue  # recording and solving again would take long, for nothing
            frontiers, as_usual = self._allowed(card, config)
            if as_usual or not frontiers:
                continue
            fitting, frontiers = self._fitting(card, config, frontiers)
            options = config.offload, config.optimizer_in_backward, config.tile if config.tile != self.config.tile else ""
            if fitting:
                seconds = min(map(_seconds, fitting))
                return (Other(*options, 0, 1 + seconds / card.timed(self._graph).step_seconds),)
            needed = min(frontier.smallest_nbytes for frontier in frontiers)
            if needed - usable < missing:
                missing = needed - usable
                best = Other(*options, missing, None)
        return () if best is None else (best,)

    def _more(self) -> Iterator[MemOptConfig]:
        """What the user did not allow: each technique alone, the fastest one first, then several. Nothing for a model that is
        sharded.
        """
        if self._graph.windowed:
            return
        allowed = self.config.offload, self.config.optimizer_in_backward, self.config.tile
        tier = kind_of(self._source.device).slow_tier
        can_update = allowed[1] == "never" and self._source.early is not None
        updates = dict.fromkeys((allowed[1], "auto" if can_update else allowed[1]))
        offloads = dict.fromkeys((allowed[0], tier if allowed[0] == "none" else allowed[0]))
        tiles = dict.fromkeys((allowed[2], "exact" if self._steps_in_tiles else allowed[2]))
        more = [(offload, update, tile) for update in updates for offload in offloads for tile in tiles]
        for options in sorted(more, key=lambda each: sum(a != b for a, b in zip(each, allowed, strict=True))):
            if options != allowed:
                yield config_of(*options, budgets=self._given(options[0]), solver_seconds=_OTHER_SECONDS)

    def _given(self, offload: str) -> dict[str, GivenBudget]:
        """The budgets of tiers that the user gave, for plans that use the same tier."""
        return {tier: self.config.budget_of(tier) for tier in TIERS} if offload == self.config.offload else {}

    def _least_updating(self, card: Card, config: MemOptConfig) -> int:
        """About the fewest bytes that plans need if early updates do as much as they can: in the step without gradients."""
        plans = [(base, c.lives) for base in self._bases(config) for c in _some(base.candidates)]
        if config.offload != "none":
            usual = replace(config, optimizer_in_backward="never")
            each_way = [*self._allowed(card, usual)[0], *(each.frontier for each in self._at_rest(card, usual))]
            plans = [(each, each.least) for each in each_way if isinstance(each, JointFrontier)]
        without = {id(base.graph): _without_gradients(base.graph) for base, _ in plans}
        needed = (planner.of_one(without[id(base.graph)], ("", lives), Machine()).smallest_nbytes for base, lives in plans)
        return min(needed, default=0)

    def _bases(self, config: MemOptConfig) -> list[Frontier]:
        """The plans that recompute, of the step as it is and in tiles, as far as these options allow it. Of what the user did
        not allow, the step as it is was tried without tiles before.
        """
        plain = [] if config.tile != self.config.tile else [self._frontier]
        return plain + (self._in_tiles(config.solver_seconds) if config.tile != "off" else [])

    def _allowed(self, card: Card, config: MemOptConfig) -> tuple[list[Frontier], str]:
        """The plans that do more than recompute, as far as these options allow it; and why they update no parameters in
        backward although they may.
        """
        frontiers: list[Frontier] = []
        as_usual = ""
        tier = tier_of(self._source.device, config)
        for base in self._bases(config):
            if base.tiles and config.optimizer_in_backward != "always":
                frontiers.append(self._on(card, base))
            if config.optimizer_in_backward != "never":
                updating = self._early(config.solver_seconds, base.tiles)
                if isinstance(updating, str):
                    as_usual = updating
                else:
                    base = updating
                    frontiers.append(self._on(card, base))
            if tier and card.rates is not None and tier in card.rates.links:
                frontiers.append(self._joint(card, base, config, card.rates))
        return frontiers, as_usual

    def _fitting(self, card: Card, config: MemOptConfig, frontiers: list[Frontier]) -> tuple[list[Found], list[Frontier]]:
        """The plans of these frontiers that fit. Where none does, what rests is parked, too: with its frontiers."""
        found: list[Found] = []
        for frontier in frontiers:
            if isinstance(frontier, JointFrontier) and frontier.smallest_nbytes > card.usable_nbytes:
                continue  # a search would take all of its time
            with contextlib.suppress(InfeasibleError):
                found.append(self._found(card, frontier, frontier.plan(card.usable_nbytes), True))
        if found:
            return found, frontiers
        tries = self._at_rest(card, config)
        found = [each.found for each in tries if each.found is not None]
        return found, frontiers + [each.frontier for each in tries if each.frontier is not None]

    def _at_rest(self, card: Card, config: MemOptConfig) -> list[_Try]:
        """The plans that park what rests, and save tensors in the tier: those of the first way to run the step of which one
        fits, or of all ways.
        """
        tier, rates = tier_of(self._source.device, config), card.rates
        resting = self._resting
        if resting is None or not tier or rates is None or tier not in rates.links:
            return []
        tries: list[_Try] = []
        for base in self._bases(config):
            if config.optimizer_in_backward != "never":
                updating = self._early(config.solver_seconds, base.tiles)
                base = base if isinstance(updating, str) else updating
            timed, overlaps = card.timed(base.graph), not kind_of(self._source.device).is_host
            solve = partial(self._tried, card, base, config, rates)
            parking = Parking(timed, lambda _: resting.chunks, overlaps, solve)
            parked = parking.parked(resting.on_card(timed, tier, rates), config.tier_budget_nbytes(tier, 1 << 62))
            if parked.rests:
                tries += parking.within(parked, card.usable_nbytes)
            if any(each.fits for each in tries):
                break
        return tries

    def _tried(
        self, card: Card, base: Frontier, config: MemOptConfig, rates: MachineRates, parked: Parked, known: Plan | None
    ) -> _Try:
        """What a step with this parked takes. `base`: the plans of the step without. `known`: a plan for it; None: it is solved
        for, once for all cards on which the same is parked.
        """
        rests, usable = parked.rests, card.usable_nbytes
        frontier: Frontier
        if known is not None:
            try:
                one = planner.of_one(parked.graph, (known.solver, known.lives), _machine_on(card, self._graph, base))
            except LoweringError:  # it rebuilds from a weight that is elsewhere
                return _Try(parked)
            frontier = replace(one, rests=rests, tiles=base.tiles)
        else:
            places = [(state.what, state.parameter) for state in rests.parked_states]
            key = id(base), config, rests.ahead, frozenset(places), frozenset(each.unit for each in rests.units)
            if key not in self._parked:
                solved = self._solved(parked.graph, base.machine, config.solver_seconds)
                self._parked[key] = replace(solved, tiles=base.tiles)
            joint = self._joint(card, self._parked[key], config, rates, rests.tier_nbytes)
            frontier = replace(joint, graph=replace(joint.graph, copies=parked.graph.copies), rests=rests)
        nbytes = frontier.smallest_nbytes
        if nbytes > usable:
            return _Try(parked, frontier, nbytes=nbytes)
        found = self._found(card, frontier, frontier.plan(usable), True)
        return _Try(parked, frontier, True, found.seconds, nbytes, found)

    def _found(self, card: Card, frontier: Frontier, plan: Plan, fits: bool) -> Found:
        timed = card.timed(frontier.graph)
        alone = simulate(timed, plan.lives, rates=card.rates).predicted
        seconds = with_rest(replace(plan, predicted=alone), timed, frontier.rests).predicted.seconds
        if plan.tiles:
            seconds += self._step_of(plan.tiles).seconds(card) - card.timed(self._graph).step_seconds
        return Found(plan, fits, seconds + len(plan.updates) * _update_seconds(card, self._graph, frontier.graph))

    def _on(self, card: Card, frontier: Frontier) -> Frontier:
        """A frontier with the seconds of a card."""
        if card == self._first:
            return frontier
        timed = card.timed(frontier.graph)

        def priced(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
            kept: list[Candidate] = []
            for c in candidates:
                predicted = replace(c.predicted, extra_seconds=simulate(timed, c.lives).predicted.extra_seconds)
                if not kept or predicted.seconds < kept[-1].predicted.seconds:
                    kept.append(replace(c, predicted=predicted))
            return tuple(kept)

        return replace(
            frontier,
            graph=timed,
            candidates=priced(frontier.candidates),
            others=priced(frontier.others),
            machine=_machine_on(card, self._graph, frontier),
        )

    def _joint(
        self, card: Card, base: Frontier, config: MemOptConfig, rates: MachineRates, rests_nbytes: int = 0
    ) -> JointFrontier:
        """The frontier with plans that park, too. `rests_nbytes`: what rests takes of the tier in the step."""
        offloading = OfCard(self._source.device, config, rates)
        offloading.rests_nbytes = rests_nbytes
        key = id(base), config
        if key not in self._joined:
            if config is not self.config:
                base = replace(base, candidates=_some(base.candidates))
            self._joined[key] = JointFrontier.of(base, offloading, overhead=lambda _: 0.0)
        found = self._on(card, self._joined[key])
        assert isinstance(found, JointFrontier)
        return replace(found, offloading=offloading)

    @cached_property
    def _steps_in_tiles(self) -> list[InTiles]:
        """The step with its loss head in tiles, in each way in which it can be; if in none, `whole` says why."""
        if not are_worth_tiles(self._graph, max(unmodified_levels(self._graph))):
            return []
        is_asked, why = self.config.tile != "off", why_not() or _AS_IT_IS
        if self._source.tiled is not None and not why_not():
            try:
                return recorded_in_tiles(self._graph, self._recorded_in_tiles)
            except MemOptError as error:
                why = str(error)
        self.whole = why if is_asked else why_not()
        return []

    def _recorded_in_tiles(self, tiles: InTiles, *sizes: int) -> Graph:
        assert self._source.tiled is not None
        return self._source.tiled(*(sizes or self._sizes), tiles=tiles).graph

    def _step_of(self, tiles: Heads) -> InTiles:
        """The step with these tiles."""
        return next(step for step in self._steps_in_tiles if (step.head,) == tiles)

    def tiled_at_sizes(self, size: str, here: int, plain_at: Callable[[int], Graph]) -> StepFit | None:
        """The step in the tiles that need the fewest bytes, at any size; None if it is not allowed, or not known.
        `size`: the one that changes, which is `here`. `plain_at`: the step as it is.
        """
        steps = self._steps_in_tiles if self.config.tile != "off" else []
        if not steps:
            return None
        least = min(steps, key=lambda step: max(unmodified_levels(step.graph)))
        sizes = dict(zip(SIZES, self._sizes, strict=True))

        def tiled_at(n: int) -> Graph:
            tiles = InTiles(plain_at(n), least.whole)
            return self._recorded_in_tiles(tiles, *(sizes | {size: n}).values())

        fitted = at_sizes(here, tiled_at, least.graph)
        return None if isinstance(fitted, str) else fitted

    def _in_tiles(self, search_seconds: float) -> list[Frontier]:
        """The frontiers of these steps."""
        known = self._tiled.get(SEARCH_SECONDS) or self._tiled.get(search_seconds)
        if known is None:
            known = self._tiled[search_seconds] = [
                replace(self._solved(step.graph, Machine(), search_seconds), tiles=(step.head,))
                for step in self._steps_in_tiles
            ]
        return known

    def _early(self, search_seconds: float, tiles: Heads) -> Frontier | str:
        """The frontier of the step in which parameters are updated in backward; or why none can be."""
        known = self._updating.get((SEARCH_SECONDS, tiles)) or self._updating.get((search_seconds, tiles))
        if known is None:
            solved = self._solved_early(search_seconds, tiles)
            known = solved if isinstance(solved, str) else replace(solved, tiles=tiles)
            self._updating[search_seconds, tiles] = known
        return known

    def _solved_early(self, search_seconds: float, tiles: Heads) -> Frontier | str:
        if tiles not in self._early_steps:
            self._early_steps[tiles] = self._recorded_early(tiles)
        recorded = self._early_steps[tiles]
        if isinstance(recorded, str):
            return recorded
        graph = _in_blocks(recorded.graph)
        if not graph.updates:
            return recorded.as_usual or "No gradient is final before the update."
        seconds = 0.0 if self.always else _update_seconds(self._first, self._graph, graph)
        return self._solved(graph, Machine(update_seconds=seconds), search_seconds)

    def _solved(self, graph: Graph, machine: Machine, search_seconds: float) -> Frontier:
        """The plans for another way to run the step."""
        timed, budgets = self._first.timed(graph), self._budgets
        if search_seconds == _OTHER_SECONDS:  # for cards that nothing fits so far
            budgets = [nbytes for nbytes in budgets if nbytes < self._frontier.smallest_nbytes] or budgets[:1]
            least = planner.smallest(timed, machine)
            if least.least_budget_nbytes > budgets[-1]:
                return planner.of_one(timed, (least.solver, least.lives), machine)
        return planner.solve(
            timed,
            machine,
            search_seconds=search_seconds,
            limit_seconds=LIMIT_SECONDS,
            budgets=budgets,
            keep_nbytes=budgets[0],
        )

    def _recorded_early(self, tiles: Heads) -> Recorded | str:
        source = self._source
        if source.early is None:
            return _AS_IT_IS
        try:
            if tiles and source.tiled is not None:
                return source.tiled(*self._sizes, tiles=InTiles(self._graph, self._step_of(tiles).whole), early=True)
            return source.early(*self._sizes)
        except MemOptError as error:
            return str(error)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._source.batch or 1, self._source.length or 1


def _seconds(found: Found) -> float:
    return found.seconds


def _some(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """A few of the plans, from small to large."""
    return tuple(candidates[:: ceil_div(len(candidates), _STARTS)])


def _update_seconds(card: Card, usual: Graph, early: Graph) -> float:
    """Seconds that an early update takes longer than its share of a usual one: the kernels that it starts in addition."""
    if not early.updates:
        return 0.0
    more = (_kernels(early) - _kernels(usual)) / len(early.updates)
    return card.device.launch_seconds * max(1.0, more)


def _machine_on(card: Card, usual: Graph, frontier: Frontier) -> Machine:
    """The machine of these plans, with the seconds of a card."""
    machine = frontier.machine
    if not machine.update_seconds:
        return machine
    return replace(machine, update_seconds=_update_seconds(card, usual, frontier.graph))


def _kernels(graph: Graph) -> int:
    """Ops of updates that write memory."""
    return sum(op.phase == "update" and bool(op.outputs or op.mutates) for op in graph.ops)


def _in_blocks(graph: Graph) -> Graph:
    """The graph with the gradients of early updates in blocks of the device's allocator, as its tensors are."""
    blocks = kind_of(graph.device).allocated_nbytes

    def rounded(update: EarlyUpdate) -> EarlyUpdate:
        return replace(update, nbytes=blocks(update.nbytes), beside_nbytes=blocks(update.beside_nbytes))

    return replace(graph, updates=tuple(map(rounded, graph.updates)))


def _without_gradients(graph: Graph) -> Graph:
    """The step without gradients, and without what the update takes in addition."""
    updates = {op.at for op in graph.ops if op.phase == "update"}
    tensors = (replace(t, nbytes=0) if t.kind == "gradient" or t.born_at in updates else t for t in graph.tensors)
    ops = (replace(op, workspace_nbytes=0) if op.phase == "update" else op for op in graph.ops)
    return replace(graph, tensors=tuple(tensors), ops=tuple(ops), asked={})
