"""The compiled regions of a session's model: when they are read, and when they are compiled again.

A compiled region is one stage of a step, with plans to choose from (region_choice.py). The step is observed as it was compiled.
Where it is above the budget, regions get cheaper plans until a model of the step says that it fits. These regions are compiled
again, and the step is observed again. So a plan is put in force for a step that was measured with the code that will run.

With dynamic shapes the same code serves batches of many shapes. Then a shape may only lower what the code takes, because others
count on it. When code is compiled again, all other shapes are observed again.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from torch import nn

from lightning_memopt.compiled import Region, Regions, compiles
from lightning_memopt.config import MemOptConfig
from lightning_memopt.graph import COMPILED, Graph
from lightning_memopt.plan import Machine, RegionPlan, regions_text
from lightning_memopt.record import compiled_modules
from lightning_memopt.record.gathered import units_of
from lightning_memopt.session.measure.peak_meter import in_compiled_code
from lightning_memopt.session.parts import Part
from lightning_memopt.session.regions import shared_regions
from lightning_memopt.session.regions.kernel_order import KernelOrder
from lightning_memopt.session.regions.region_choice import Choice, Option, Stage, modelled, plans_of_eager_code
from lightning_memopt.session.regions.remembered import Remembered
from lightning_memopt.session.regions.shared_regions import Shown
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.session.solve.solving import Solved
from lightning_memopt.solvers import planner
from lightning_memopt.torch_private import compiled_codes, inlining_code
from lightning_memopt.units import format_nbytes

_DISCARDED = 10
"""Maximum number of observed steps that are discarded because code was compiled in them: some steps always compile."""
_REMEMBERED = 64
"""Maximum number of signatures whose regions are known."""
_NOTHING = contextlib.nullcontext()
_SHARDED = "its weights are sharded over several processes"


@dataclass(eq=False)
class _Step:
    """The regions of one input signature's step.

    stages: id of a region -> the region with its options.
    choice: chooses among them.
    splits: how many graphs had been split when its last observed step was over.
    discarded: how many observed steps were discarded because code was compiled in them.
    """

    stages: dict[int, Stage] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    splits: int = 0
    discarded: int = 0


class Meetings(Protocol):
    """Where ranks that train together agree about their regions (`ranks/agreement.py` says what each does)."""

    @property
    def alone(self) -> bool: ...
    @property
    def over(self) -> bool: ...
    def compiles(self) -> None: ...
    def seen(self, shown: Shown) -> Shown | None: ...
    def options(self, choose: Callable[[], list[Option | None] | None], seconds: float) -> list[Option | None] | None: ...
    def observes_again(self) -> None: ...


class CompiledRegions(Part):
    """The compiled regions of a session's model.

    changed: whether regions were given other options after the last observed step.
    report: what is planned in the compiled code of this model, or a warning; None where there is no such code.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MemOptConfig,
        budget_nbytes: int | None,
        enabled: bool,
        agreement: Meetings,
        given: tuple[RegionPlan, ...] = (),
    ) -> None:
        """`given`: the regions of a plan that the user gave. They are compiled as it says."""
        sharded = not agreement.alone and bool(units_of(model))
        self._enabled, self._agreement = enabled and config.recompute and not sharded, agreement
        self._model = weakref.ref(model)
        self._begun = False
        self._seconds = config.solver_seconds
        self._remembered = Remembered(budget_nbytes, config, agreement.alone, given)
        self._regions = Regions(self._remembered.recall)
        self._order = KernelOrder()
        self._stages: dict[int, Stage] = {}
        self._steps: dict[object, _Step] = {}
        self._now = _Step()
        self._said_recalled = False
        self._unshared = _SHARDED if sharded else ""  # why ranks that train together leave their regions as they are
        self.changed = False
        self.report: str | None = None

    @property
    def enabled(self) -> bool:
        """Whether they may be planned."""
        return self._enabled

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward: regions that are compiled are read, and split by their plans."""
        if self._enabled and compiles():
            return self._listening()
        self._begun = True  # nothing was compiled in this process
        return _NOTHING

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if not self._begun and not in_compiled_code():  # what runs now cannot be compiled again now
            self._begun = True
            if self._was_compiled():
                self._regions.forget_all()
        try:
            with self._regions.listening(self._order):
                yield
        finally:
            self._take_seen()
            if self._now.stages and not self._now.choice.measured:
                self._count_calls(self.stages_of_step())
            if self._regions.splits:
                self._agreement.compiles()

    def _count_calls(self, stages: list[Stage]) -> None:
        """Layers that are compiled one by one share regions: these are called for each module with their code. Where more code
        ran than that, in the last forward, layers are called several times.
        """
        model = self._model()
        modules = Counter(_forward_code(module) for module in model.modules()) if model is not None else Counter()
        regions = Counter(code for stage in stages for code in stage.region.codes)
        for stage in stages:
            stage.calls = max([1.0, *(modules[code] / regions[code] for code in stage.region.codes)])
        times = self._regions.runs / max(1, sum(stage.calls for stage in stages))
        for stage in stages:
            stage.calls *= max(1, times)

    def _was_compiled(self) -> bool:
        """Whether the model ran compiled before the session: its regions were split without a plan then."""
        model, codes = self._model(), compiled_codes() if compiles() else []
        if model is None or not codes:
            return False
        return bool(compiled_modules(model)) or any(c in codes for c in {inlining_code(), *map(_forward_code, model.modules())})

    def forward_begins(self, signature: object) -> None:
        self._now = self._steps.get(signature) or _Step(choice=Choice(signature), splits=self._regions.splits)

    def _keep(self) -> None:
        """Remember the step of this signature. A run with many shapes has many signatures."""
        self._steps[self._now.choice.signature] = self._now
        if len(self._steps) > _REMEMBERED:
            del self._steps[next(iter(self._steps))]

    def _take_seen(self) -> None:
        """The regions that this forward has split are stages of its step."""
        while self._regions.seen:
            region = self._regions.seen.pop(0)
            self._keep()
            self._add(region)

    def _add(self, region: Region) -> None:
        """The region is a stage of the current step."""
        if id(region) not in self._stages:
            self._stages[id(region)] = stage = Stage(region, self._seconds)
            if region.lives is not None:
                stage.option, stage.recalled = self._remembered.recalled[self._keys()[id(region)]], True
        self._now.stages[id(region)] = self._stages[id(region)]

    def stages_of_step(self) -> list[Stage]:
        """The stages of the current step, as they are compiled now."""
        for region in self._regions.by_key.values():
            if region.dynamic and region.codes and id(region) not in self._now.stages:
                self._add(region)  # compiled when a batch of another shape ran
        keys = self._keys()
        stages = [stage for stage in self._now.stages.values() if not stage.region.forgotten]
        return sorted(stages, key=lambda stage: keys[id(stage.region)])  # an order that all ranks share

    def _keys(self) -> dict[int, str]:
        return {id(region): key for key, region in self._regions.by_key.items()}

    def plan_in_force(self, model: nn.Module) -> None:
        """A plan is in force: tell of the regions, and warn once about compiled modules that no plan can reach."""
        said = self._said
        if said is not None:
            self.report = said
            return
        compiled = compiled_modules(model)
        inside_wrapper = self.enabled and bool(self.opaque)  # the wrapper is not a module of the model
        if self.report is not None or not (compiled or inside_wrapper):
            return
        if model in compiled or not compiled:
            part, fix = "this model", "Train it without torch.compile, or compile some of its layers only"
        else:
            names = {id(m): name for name, m in model.named_modules()}
            named = [names[id(m)] for m in compiled[:3]]
            part = ", ".join([*named, "..."] if len(compiled) > 3 else named)
            fix = "Leave those layers eager where their memory is to be lowered"
        if self.opaque:
            part += f": {self.opaque}"
        elif self.enabled:
            fix += ", or compile with the backend 'inductor'"
        self.report = f"nothing can be rebuilt inside of compiled code ({part}): the plan leaves its memory as it is. {fix}."
        warnings.warn(f"MemOpt: {self.report}", stacklevel=2)

    @property
    def _said(self) -> str | None:
        """What became of the regions, for the report; None where none could be planned."""
        stages = [stage for stage in self._stages.values() if not stage.region.forgotten]
        if not stages:
            return None
        text = regions_text([self._planned(stage) for stage in stages]) + self._order.said
        return text if not self.opaque else f"{text}; not planned: {self.opaque}"

    def _planned(self, stage: Stage) -> RegionPlan:
        """What is decided for a region now."""
        option, halves = stage.option, stage.region.unplanned if stage.option is None else stage.option.halves
        return RegionPlan(
            key=self._keys()[id(stage.region)],
            lives=None if option is None else option.lives,
            calls=stage.calls,
            flops=sum(op.flops for op in stage.region.graph.ops),
            extra_flops=0 if option is None else option.extra_flops,
            rebuilt_ops=0 if option is None else option.rebuilt_ops,
            saved_nbytes=0 if halves is None else halves.saved_nbytes,
            peak_nbytes=0 if halves is None else halves.peak_nbytes,
        )

    def in_plans(self, solved: Solved) -> Solved:
        """What was decided for the regions of the step is a part of the plans for it: they were solved for that step."""
        regions = tuple(map(self._planned, self.stages_of_step()))
        if not regions:
            return solved
        frontier, plan = replace(solved.frontier, regions=regions), replace(solved.plan, regions=regions)
        return solved._replace(frontier=frontier, plan=plan)

    @property
    def opaque(self) -> str:
        """Why regions could not be planned; empty where all could."""
        return "; ".join([*([self._unshared] if self._unshared else []), *self._regions.opaque])

    def savable_nbytes(self, surely: bool) -> int:
        """Bytes by which another way to compile the regions could lower the peak: as modelled (`surely`), or at most."""
        if self._agreement.over:
            return 0  # ranks do not choose any more
        stages = self.stages_of_step()
        if any(stage.recalled for stage in stages):
            return sys.maxsize  # the budget was kept in an earlier run
        return self._now.choice.savable_nbytes(stages, surely)

    def compiled_again(self, graph: Graph, limit_nbytes: int | None, say: Callable[[str], None], machine: Machine) -> bool:
        """After an observed step: whether it is to be observed again, because regions were given other options, or because
        code was compiled in it, which takes memory of its own. Where ranks train together, they all get the same answer.
        """
        step, stages = self._now, self.stages_of_step()
        self.changed = False
        own = self._shown(graph, limit_nbytes, stages, machine)
        step.splits = self._regions.splits
        seen = self._agreement.seen(own)
        shown = own if seen is None else seen
        if shown.compiled and shown.discarded < _DISCARDED:
            step.discarded, again = shown.discarded + 1, True
            gc.collect()  # compilers leave cycles with tensors of the batch, which would count in all steps to come
            self._keep()
        else:
            shared = seen is not None and shown.alike
            again = shared and bool(stages) and self._recompiled(shown, stages, say)
            if shown.too_large and not shared and (stages or not shown.alike):
                self._leave(shared_regions.APART if shown.alike else shared_regions.DIFFER, say)
        if again and seen is not None:
            self._agreement.observes_again()
        return again

    def _leave(self, why: str, say: Callable[[str], None]) -> None:
        """The step is too large, and ranks that train together leave their regions as they are."""
        final = why == shared_regions.DIFFER or self._agreement.over  # else they may still meet
        if final and why != self._unshared:
            say(f"MemOpt: compiled regions stay as they are, because {why}")
        self._unshared = why

    def _shown(self, graph: Graph, limit_nbytes: int | None, stages: list[Stage], machine: Machine) -> Shown:
        """What this rank saw of its regions in an observed step."""
        step = self._now
        if step.splits != self._regions.splits and step.discarded < _DISCARDED:
            return Shown(True, step.discarded)
        keys = self._keys()
        peak = unmodified_peak(graph, machine) if stages else 0
        too_large = limit_nbytes is not None and peak > limit_nbytes
        frontier = planner.solve(graph, machine, limit_seconds=self._seconds) if too_large else None
        return Shown(
            compiled=False,
            discarded=step.discarded,
            keys=tuple(keys[id(s.region)] for s in stages),
            peak_nbytes=peak,
            least_nbytes=peak if frontier is None else frontier.smallest_nbytes,
            limit_nbytes=limit_nbytes,
            eager=() if frontier is None else plans_of_eager_code(frontier, peak),
            flop_seconds=_flop_seconds(graph, stages),
        )

    def _recompiled(self, shown: Shown, stages: list[Stage], say: Callable[[str], None]) -> bool:
        """Whether regions are compiled again, with other options, because of a step that was observed."""
        self._keep()
        self._unshared = ""
        choice, limit = self._now.choice, shown.limit_nbytes
        fits = limit is None or shown.least_nbytes <= limit
        recalled = sum(stage.recalled for stage in stages)
        if recalled:
            said = "have plans of an earlier run" if fits else "do not keep the budget by the plans of an earlier run"
            if not fits or not self._said_recalled:
                say(f"MemOpt: {recalled} of {len(stages)} compiled regions {said}")
            self._said_recalled = True
            if not fits:
                self._compile(stages, [None] * len(stages))
            return not fits
        choice.was_measured(stages, shown.peak_nbytes, shown.least_nbytes, limit, shown.eager, shown.flop_seconds)
        options = self._agreement.options(partial(choice.options, stages, limit), self._seconds * len(stages))
        changed = 0 if options is None else self._compile(stages, options)
        if not changed:
            if fits and choice.tries:
                self._remember(stages)
            return False
        ops = sum(stage.option.rebuilt_ops for stage in stages if stage.option is not None)
        expected = format_nbytes(int(choice.expected(modelled([s.halves for s in stages]))))
        choice.tries += 1
        say(
            f"MemOpt: compiling {changed} of {len(stages)} compiled regions again, to run {ops} ops again: the step took "
            f"{format_nbytes(shown.peak_nbytes)}, {expected} are expected"
        )
        return True

    def _compile(self, stages: Sequence[Stage], options: Sequence[Option | None]) -> int:
        """Compile regions whose options change again. Returns how many these are."""
        changed = [(s, o) for s, o in zip(stages, options, strict=True) if s.option != o]
        for stage, option in changed:
            stage.compile_with(option)
        self._regions.forget([stage.region for stage, _ in changed])
        self.changed = bool(changed)
        return len(changed)

    def _remember(self, stages: Sequence[Stage]) -> None:
        keys = self._keys()
        for stage in stages:
            if stage.option is not None:
                self._remembered.keep(keys[id(stage.region)], stage.option)

    def close(self) -> None:
        """The run is over: the regions are as their user compiles them, when they run next."""
        if not in_compiled_code():
            self._regions.forget(region for region in self._regions.by_key.values() if region.lives is not None)


def _flop_seconds(graph: Graph, stages: Sequence[Stage]) -> float:
    """The time that a FLOP of the regions took in an observed step; 0 where they have none."""
    seconds = sum(op.seconds for op in graph.ops if op.name == COMPILED)
    flops = sum(stage.calls * op.flops for stage in stages for op in stage.region.graph.ops)
    return seconds / flops if flops else 0.0


def _forward_code(module: nn.Module) -> object:
    return getattr(type(module).forward, "__code__", None)
