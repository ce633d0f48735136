"""What the ranks of a distributed run decide together, before the first update and when the first plan is made.

An infeasible budget of one rank is infeasible on all of them: a rank that raised alone would leave the others waiting in a
collective, after they had updated. So the ranks meet through the process group's store (ranks/):

    before the first forward    the bytes that are resident anyway
    before the first updates    a plan for the first step (foresight.py); whether the next plan is made after this step;
                                which parameters are updated in backward: those that all ranks can
    when the plan is made       what is chosen for the compiled regions (shared_regions.py), and what is known of the loss heads
                                (shared_heads.py), and so whether all observe again; ranks with the same graph share a plan
                                (shared_plan.py); else each makes its own, and all hear whether every budget is kept

Later plans are for batches that may come on one rank alone. There is no meeting then, and each rank decides by itself. A
rebuild runs no collective, and neither does a tile, so ranks may have different plans.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from lightning_memopt import logs
from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import InfeasibleError, RankFailedError, UpdatesInBackwardError
from lightning_memopt.graph import Graph
from lightning_memopt.logs import Say
from lightning_memopt.plan import Machine
from lightning_memopt.ranks import Ranks, joins, ranks_of
from lightning_memopt.session.parking.offloading import Offloading
from lightning_memopt.session.parts import Part
from lightning_memopt.session.ranks import shared_heads, shared_plan
from lightning_memopt.session.ranks.shared_heads import KnownHead
from lightning_memopt.session.regions import shared_regions
from lightning_memopt.session.regions.region_choice import Option
from lightning_memopt.session.regions.shared_regions import Shown
from lightning_memopt.session.solve import solving
from lightning_memopt.session.solve.foreseen import Foreseen
from lightning_memopt.session.solve.solving import Solved
from lightning_memopt.units import format_nbytes

_MORE_STEPS = 3
"""Number of steps after `profile_steps` from which on ranks no longer make their first plan together."""
_FORWARD_SECONDS, _UPDATE_SECONDS, _PLAN_SECONDS = 20.0, 120.0, 600.0
"""How long to wait for a rank that lives but does not come to a meeting. Its loop may do other things first."""
_NOTHING = contextlib.nullcontext()


class Agreement(Part):
    """The meetings of one session (see the module). Without other ranks, it does nothing. `enabled`: the session is.

    early: after a meeting before an update, names of the parameters that all ranks can update early; None where the step
        showed it on no rank, or there was no meeting.
    """

    def __init__(self, model: nn.Module, config: MemOptConfig, enabled: bool) -> None:
        self._model, self._config, self._enabled = model, config, enabled
        self._updates = self._last_again = 0
        self._all_plan = self._plans_now = self._step_ends = False
        self._compiles = self._any_compiles = self._again = False
        self._tiles = config.tile != "off"
        self._any_tiles = False
        self._open = self._begun = False
        self.early: frozenset[str] | None = None
        self._early: list[str] | None = None
        self._ranks: Ranks | None = ranks_of(model) if enabled else None

    @property
    def alone(self) -> bool:
        """Whether no other rank is known: it decides by itself."""
        return self._ranks is None

    @property
    def over(self) -> bool:
        """Whether there are other ranks, and there will be no more meetings."""
        return self._ranks is not None and self._begun and (not self._open or joins(self._model))

    def first_rank_says(self, say: Say | None) -> Say:
        """What tells the user a line: `say`, by default that of logs.py, on the first rank of the group. The others are silent,
        and so are all where the run is not verbose.
        """
        to_user = say or logs.say

        def say_once(line: str) -> None:
            if self._ranks is None or self._ranks.rank == 0:
                to_user(line)

        return say_once if self._config.verbose else logs.silent

    def first_forward(self) -> contextlib.AbstractContextManager[None]:
        """Around the check of the resident bytes before a forward: the first time, all ranks hear of an InfeasibleError."""
        if self._begun:
            return _NOTHING
        self._begin()
        return self._together("the first forward", _FORWARD_SECONDS)

    def _begin(self) -> None:
        """The first forward begins. A model whose wrapper was not given shows now that it has one."""
        self._begun = True
        if self._ranks is None and self._enabled:
            self._ranks = ranks_of(self._model)
        if self._ranks is not None:
            self._open = True
            self._ranks.begin()

    def update(self, plans: bool, early: Iterable[str] | None = None) -> contextlib.AbstractContextManager[None]:
        """Around the look ahead before an update. `plans`: this rank makes its first plan when this step is over, unless
        the step only shows which parameters can be updated early. `early`: their names; None where the step does not show it.

        Raises InfeasibleError or UpdatesInBackwardError on all ranks where it is raised inside of the context on any.
        """
        self._updates += 1
        self._plans_now = plans
        self._early, self.early = None if early is None else sorted(early), None
        if self._open and self._updates - self._last_again > self._config.profile_steps + _MORE_STEPS:
            self._settled()
        return self._together(f"update {self._updates}", _UPDATE_SECONDS) if self._open else _NOTHING

    @contextlib.contextmanager
    def _together(self, about: str, seconds: float) -> Iterator[None]:
        if not self._open or self._ranks is None or joins(self._model):
            yield
            return
        refusal: InfeasibleError | UpdatesInBackwardError | None = None
        try:
            yield
        except (InfeasibleError, UpdatesInBackwardError) as error:
            refusal = error
        own = {"plans": self._plans_now, "early": self._early, "compiles": self._compiles, "tiles": self._tiles}
        decision = own | _as_decision(refusal)
        decisions = self._ranks.meet(about, decision, seconds)
        if decisions is None:
            if self._updates:  # a rank that is late for its first forward still comes to the first update
                self._alone(about)
            if refusal is not None:
                raise refusal
            return
        _raise_late(decisions, self._ranks, refusal)
        _raise_infeasible(decisions, self._ranks, refusal)
        early = [decision["early"] for decision in decisions]
        if any(names is not None for names in early):
            self.early = frozenset.intersection(*(frozenset(names or ()) for names in early))
        self._all_plan = all(decision["plans"] for decision in decisions) and not self.early
        self._any_compiles = any(decision["compiles"] for decision in decisions)
        self._any_tiles = any(decision["tiles"] for decision in decisions)

    def _alone(self, about: str) -> None:
        assert self._ranks is not None
        self._settled()
        self._ranks.alone()
        warnings.warn(
            f"MemOpt: rank {self._ranks.name} decides by itself: another rank did not come to {about}. Open the run on every "
            "rank, so that a budget that one rank cannot keep ends all of them.",
            stacklevel=4,
        )

    # -- the plan ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Around the end of an observed step. Where all ranks plan now, a rank that made no plan says so to the others."""
        self._step_ends = True
        try:
            yield
        finally:
            self._step_ends = False
        if self._ranks is None or not self._open:
            return
        if self._again:
            self._again = self._all_plan = False
            self._last_again = self._updates
        if self._all_plan:
            if self._any_compiles:
                self._ranks.tell(self._regions, {})
            if self._any_tiles:
                self._ranks.tell(self._heads, {})
            self._ranks.tell("the plan", shared_plan.NOTHING)
            self._ranks.tell("the plans of all ranks", {})
            self._settled()

    def plan_for(
        self,
        graph: Graph,
        limit_nbytes: int | None,
        offloading: Offloading,
        say: Say,
        machine: Machine,
        foreseen: Foreseen | None = None,
    ) -> Solved:
        """As `solving.plan_for`. Where all ranks make their first plan now, they make it together.

        Raises InfeasibleError where a rank's plan is infeasible and `on_exceed` is "raise".
        """
        if self._ranks is None or not (self._open and self._all_plan and self._step_ends):
            return solving.plan_for(graph, limit_nbytes, offloading, say, machine, foreseen)
        ranks, self._all_plan = self._ranks, False
        try:
            asked = graph, limit_nbytes, offloading, say, machine
            shared = shared_plan.plan_of_first_rank(ranks, *asked, _PLAN_SECONDS, foreseen)
            if shared is not None:
                return shared
            return self._each_alone(ranks, lambda: solving.plan_for(*asked, foreseen))
        finally:
            self._settled()

    def _each_alone(self, ranks: Ranks, solve: Callable[[], Solved]) -> Solved:
        """This rank's own plan, when all ranks have theirs. Raises InfeasibleError where any of them raised it."""
        refusal: InfeasibleError | None = None
        own: Solved | None = None
        try:
            own = solve()
        except InfeasibleError as error:
            refusal = error
        decisions = ranks.meet("the plans of all ranks", _as_decision(refusal), _PLAN_SECONDS)
        if decisions is not None:
            _raise_infeasible(decisions, ranks, refusal)
        if own is None:
            assert refusal is not None
            raise refusal
        return own

    def _settled(self) -> None:
        """There will be no more meetings."""
        self._open = self._all_plan = False

    # -- compiled regions --------------------------------------------------------------------------

    def compiles(self) -> None:
        """This rank runs compiled regions: before the ranks make their first plan, they meet about these."""
        self._compiles = True

    @property
    def _regions(self) -> str:
        return f"the compiled regions of step {self._updates}"

    def seen(self, shown: Shown) -> Shown | None:
        """What all ranks saw of their regions in an observed step, if this one saw `shown`; None where they do not meet now."""
        if self._ranks is None:
            return shown
        if not (self._any_compiles and self._meets_now):
            return None
        self._any_compiles = False
        posts = self._posts(self._regions, shown.fields())
        return None if posts is None else shared_regions.together(posts)

    @property
    def _meets_now(self) -> bool:
        """Whether all ranks meet now, at the end of the observed step after which they plan."""
        return self._open and self._all_plan and self._step_ends

    def _posts(self, about: str, own: dict[str, Any]) -> list[dict[str, Any]] | None:
        """What all ranks post about this before they plan; None if they did not meet."""
        assert self._ranks is not None
        posts = self._ranks.meet(about, own, _PLAN_SECONDS)
        if posts is None:
            self._alone(about)
        return posts

    def options(self, choose: Callable[[], list[Option | None] | None], seconds: float) -> list[Option | None] | None:
        """The options that the first rank chooses after the ranks met (`seen`); None where what is compiled is to stay.
        `seconds`: the longest time that solving takes.
        """
        if self._ranks is None:
            return choose()
        about = f"the plans of {self._regions}"
        if self._ranks.rank == 0:
            chosen = choose()
            self._ranks.tell(about, shared_regions.post_of(chosen))
            return chosen
        post = self._ranks.hear(about, 0, _PLAN_SECONDS + seconds)
        if post is None:
            self._alone(about)
            return None
        return shared_regions.options_of(post)

    # -- loss heads in tiles -----------------------------------------------------------------------

    @property
    def _heads(self) -> str:
        return f"the loss heads of step {self._updates}"

    def known_heads(self, known: KnownHead) -> KnownHead | None:
        """What all ranks know of their loss heads after an observed step, if this one knows `known`; None where this rank
        decides by itself: the ranks do not meet now, or do not do the same.
        """
        if self._ranks is None:
            return known
        if not (self._any_tiles and self._meets_now):
            return None
        self._any_tiles = False
        posts = self._posts(self._heads, known.fields())
        return None if posts is None else shared_heads.together(posts, self._ranks.rank, self._ranks.names)

    def observes_again(self) -> None:
        """After the ranks met (`seen`, `known`), all of them observe a step again before they plan."""
        self._again = True

    # -- the end -----------------------------------------------------------------------------------

    def ended_by(self, error: BaseException) -> RankFailedError | None:
        """The run ends with an error of this rank: see `Ranks.ended_by`."""
        return self._ranks.ended_by(error) if self._ranks is not None else None

    def close(self) -> None:
        """The run is over. The last rank that leaves clears the store of what all have posted."""
        self._open = False
        if self._ranks is not None:
            self._ranks.leave()


def _as_decision(refusal: InfeasibleError | UpdatesInBackwardError | None) -> dict[str, Any]:
    if refusal is None:
        return {}
    if isinstance(refusal, UpdatesInBackwardError):
        return {"late": str(refusal)}
    return {"refused": str(refusal), "smallest_nbytes": refusal.smallest_nbytes, "budget_nbytes": refusal.budget_nbytes}


def _raise_late(decisions: list[dict[str, Any]], ranks: Ranks, own: BaseException | None) -> None:
    """Raise UpdatesInBackwardError where it was raised on any rank."""
    for rank, decision in enumerate(decisions):
        if "late" in decision:
            raise UpdatesInBackwardError(
                f"Updates in backward are refused on a rank, and so on all. Check rank {ranks.names[rank]}: {decision['late']}"
            ) from own


def _raise_infeasible(decisions: list[dict[str, Any]], ranks: Ranks, own: BaseException | None) -> None:
    """Raise InfeasibleError where any rank's budget is infeasible, naming the ranks and the budget that is enough for all."""
    refused = {rank: decision for rank, decision in enumerate(decisions) if "refused" in decision}
    if not refused:
        return
    sizes = [decision["smallest_nbytes"] for decision in refused.values()]
    enough = max(sizes) if all(nbytes is not None for nbytes in sizes) else None
    which = ", ".join(str(ranks.names[rank]) for rank in refused)
    first = next(iter(refused.values()))
    raise InfeasibleError(
        f"The budget is infeasible on rank {which} of {ranks.size}, so no rank updated anything. Raise the budget on every rank"
        f"{f' to {enough} bytes ({format_nbytes(enough)}) or more' if enough is not None else ''}. "
        f"Rank {ranks.names[next(iter(refused))]} says: {first['refused']}",
        smallest_nbytes=enough,
        budget_nbytes=first["budget_nbytes"],
        ranks=tuple(ranks.names[rank] for rank in refused),
    ) from own
