"""The engine that carries out a plan: it drops, holds, parks and rebuilds tensors at the points that the plan gives."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from threading import get_ident

import torch

from lightning_memopt.errors import ModifiedError, NotGatheredError, OffloadError
from lightning_memopt.graph import BEFORE
from lightning_memopt.plan import Fetch, Free, Segment
from lightning_memopt.record import Origin, Recorder, storage_id, uncompiled
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.interrupts import raise_deferred
from lightning_memopt.runtime import spans
from lightning_memopt.runtime.engine.base import Engine
from lightning_memopt.runtime.engine.checks import Checks
from lightning_memopt.runtime.engine.cursor import NEVER, cursor_for
from lightning_memopt.runtime.engine.guard import Guard
from lightning_memopt.runtime.engine.handles import Handle, Kept
from lightning_memopt.runtime.engine.holding import Holding, Version, can_make
from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.matching import Matcher, matcher_for
from lightning_memopt.runtime.engine.naming import GraphNames, Names, modified
from lightning_memopt.runtime.engine.parking import Parking
from lightning_memopt.runtime.engine.planned_holdings import PlannedHoldings
from lightning_memopt.runtime.engine.rebuild import flags_of, missing, run
from lightning_memopt.runtime.engine.rejoining import starts_of
from lightning_memopt.runtime.engine.turns import Event, Turn, Turns
from lightning_memopt.runtime.parked import Depot

_EXTERNAL = Origin.EXTERNAL


class PlannedEngine(Engine):
    """One forward pass under a program, and its backward. Many methods: the recorder, the session, autograd's handles and the
    native engine each call it.

    learned: what the engine remembers of earlier forwards under the program.
    program: the plan, indexed.
    unproven: whether the plan may be that of another model, so that an op that does not match at the cursor is not looked for.
    cursor: how far the step has come, and how it deviates from the plan.
    checks: checksums of dropped and parked bytes, where `verify` is true.
    guard: versions that stay longer than the plan says.
    parking: the parked tensors. Their bytes go into `depot`.
    holdings: decides what is held.
    turns: which of the plan's events have come in backward.
    packing: the data of the native pack hook; None where Python packs all tensors.
    calls: number of calls of the model after the first one.
    between: between two calls of the plan, the recorder; else None.
    """

    holdings: PlannedHoldings

    def __init__(
        self,
        learned: Learned,
        verify: bool = False,
        depot: Depot | None = None,
        unproven: bool = False,
    ) -> None:
        super().__init__(learned.native)
        self.learned = learned
        self.program = program = learned.program
        self.unproven = unproven
        self.cursor = cursor_for(self.native)()
        self.checks = Checks(verify)
        self.guard = Guard(len(program.graph.points))
        active = learned.numbers()
        active.update(program.resident_starts)
        self.parking = Parking(program, self.tape, self.cursor, self.checks, active, depot)
        self.holdings = PlannedHoldings(program, self.cursor, self.guard, self.parking, self.tape.versions)
        self.turns = Turns(program, self.cursor, learned.numbers())
        self._names = GraphNames(program.graph)
        self._labels = learned.numbers()
        """Saves of the plan that autograd made in this step, including those where it keeps the tensor itself."""
        self._due: list[int] = []
        """Tensors that cannot be rebuilt and that the plan frees at events that were passed over."""
        self.packing: object = None
        self.calls = 0
        self.between: Matcher | None = None

    @property
    def names(self) -> Names:
        return self._names

    def about(self, version: Version | None) -> tuple[Names, int]:
        return self._names, self.cursor.position

    @uncompiled
    def start_changed(self, version: Version) -> ModifiedError:
        if version.holding.tensor is not None:
            self.cursor.deviation.changed.add(version.holding.tensor)
        return super().start_changed(version)

    # -- in forward --------------------------------------------------------------------------------

    def make_recorder(self) -> Matcher:
        recorder, self.between = self.between, None
        if recorder is not None:
            return recorder
        # weak, because between two calls the engine holds the recorder, and must be freed with autograd's handles
        owner = weakref.proxy(self)
        return matcher_for(self.native)(owner, self.tape, self.holdings, self.learned, self.unproven)

    def next_call(self) -> bool:
        """A call of the model begins. Returns whether it is the plan's next one, before any of the backward has come."""
        turns, cursor = self.turns, self.cursor
        if self.between is None or self.between.thread != get_ident() or cursor.out_of_order:
            return False
        position = self.program.calls[self.calls]
        if cursor.turn and turns.point > self.program.graph.forward[position].at:
            return False
        self.calls += 1
        cursor.skip_to(position + 1)
        cursor.lost = False
        known = (self.tape.versions.get(self.program.graph.tensors[t].storage) for t in self.program.outputs[position])
        self.between.goes_on({version.weak for version in known if version is not None})
        self._backward = None
        return True

    @property
    def is_whole(self) -> bool:
        """Whether all of the plan's calls of the model have come."""
        return self.calls == len(self.program.calls)

    def end_forward(self) -> None:
        if isinstance(self.recorder, Matcher) and not self.is_whole:
            self.between = self.recorder
        if self.recorder is not None and self.cursor.fence < NEVER:
            self.parking.pass_fences(over=self.is_whole)
        self.packing = None
        super().end_forward()
        native = self.native
        if native is not None and self._backward is None and not self.checks.on:
            step = (
                self.tape.versions,
                self.holdings.active,
                self.cursor,
                self.guard.stand_ins,
                self.guard.until,
                self._due,
                self.rebuilt_ops,
            )
            self._backward = native.backward(self.learned.actions, *step)

    def wants_state(self, name: str) -> bool:
        position, names = self.cursor.position, self.program.names
        if self.cursor.lost or position in self.program.random:
            return True
        return position >= len(names) or names[position] != name  # it may be another op of the plan, which runs again

    def begin_forward(self, recorder: Recorder) -> None:
        super().begin_forward(recorder)
        native = self.native
        if native is not None and not self.checks.on:
            step = self.cursor, self._names, self._labels, self.guard.stand_ins, self.turns.packed
            self.packing = native.packing(recorder.of_storage, self.learned.saves, *step)

    @uncompiled
    def pack(self, t: torch.Tensor) -> Kept | Handle:
        packed = super().pack(t)
        if not isinstance(packed, Kept):
            self.turns.packed.add(packed.save)
        return packed

    @uncompiled
    def save_of(self, version: Version) -> int:
        """Among the plan's saves of this tensor that are still to come in this step, the one nearest to the position; BEFORE if
        there is none.
        """
        tensor = version.holding.tensor
        if tensor is None:
            return BEFORE
        position, packs, labels = self.cursor.position, self.program.packs, self._labels
        tensors = (tensor, *self.guard.stand_ins.get(version.id, ()))
        here = self.program.packs_here  # hundreds of ops may save a tensor, so those here are tried first
        save = min((s for t in tensors for s in here.get((t, position), ()) if s not in labels), default=BEFORE)
        if save == BEFORE:
            distances = ((abs(op - position), s) for t in tensors for op, s in packs.get(t, ()) if s not in labels)
            _, save = min(distances, default=(0, BEFORE))
        if save != BEFORE:
            labels.add(save)
        return save

    def left_out_nbytes(self) -> int:
        """Bytes of the plan's tensors that autograd did not save in this step."""
        tensors = self.program.graph.tensors
        return sum(tensors[t].nbytes for save, t in self.program.saved if save not in self._labels)

    def keeps(self, version: Version, t: torch.Tensor, save: int) -> bool:
        # runs for every save of every step, so `external`, `stale` and `rebuildable` are written out: calls cost more
        holding, program = version.holding, self.program
        if holding.tensor is None and not version.external:
            self.cursor.deviation.unplanned_nbytes += version.nbytes
        if version.origin is _EXTERNAL or version.next is not None or holding.tensor not in program.tracked:
            return True
        if save == BEFORE and holding.parked is None:  # the observed step saved it less often
            return True
        if holding.tensor in program.parked and not self.parking.pack(version, t, save):
            return True
        if holding.value is not None or holding.parked is not None:
            return False
        if holding.tensor in program.packed_then_overwritten:
            # normally a later version is held and read instead; this one is read if this step does not overwrite it
            holding.hold(t)
            return False
        if not (version.call is not None and holding.reachable and holding.tensor in program.dropped_at_pack):
            return True
        if self.checks.on:
            self.checks.note(version, t)
        return False

    # -- in backward -------------------------------------------------------------------------------

    def request(self, handle: Handle) -> torch.Tensor:
        self.cursor.asked = True
        with self.lock:
            if self._backward is not None:
                raise_deferred()
                done: torch.Tensor | None = self.native.request(self._backward, self, handle)
                if done is not None:
                    return done
            event = ("unpack", handle.save, handle.times)
            turn = self._take(event)
            if turn.planned:
                self._run_segment(event)
            handle.times += 1
            if self.recorder is not None:
                self._prefer_users_memory(handle.version)
            value = super().request(handle)
            if self.recorder is not None:  # a backward in the forward: ops of the forward may read what it rebuilds
                self.recorder.recognise(handle.version, handle.version.holding.value)
            self.checks.compare(handle.version)
            if turn.planned:
                self._free(event)
            return value

    @staticmethod
    def _prefer_users_memory(version: Version) -> None:
        """Drop rebuilt bytes if the user still has the version's own memory, by which ops of the forward know it."""
        value = version.holding.value
        if value is not None and version.alive() is not None and storage_id(value) != version.weak:
            version.holding.drop()

    @uncompiled
    def given(self, handle: Handle) -> torch.Tensor:
        """The tensor of a handle, after the actions that the plan has before it. Called by the native engine."""
        return super().request(handle)

    def value_of(self, version: Version, handle: Handle) -> torch.Tensor:
        parked = version.holding.parked
        if parked is None:
            return super().value_of(version, handle)
        if parked.exact or version.holding.value is not None or self.reuse(version, handle):
            value = super().value_of(version, handle)
        else:
            value = self.parking.show(version, handle)
            if value._version != parked.expected:
                raise modified(self.called(handle), value._version, parked.expected)
        self.parking.spend(version)
        return value

    @uncompiled
    def released(self, handle: Handle) -> None:
        with self.lock:
            version = handle.version
            event = ("release", handle.save, 0)
            if self._backward is not None and self.native.released(self._backward, self, handle):
                return
            with contextlib.suppress(OffloadError):  # a failed copy out: the bytes stay, and a later wait raises the error
                if self._take(event).planned:
                    self._free(event)
                if version.holding.handles == 0 and not self.holdings.lives(version):
                    self.holdings.let_go(version)

    def retains(self, version: Version) -> bool:
        """A version with handles stays if the plan has it in memory now, or if backward is out of order."""
        return version.holding.handles > 0 and (self.cursor.out_of_order or self.holdings.lives(version))

    def pass_fences(self) -> None:
        """Drop now what the next op of the forward would drop first: parked tensors whose copies out may be awaited."""
        if self.recorder is not None and self.cursor.past_fence:
            self.parking.pass_fences()

    def _take(self, event: Event) -> Turn:
        """An event has come. First do what the plan does before it, and what it does at events that were passed over."""
        self.pass_fences()  # else the next op would drop what the event fetches
        turn = self.turns.take(event, in_forward=self.recorder is not None)
        if self.guard.until and not self.cursor.out_of_order:
            for id in self.guard.pass_point(self.turns.point):
                self.holdings.unguard(self.tape.versions[id])
        for passed in turn.passed:
            if event[0] == passed[0] == "unpack" and not self.cursor.out_of_order:
                self._run_segment(passed, asked=False)
            self._free(passed, passed=True)
        return turn

    def _run_segment(self, event: Event, asked: bool = True) -> None:
        """Run the segment of an unpack, if there is one. `asked` is false for an event that was passed over."""
        planned = self.program.segments.get(event[1:])
        if planned is not None and planned[0] > self.cursor.point:
            self.cursor.point = planned[0]
            self._perform(planned[1], planned[0], asked)

    def _perform(self, steps: Segment, point: int, asked: bool) -> None:
        """Run a segment. Missing bytes that it needs are rebuilt on demand.

        Ops that cannot run are skipped if nobody asked or the forward deviated. A later request then rebuilds its bytes.
        """
        strict = asked and self.cursor.on_plan
        versions = self.tape.versions
        # before the ops run, so that tensors that are rebuilt on demand for another op of the segment stay, too
        self.holdings.active.update(t for t in self.program.births.get(point, ()) if t in versions)
        with below_autograd(), flags_of(self.tape), spans.segment(self.program.graph, steps):
            for step in steps:
                if isinstance(step, Fetch):
                    self.fetch(step.tensor)
                elif isinstance(step, Free):
                    version = versions.get(step.tensor)
                    if version is not None:
                        self.holdings.free(version)
                else:
                    self.run_again(step.op, step.clones, strict)

    @uncompiled
    def perform_natively(self, segment: int) -> None:
        """Run a segment of a step that is as planned. The native engine calls this where it cannot run the segment itself:
        settings differ from those of the forward, a transform runs, or a profiler wants a span.
        """
        span = spans.segment(self.program.graph, self.program.schedule.segments.get(self.cursor.point))
        with below_autograd(), flags_of(self.tape), span:
            self.native.perform(self._backward, self, segment)

    @uncompiled
    def fetch(self, tensor: int) -> None:
        """Begin to fetch a parked tensor of the plan."""
        version = self.tape.versions.get(tensor)
        if version is not None and version.holding.parked is not None and version.holding.value is None:
            version.holding.parked.begin_fetch()

    @uncompiled
    def run_again(self, op: int, clones: Iterable[int], strict: bool) -> None:
        """Run an op of the plan's forward again. `clones`: tensors that it overwrites and whose old bytes are needed."""
        versions, stand_ins = self.tape.versions, self.guard.stand_ins
        made = [versions[t] for t in self.program.outputs[op] if t in versions]
        call = next((version.call for version in made if version.call is not None), None)
        if call is None or any(version.id in stand_ins and not missing(version) for version in made):
            return  # it did not run in this step, and the version that stands in for its result is in memory
        try:
            absent = [versions[id] for id in call.reads if missing(versions[id])]
        except NotGatheredError:
            if strict:
                raise
            return  # if a request comes while the weight is gathered, it rebuilds the bytes
        if not strict:
            makes = any(version.holding.reachable or version.empty for version in made)
            if not makes or any(starts_of(version, versions) is None for version in absent):
                return
        if absent:
            self.rebuild(absent)
        survive = {versions[t].id for t in clones if t in versions} | stand_ins.keys() | self.guard.needed
        run(call, versions, lambda version: version.id in survive)
        self.rebuilt_ops.append(call.op)

    def _free(self, event: Event, passed: bool = False) -> None:
        """Drop the tensors that the plan frees at an event.

        At an event that was `passed` over, a tensor that cannot be rebuilt stays until the next release, because a second
        backward may come before that.
        """
        tensors: Iterable[int] = self.program.frees.get(event, ())
        if self._due and event[0] == "release" and not passed:
            tensors = [*self._due, *tensors]
            self._due.clear()
        for tensor in tensors:
            self.holdings.active.discard(tensor)
            version = self.tape.versions.get(tensor)
            if version is None or self.holdings.lives(version):
                continue
            holding: Holding = version.holding
            lost = passed and holding.parked is None and not can_make(version, self.tape.versions)
            if lost and self.holdings.may_drop(version):
                self._due.append(tensor)
            else:
                self.holdings.let_go(version)
