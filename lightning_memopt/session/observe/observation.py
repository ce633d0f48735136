"""Observe one step: a recorder, a tracer and an engine without a plan around a real forward, backward and update."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
from torch import nn

from lightning_memopt.device.places import is_on, on_host
from lightning_memopt.graph import CALL, Graph, Op
from lightning_memopt.native import counter_of
from lightning_memopt.native.counting import ALL, PLAIN
from lightning_memopt.native.engine import loaded, maker
from lightning_memopt.record import (
    Recorder,
    around_compiled,
    around_dual_levels,
    before_backwards,
    storage_id,
    uncompiled,
    watching_sizes,
)
from lightning_memopt.record.gathered import around_units, units_of
from lightning_memopt.record.leaving import told_of_leaving
from lightning_memopt.runtime import ObservingEngine, let_go, step_ended
from lightning_memopt.runtime.engine.surplus import Bound
from lightning_memopt.runtime.engine.units import Units
from lightning_memopt.runtime.parked_gradients import whose_gradients_are_parked
from lightning_memopt.session.forward.gathering import Watched, observed_code
from lightning_memopt.session.forward.recording import Recording, hooks_allowed
from lightning_memopt.session.observe.accumulated import Accumulated, Kept
from lightning_memopt.session.observe.final_gradients import NEVER, Final, freed_early, kept, settled, with_updates
from lightning_memopt.session.observe.resident import away_nbytes, away_state, resident_tensors
from lightning_memopt.torch_private import OpOverload, current_mode, gradient_of, local_tensor, sharded_parameters
from lightning_memopt.trace import (
    AllocatorEvents,
    InPlace,
    Ledger,
    Rest,
    Scopes,
    Tracer,
    adopt_all,
    metered_cpu,
    unrecorded_op,
)
from lightning_memopt.trace.seen import gone

_FIELDS = [field.name for field in dataclasses.fields(Op)]
_values_of = attrgetter(*_FIELDS)
_WORKSPACE, _RECOMPUTABLE = map(_FIELDS.index, ("workspace_nbytes", "recomputable"))
_ROOM = 4
"""Tensors, of the largest size so far, for which an observed step leaves room below its limit."""


class Observation:
    """One observed step. Call `begin_round` at every forward, then `update_begins`; `finish` gives the graph of the last round.

    Many methods: sessions, early updates and fronts tell it of each event of a step by a method of its own.

    The dispatch mode stays entered from the first forward to `finish`, because backward and the update are observed too.

    limit_nbytes: live bytes above which saved tensors are evicted; None: nothing is evicted.
    verify: rebuilt tensors are compared with the originals.
    meter: the workspaces of ops are measured.
    fixed: ids of the forward ops that no rebuild may run, because their inputs are updated early.
    opaque_ops: names of ops that gave other bits when they ran again. This step adds those that it sees.
    overwritten: identities of the storages that ops wrote to, outside of updates. This step adds those that it sees.
    recompute: ops may run again. Otherwise nothing is evicted or verified, and no op of the graph is recomputable.
    one_of_many: the observed forward is one of many whose graphs are held; none has early updates.
    gradients: is told of those that cannot be parked. The graph names the others (`Graph.gradients`), unless this is None.
    park_more: called where the device has no memory for an op and nothing is left to evict. Returns the bytes of weights that
        have left the device.
    finals: where gradients became final; tensors are storage versions of the tape.
    copies: the points at which DistributedDataParallel copied reduced gradients back.
    events: the allocator's events in this round; None where it is not metered.
    peak_nbytes: the most live bytes at a check against the limit.
    evicted: tensors of a forward that is over were evicted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        limit_nbytes: int | None,
        verify: bool,
        meter: bool,
        fixed: frozenset[int] = frozenset(),
        opaque_ops: dict[str, str] | None = None,
        recompute: bool = True,
        one_of_many: bool = False,
        overwritten: set[int] | None = None,
        gradients: Kept | None = None,
        park_more: Callable[[], int] = int,
    ) -> None:
        self.model, self.optimizers, self.device = model, optimizers, device
        self.limit_nbytes, self.verify, self.meter = limit_nbytes, verify, meter
        self.fixed, self.finals, self.recompute = fixed, list[Final](), recompute
        self.one_of_many, self._rest = one_of_many, contextlib.ExitStack()
        self.gradients, self.evicted = gradients, False
        self.park_more = park_more
        self._accumulated: Accumulated | None = None
        self.copies = range(0)
        self._weights: dict[int, torch.Tensor] | None = None  # of this round: id of a sharded parameter -> its gathered weight
        self.scopes = Scopes(model)
        self.events: AllocatorEvents | None = None
        self.peak_nbytes = 0
        self.opaque_ops: dict[str, str] = {} if opaque_ops is None else opaque_ops
        self.overwritten: set[int] = set() if overwritten is None else overwritten
        self._lost: set[int] = set()
        self._away_nbytes = 0  # of what is in a tier, and the graph has nevertheless
        self._unverified: set[str] = set()
        self._engines: list[weakref.ref[ObservingEngine]] = []
        self._round: tuple[Tracer, ObservingEngine, Recorder] | None = None
        self._aside: Recorder | None = None
        self._goes_on = self._backward_begun = False  # kinds of backwards that were seen to begin after the forward
        self._ungraded: list[tuple[nn.Parameter, int]] = []
        self._counter, self._native = counter_of(device), loaded()
        self._contexts = contextlib.ExitStack()
        self._metering = contextlib.ExitStack()

    def begin_round(self, batch: Any, may_meter: bool = True) -> Recording:
        """A forward begins, with a new tape and tracer. Returns the contexts to enter around it. `may_meter`: no other meter
        is running.
        """
        self._backward_is_over()
        self._contexts.close()
        self._metering.close()
        self._end_round()
        tracer = Tracer(self.device, self.scopes.current)
        evicts = self.recompute and self.limit_nbytes is not None
        bound = Bound(self._live_nbytes, self._unrebuilt_nbytes, self.limit_nbytes)
        engine = ObservingEngine(tracer, self._pressure if evicts else None, self.verify and self.recompute, bound)
        recorder = Recorder(engine.tape, engine, tracer)
        engine.exhausted = self._exhausted
        engine.on_rebuilt = lambda version: recorder.recognise(version, version.holding.value)
        recorder.fixed = self.fixed
        recorder.writes = self._writes
        in_place = InPlace()

        def runs(func: OpOverload, args: tuple[Any, ...]) -> OpOverload:
            engine.keep_to_bound()  # backward lets go of tensors at every op
            if engine.evictable:
                engine.relieve()  # another model may run between the forward and its backward
            tiled = recorder.tiles is not None and recorder.tiles.works  # a mode is on in later steps, too
            return in_place.op(func, args) if func._name in in_place.names and not tiled else func

        recorder.runs = runs
        engine.starts.lost = self._lost
        self._engines = [*(ref for ref in self._engines if ref() is not None), weakref.ref(engine)]
        self.finals, self.copies, self._weights = [], range(0), None
        counts = self._counter
        if counts is not None:
            tracer.counter = counts
            recorder.hidden = engine.hidden = counts.hidden
        if counts is not None and self.meter:
            tracer.ledger = Ledger(counts)
        if self.one_of_many and tracer.ledger is not None:
            rest = Rest(tracer)
            tracer.passes = rest.takes
            self._rest.callback(rest.end)
        weights, states = away_nbytes(self.model, bool(self.gradients)), sum(away_state(self.optimizers))
        adopt_all(tracer, recorder, resident_tensors(self.model, self.optimizers, batch), weights + states)
        self._away_nbytes = weights + (0 if counts is not None else states)  # the counter does not count empty storages
        units = units_of(self.model)
        self._round = tracer, engine, recorder
        goes = whose_gradients_are_parked() if self.gradients else ()
        ungraded = (p for p in self.model.parameters() if p.requires_grad and gradient_of(p) is None and id(p) not in goes)
        self._ungraded = [(p, local_tensor(p).nbytes) for p in ungraded if is_on(self.device, p.device)]
        engine.opaque_ops = self.opaque_ops
        self._metering = contextlib.ExitStack()
        self.events = None
        if self.meter and may_meter and on_host(self.device):
            self.events = self._metering.enter_context(metered_cpu())
            if self.events.available:
                tracer.marks = self.events.marks
        self._contexts = contextlib.ExitStack()
        self._contexts.callback(in_place.close)
        self._goes_on = self._backward_begun = False
        self._contexts.enter_context(before_backwards(self._backward_begins))
        self._contexts.enter_context(self.scopes.tracking(lambda: None if tracer.forward_over else len(tracer.ops)))
        sizes, resized = watching_sizes(recorder.resizing, recorder.resized)
        self._contexts.enter_context(sizes.listening(resized))
        recorder.enter_in(self._contexts, beneath=True)
        self._contexts.enter_context(around_compiled(lambda: observed_code(recorder, tracer, engine)))
        if units:
            engine.units = Units()
            recorder.meets = engine.meets
            watched = Watched(recorder, tracer, engine.units)
            watched.begins(units)
            self._contexts.enter_context(around_units(watched))
        if self.gradients and tracer.ledger is not None:
            self._contexts.enter_context(told_of_leaving(partial(_leaves, recorder, tracer, tracer.ledger)))
        if self.gradients is not None:
            self._accumulated = Accumulated(self.model, tracer, recorder, self._contexts, self.gradients)
        self._contexts.callback(self._level_ends)
        levels, told = around_dual_levels(self._level_begins, self._level_ends)
        self._contexts.enter_context(levels.listening(told))
        return Recording(engine, recorder, own_mode=False)

    def goes_on(self) -> Recording | None:
        """The model is called again. Returns the contexts to enter around the call, where it is a part of the observed forward:
        autograd holds what that saved, and no backward has run since. None: the call begins a forward.
        """
        if self._round is None or self._backward_begun or self._round[0].phase == "update" or not self.is_held:
            return None
        tracer, engine, recorder = self._round
        if recorder.thread != get_ident():
            return None
        tracer.forward_goes_on()
        with unrecorded_op(tracer, CALL):
            made = recorder.goes_on(engine.written_over)
        engine.written_over.clear()
        tracer.call_begins(made)
        return Recording(engine, recorder, own_mode=False)

    @uncompiled
    def _backward_begins(self, goes_on: bool) -> None:
        """A backward is about to run, of this model or of another one. `goes_on`: it is part of the forward."""
        if self._round is not None and self._round[0].forward_over:
            self._goes_on, self._backward_begun = goes_on, self._backward_begun or not goes_on

    def _level_begins(self) -> None:
        """A level of forward-mode AD begins: its ops run unobserved (record/levels.py)."""
        if self._round is not None and hooks_allowed() and current_mode() is self._round[2]:
            self._round[2].leave()
            self._aside = self._round[2]

    def _level_ends(self) -> None:
        recorder, self._aside = self._aside, None
        if recorder is not None:
            recorder.enter()

    @property
    def has_backward(self) -> bool:
        """Whether a backward of the last forward was seen, and none raised: a plan of its part would let go of what the
        rest asks for. Any backward counts where that forward saved nothing.
        """
        if self._round is None or self._round[0].backwards.failed or (self._goes_on and not self._backward_begun):
            return False
        tracer, engine, _ = self._round
        return tracer.asked or (tracer.backward_ran and not engine.packs)

    @property
    def is_held(self) -> bool:
        """Whether autograd still holds tensors of the last forward: it has had no backward, or its graph is retained."""
        if self._round is None:
            return False
        return any(version.holding.handles for version in reversed(list(self._round[1].tape.versions.values())))

    @property
    def metered(self) -> bool:
        """Whether the step is metered by a profiler since its last forward began."""
        return self.events is not None and self.events.profiled

    def forward_ended(self) -> None:
        if self._round is not None:
            self._round[0].forward_over = True

    def _backward_is_over(self) -> None:
        self._rest.close()  # while the meter runs
        if self._round is not None:
            self._round[0].passes = None

    def stop_metering(self) -> None:
        """Stop measuring workspaces: before an optimizer's step with forward and backward inside, which are metered anew, and
        before the graph is read in the middle of a step. The workspaces of later ops are not known then.
        """
        self._backward_is_over()
        self._metering.close()
        if self._round is not None:
            self._round[0].marks = None  # marks would read a profile that is closed

    @property
    def written(self) -> bool:
        """Whether an op after backward wrote to a parameter, outside of any optimizer's step."""
        return self._round is not None and self._round[0].written

    def update_begins(self) -> None:
        self._backward_is_over()
        if self._round is not None:
            self._round[0].phase = "update"
            let_go(self._round[1])

    def update_ended(self) -> None:
        """The step goes on after an optimizer's update: its next ops belong to backward again."""
        if self._round is not None and self._round[0].phase == "update":
            self._round[0].phase = "backward"

    def final(self, p: torch.Tensor, name: str, early: bool, freed: bool = True) -> None:
        """The gradient of a parameter is complete. `early`: the parameter is updated now. `freed`: an early update frees the
        memory of the gradient.
        """
        if self._round is None:
            return
        tracer, _, recorder = self._round
        assert p.grad is not None
        # an op that reads the gradient later reads this version, whichever op made it
        gradient = recorder.adopt(local_tensor(p.grad))
        if self._weights is None:  # no unit is gathered for the first time when a gradient is complete
            parts = (part for unit in units_of(self.model) for part in sharded_parameters(unit))
            self._weights = {id(sharded): gathered for sharded, _, gathered in parts if gathered is not None}
        weight = self._weights.get(id(p))
        if weight is not None and not early:
            tracer.made_unseen(gradient, f"{name}.grad")
        self.finals.append(
            Final(
                name,
                recorder.adopt(local_tensor(p)).id,
                gradient.id if freed else NEVER,
                len(tracer.points) - 1,
                NEVER if weight is None else recorder.adopt(weight).id,
            )
        )

    def reduced(self) -> None:
        """All gradients of this backward are reduced over processes, and are about to be copied back."""
        if self._round is not None:
            self.copies = range(len(self._round[0].points), sys.maxsize)

    def copied_back(self) -> None:
        """The backward is over, and with it the copies."""
        if self._round is not None and self.copies:
            self.copies = range(self.copies.start, len(self._round[0].points))

    @contextlib.contextmanager
    def updating(self, p: torch.Tensor) -> Iterator[None]:
        """Around the update of a parameter in backward."""
        if self._round is None:
            yield
            return
        tracer = self._round[0]
        before, tracer.phase = tracer.phase, "update"
        try:
            yield
        finally:
            tracer.phase = before
            self._ungraded = [(q, nbytes) for q, nbytes in self._ungraded if q is not p]

    def finals_seen(self) -> list[Final]:
        """`finals` with the ids that tensors have in the graph."""
        assert self._round is not None
        ids = {version: i for i, version in enumerate(sorted(self._round[0].tensors))}

        def in_graph(f: Final) -> Final:
            return f._replace(
                parameter=ids.get(f.parameter, NEVER), gradient=ids.get(f.gradient, NEVER), weight=ids.get(f.weight, NEVER)
            )

        return [in_graph(f) for f in self.finals]

    def _pressure(self) -> int:
        """Bytes by which live memory exceeds the limit less some room: for gradients to come, and for `_ROOM` of the largest
        tensors, because the inputs of an op may have to be rebuilt while its outputs are in memory.
        """
        assert self._round is not None and self.limit_nbytes is not None
        tracer, counts = self._round[0], self._counter
        live = self._live_nbytes() if counts is None else counts.live(ALL) + tracer.uncounted_nbytes - self._away_nbytes
        self.peak_nbytes = max(self.peak_nbytes, live)
        return live + _ROOM * tracer.largest_nbytes + self._gradients_to_come() - self.limit_nbytes

    def _live_nbytes(self) -> int:
        """Bytes that are in memory now, as a budget counts them; 0 after the step."""
        if self._round is None:
            return 0
        tracer, engine, _ = self._round
        if self._counter is not None:
            return self._counter.live_nbytes + tracer.uncounted_nbytes - self._away_nbytes
        return tracer.live_nbytes + engine.rebuilt_nbytes() + tracer.states_nbytes - self._away_nbytes

    def _exhausted(self) -> bool:
        left_nbytes = self.park_more()
        if self._counter is None:
            self._away_nbytes += left_nbytes
        return left_nbytes > 0

    def _unrebuilt_nbytes(self) -> int:
        """Those of them that neither rebuilds nor the states of generators take."""
        if self._round is None:
            return 0
        tracer = self._round[0]
        live = tracer.live_nbytes if self._counter is None else self._counter.live(PLAIN) + tracer.uncounted_nbytes
        return live - self._away_nbytes

    def _gradients_to_come(self) -> int:
        """Bytes that this backward will add: the gradients of parameters that have none yet."""
        native = self._native
        nbytes: int | None = None if native is None else native.ungraded_nbytes(self._ungraded)
        if nbytes is not None:
            return nbytes
        # a lazy parameter had no bytes when the forward began
        return sum([nbytes or local_tensor(p).nbytes for p, nbytes in self._ungraded if gradient_of(p) is None])

    def _writes(self, t: torch.Tensor) -> None:
        """An op is about to write to the memory of `t`, which earlier forwards of this step may have read."""
        storage = storage_id(t)
        if self._round is None or self._round[0].phase != "update":
            self.overwritten.add(storage)
        for ref in self._engines:
            engine = ref()
            if engine is not None and storage in engine.starts.on:
                engine.writes(t)

    def _end_round(self) -> None:
        if self._round is not None:
            tracer, engine, recorder = self._round
            self._round = None
            self.evicted = self.evicted or engine.evictions > 0
            # autograd may keep the engine (a second backward, or none), but the engine must not keep the tracer
            engine.events = engine.pressure = engine.bound = None
            engine.on_rebuilt, engine.exhausted = _nothing, bool
            tracer.close()
            recorder.forget()
            recorder.observer = recorder.writes = recorder.runs = None
            step_ended(engine)

    def abandon(self) -> None:
        """Leave every context, whatever state the step is in."""
        try:
            self._backward_is_over()
            self._contexts.close()
        finally:
            self._metering.close()
            self._end_round()

    def finish(self) -> Graph | None:
        """The step has ended. Returns its graph; None where no forward was observed."""
        if self._round is None:
            return None
        self._backward_is_over()
        self._unverified = self._round[1].unverified
        finals = self.finals_seen()
        graph = settled(with_updates(kept(self._graph(), finals), finals), finals)
        self._contexts.close()
        self._metering.close()
        self._end_round()
        return self._corrected(graph)

    def so_far(self) -> Graph:
        """The graph of the round until now. Workspaces are missing where the meter has not been stopped."""
        assert self._round is not None
        return self._corrected(self._graph())

    def _graph(self) -> Graph:
        assert self._round is not None
        tracer, _, recorder = self._round
        graph = tracer.graph(recorder)
        return graph if self._accumulated is None else self._accumulated.in_graph(graph)

    def to_come(self) -> tuple[Graph, frozenset[int]]:
        """The graph of a later step, when an update is about to run: `so_far`, with each parameter updated where its gradient
        was final. And the ids of its tensors that are not in memory any more.
        """
        assert self._round is not None
        tracer, engine, _ = self._round
        let_go(engine)  # as when the update begins
        finals = self.finals_seen()
        graph = freed_early(kept(self.so_far(), finals), finals)
        return graph, gone(tracer.tensors, tracer.saves.values())

    def _corrected(self, graph: Graph) -> Graph:
        """The graph with metered workspaces and the modules' ops. Ops that gave other bits when they ran again are not
        recomputable in it, nor are ops whose inputs, in any forward of the step, were overwritten before backward was done with
        them.
        """
        metered = self.events.workspaces if self.events is not None and self.events.available else None
        opaque = {name.replace("::", ".") for name in (*self.opaque_ops, *self._unverified)}

        make, ops = maker(Op), list[Op]()
        for op in graph.ops:
            workspace = op.workspace_nbytes if metered is None else metered.get(op.id, 0)
            same_bits = op.id not in self._lost and op.name.replace("::", ".") not in opaque
            recomputable = self.recompute and op.recomputable and same_bits
            if (workspace, recomputable) != (op.workspace_nbytes, op.recomputable):
                values = list(_values_of(op))
                values[_WORKSPACE], values[_RECOMPUTABLE] = workspace, recomputable
                op = make(*values)
            ops.append(op)
        return dataclasses.replace(graph, ops=tuple(ops), unbroken=self.scopes.unbroken)


def _leaves(recorder: Recorder, tracer: Tracer, ledger: Ledger, t: torch.Tensor) -> None:
    version = recorder.of_storage.get(storage_id(t))
    if version is not None and version.id in tracer.tensors:
        ledger.left(tracer.tensors[version.id].storage)


def _nothing(_: Any) -> None:
    """The callback of an engine that is no longer observed."""
