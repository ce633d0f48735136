"""Loss heads in tiles: the part of a session that runs the head of a step in tiles, or has tiles compared with whole ops.

What observed steps have shown, and what the next one is for, is known for each input signature (loss_head.py). Ranks that train
together decide together, after each of these steps (ranks/shared_heads.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.backends import backend_of
from lightning_memopt.errors import InfeasibleError
from lightning_memopt.graph import Graph
from lightning_memopt.logs import Say
from lightning_memopt.native.engine import loaded
from lightning_memopt.plan import Machine, TiledHead
from lightning_memopt.plan.logits import are_worth_tiles, head_of, is_worth_tiles, logits
from lightning_memopt.record import (
    Seams,
    around_innermost,
    in_transform,
    listening_to,
    numeric_flags,
    told_of_compiled,
    uncompiled,
    undo,
    watching,
    watching_sizes,
)
from lightning_memopt.record.gathered import Event, around_units, is_there, units_of, weights_of
from lightning_memopt.record.undoing import Calls
from lightning_memopt.runtime.tiles import HELD, Proof, Sizes, TileMode
from lightning_memopt.runtime.tiles.recipes import Recipe
from lightning_memopt.session.budget import device_of
from lightning_memopt.session.forward.recording import Recording, in_checkpoint
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.loss_head import BLANK, LossHead, blank_text, other_bits, parts, sizes_of
from lightning_memopt.session.observe.observing import Observing
from lightning_memopt.session.parts import Part, Parts
from lightning_memopt.session.ranks.agreement import Agreement
from lightning_memopt.session.ranks.shared_heads import Cost, KnownHead
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.session.solve.solving import Solved, budget_for
from lightning_memopt.solvers import planner
from lightning_memopt.torch_private import keeps_weights, sharded_parameters
from lightning_memopt.trace import backward_runs
from lightning_memopt.units import format_nbytes

_REMEMBERED = 16
"""Maximum number of signatures whose steps may run in tiles: each has a graph."""
_UNKNOWN_NBYTES = 1 << 62
_LOSS_NBYTES = 16
"""Bytes that a loss takes for each score, as it is: in float32 the score, its log-probability, and a gradient of each."""
_COMPILE_OTHERS = "Compile the other layers alone (compile=True compiles repeated blocks), and the last one runs in tiles"
AnyRecording = TypeVar("AnyRecording", bound=Recording)
Solve = Callable[[Graph], Solved]
_OTHER = LossHead(phase="whole")
"""What is known of the steps of all signatures after the first ones."""
_assuming: list[Callable[[Tiling, nn.Module], None]] = []


@contextlib.contextmanager
def assuming(begin: Callable[[Tiling, nn.Module], None]) -> Iterator[None]:
    """Within, sessions that are made run in tiles without a proof, because none of the bytes of their steps is computed.
    `begin` says in which ones (`Tiling.assume`), for the model of the session.
    """
    _assuming.append(begin)
    try:
        yield
    finally:
        _assuming.remove(begin)


def why_not() -> str:
    """Why no head can run in tiles in this process; "" if one can."""
    if loaded() is None:
        return "the native engine is not there"
    return "" if loaded().can_be_hollow() else "they need a newer torch"


class Tiling(Part):
    """The loss heads of a session's model that run in tiles.

    mode: the mode of this step; None where no head runs in tiles.

    Many methods: one for each moment of a step, and for each phase in which a head is looked at, proven, and chosen.
    """

    def __init__(self, model: nn.Module, config: MemOptConfig, agreement: Agreement, say: Say, parts: Parts) -> None:
        """`agreement`: where ranks that train together decide. `parts`: those of the session; it is one if it is wanted."""
        self._model = model
        self._config = config
        self._agreement = agreement
        self._say = say
        self._wanted = config.tile != "off"
        if self._wanted:
            parts.add(self)
        self._known: dict[object, LossHead] = {}
        self._now = LossHead()
        self._begun: LossHead | None = None  # whose forwards run in the mode
        self._step: Calls = []
        self._said = set[str]()
        self._flags: object = None  # the numeric settings under which tiles of the user's plan were compared
        self._given: frozenset[str] | None = None  # ops of the user's plan whose tiles have given the bits of whole ops
        self._blank = 0  # how many steps of the user's plan have shown nothing about tiles
        self._compares: TiledHead | None = None  # the head of the user's plan, in the step that finds that out
        self._assumed: tuple[TiledHead, Callable[[bool], TileMode]] | None = None
        self._deferred = False  # the budget was not refused before the first update, because of tiles
        self.mode: TileMode | None = None
        if _assuming:
            _assuming[-1](self, model)

    def assume(self, head: TiledHead, mode: Callable[[bool], TileMode]) -> None:
        """Each step runs in tiles without a proof (`assuming`). `mode`: makes that of a step (`TileMode`), given `notes`."""
        self._assumed = head, mode

    # -- moments of a step -------------------------------------------------------------------------

    def forward_begins(self, signature: object) -> None:
        self._now = self._known.get(signature, _OTHER)
        if self._now is _OTHER and len(self._known) < _REMEMBERED:
            self._now = self._known[signature] = LossHead()
        elif self._now is _OTHER and any(head.phase == "tiled" for head in self._known.values()):
            self._tell(f"there are batches of more than {_REMEMBERED} shapes; those of others are whole")

    def step_begins(self, state: object, limit_nbytes: int | None) -> None:
        if self.mode is not None:
            self._leave()
        self._begun = self._now
        head = self._now.head
        work: Sizes | Proof | None = None
        if isinstance(state, Observing) and self._now.phase == "look" and self._assumed is None:
            self._looks()
        if isinstance(state, Running):
            head = state.plan.tiles[0] if state.plan.tiles else None
            work = None if head is None else self._work(state, head)
        elif isinstance(state, Observing) and head is not None:
            now = self._now
            if now.phase == "tiled" and (now.changed or now.flags != numeric_flags()):
                self._tell(now.compares_anew())
            if now.phase == "prove":
                work = now.proof or self._proof(head.rows, head.columns)
            elif now.phase == "tiled":
                head = now.ways[min(len(now.observed), len(now.ways) - 1)]
                work = sizes_of(head)
        if self._assumed is not None:
            head, mode = self._assumed
        elif head is None or work is None or why_not():
            return
        else:
            mode = partial(TileMode, head.classes, work)
        module = self._model.get_submodule(head.module)
        self._enter(mode(any(p.requires_grad for p in self._weights(head))))
        self._within(around_innermost(module, self._head_begins, self._head_ends))
        if not head.module:
            self._head_begins(module)  # its call has begun already

    def _looks(self) -> None:
        """A first step begins. If it comes to logits that do not fit, it proves tiles."""
        classes = max((p.size(0) for p in self._model.parameters() if p.dim() == 2), default=0)
        if self._left_nbytes() is None or not classes or why_not():
            return

        def begins(product: Recipe) -> Proof | None:
            left_nbytes = self._left_nbytes()
            if left_nbytes is None or _LOSS_NBYTES * product.rows * product.columns <= left_nbytes:
                return None
            if backward_runs() or in_transform() or in_checkpoint():
                return None
            return self._proof(product.rows, product.columns)

        self._enter(TileMode(classes, None, notes=True, begins=begins))
        self._head_begins(self._model)

    def _enter(self, mode: TileMode) -> None:
        self.mode = mode
        self._step += (mode.leave, mode.end)
        raw = watching(mode.exposed, mode.settings_changed, _ignored, mode.opened)
        sizes = watching_sizes(lambda t: mode.leaving([t], "resize_"), _ignored)
        self._within(listening_to([raw, sizes, (_reads, mode.asked), *told_of_compiled(mode.compiled)]))
        if units_of(self._model):
            self._within(around_units(self._of_unit))

    def _within(self, context: contextlib.AbstractContextManager[None]) -> None:
        """The rest of the step is within this context."""
        context.__enter__()
        self._step.append(partial(context.__exit__, None, None, None))

    def _work(self, state: Running, head: TiledHead) -> Sizes | Proof | None:
        """What a step of this plan does. If the user gave the plan, its first step compares bits."""
        if head.threads != torch.get_num_threads():
            self._tell(f"they were compared with {head.threads} threads, and now there are {torch.get_num_threads()}")
            return None
        flags = self._now.flags if self._now.flags is not None else self._flags
        if flags is not None and flags != numeric_flags():
            self._tell("they were compared under other numeric settings")
            return None
        if state.is_given and self._given is None:
            columns = (head.columns,) if head.columns else ()
            self._compares = head
            return Proof((head.rows,), columns, bool(head.rounded), planned=True, room=self._left_nbytes)
        sizes = sizes_of(head)
        if state.is_given and self._given is not None:
            return replace(sizes, ops=sizes.ops & self._given) if self._given else None
        return sizes

    def _head_begins(self, module: nn.Module) -> None:
        if self.mode is None or in_transform() or in_checkpoint():
            return
        if module.training and torch.is_grad_enabled():
            self.mode.leave()
            self.mode.inside = True
            self.mode.enter(beneath=True)

    def _head_ends(self, module: nn.Module) -> None:
        if self.mode is not None:
            self.mode.inside = False

    def recorded(self, state: object, recording: AnyRecording | None) -> AnyRecording | None:
        """A forward of this state is recorded: its recorder is told which ops cannot run again by themselves. Returns the
        recording.
        """
        if self._wanted and self._begun is not self._now and (self.mode is None or self.mode.is_done):
            self.step_ended((state,) if isinstance(state, Running) else ())  # batches of several shapes in a step
            self.step_begins(state, None)
        if recording is not None:
            recording.recorder.tiles = self.mode
            if self.mode is not None:
                self.mode.recorder = weakref.ref(recording.recorder)
        return recording

    def update_begins(self, optimizer: torch.optim.Optimizer, own: bool, closure: bool) -> None:
        if self.mode is not None and not closure and not backward_runs():
            self.mode.end()

    def step_ended(self, planned: Sequence[object]) -> None:
        if self.mode is None:
            return
        mode, given = self.mode, self._compares
        self._leave()
        if mode.outcome.tokens and isinstance(mode.work, Sizes):
            self._tell(f"they were compared for {mode.work.tokens:,} tokens, and some steps have others")
        op = mode.work.shows_nothing if isinstance(mode.work, Proof) else ""
        if op and "shows nothing" not in self._said:
            self._said.add("shows nothing")
            self._say(f"MemOpt: tiles are compared again in the next step: {op} added up only zeros, nan or too few numbers")
        if isinstance(mode.work, Proof) and given is not None:
            self._turned_out(mode.work, given, mode.flags)
        elif isinstance(mode.work, Proof) and self._begun is not None:
            self._begun.compared(mode.work, mode.flags)
        elif planned:
            self._was_read(mode)

    def _turned_out(self, proof: Proof, head: TiledHead, flags: object) -> None:
        """The first step of a plan that the user gave has compared its tiles, under these numeric settings."""
        wrong, op = proof.refutes(sizes_of(head)), proof.shows_nothing
        self._blank += bool(op)
        waits = bool(op) and self._blank < BLANK
        if proof.logits[0] == (head.tokens, head.classes) and ((proof.exits and not waits) or wrong):
            self._given = frozenset() if wrong else proof.tiled
            self._flags = flags
            self._tell(other_bits(wrong) if wrong else blank_text(op) if op and not proof.results(head.tokens) else "")

    def evaluation_begins(self) -> None:
        self._leave()

    def evaluates(self, within_step: bool) -> None:
        if not within_step:
            self._leave()

    def close(self) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):  # who reads what was not made gets an error
            self._leave()

    def _leave(self) -> None:
        undo(self._step)
        self.mode = None
        self._compares = None

    # -- what observed steps show ------------------------------------------------------------------

    def savable_nbytes(self, by_regions: Callable[[bool], int], graph: Graph, surely: bool) -> int:
        """Bytes by which other ways to run the step lower its peak, surely or at most. `by_regions`: those of compiled regions.
        Before a step has run in tiles, that is at most the bytes of all logits; unknown in a step that proves them, because
        its peak is not that of a step in tiles.
        """
        may = self._wanted and self._now.phase in ("look", "prove") and not why_not() and not surely
        if may and self.mode is not None and isinstance(self.mode.work, Proof):
            return _UNKNOWN_NBYTES
        if not may or head_of(graph) is None or not are_worth_tiles(graph, unmodified_peak(graph)):
            return by_regions(surely)
        self._deferred = True
        return by_regions(surely) + sum(graph.tensors[t].nbytes for t in logits(graph))

    def observes_again(
        self, state: Observing, graph: Graph, limit_nbytes: int | None, machine: Machine, compiled_nbytes: int
    ) -> bool:
        """A step of this state was observed. Returns whether another one must be, before a plan is made. `compiled_nbytes`: of
        logits that are made in compiled code.
        """
        now = self._now
        if now.phase == "look" and not state.plans_next and not self._agreement.alone:
            return False  # ranks look together, at the step of which they would plan
        own = self._shown(now, graph, limit_nbytes, machine, compiled_nbytes)
        together = self._agreement.known_heads(own)
        known = own if together is None else together
        again = self._wanted and now.follows(known, self._agreement.alone, self._tell)
        if again and together is not None:
            self._agreement.observes_again()
        return again

    def _shown(
        self, now: LossHead, graph: Graph, limit_nbytes: int | None, machine: Machine, compiled_nbytes: int
    ) -> KnownHead:
        """What the step has shown."""
        if not self._wanted:
            return KnownHead("whole", why="tile='off'")
        self.step_ended(())  # the step may go on, with a batch of another shape
        if now.phase in ("prove", "tiled") and self._begun is not now:
            return now.missed_head()
        if now.phase == "look":
            peak_nbytes = unmodified_peak(graph, machine)
            too_large = limit_nbytes is None or peak_nbytes > limit_nbytes
            needed = now.proved or (too_large and are_worth_tiles(graph, peak_nbytes))
            if too_large and not (needed or why_not()) and is_worth_tiles(compiled_nbytes, peak_nbytes):
                self._tell(f"{format_nbytes(compiled_nbytes)} of logits are made in compiled code. {_COMPILE_OTHERS}")
            if needed or not self._agreement.alone:
                return now.looked(graph, self._model, needed, self._cannot)
            return KnownHead("look")
        if now.phase == "prove":
            return now.proven()
        if now.phase == "tiled":
            return now.ran(graph, lambda each: self._cost(each, limit_nbytes, machine))
        return KnownHead("whole")

    def _cannot(self, head: TiledHead) -> str:
        """Why this head must stay whole; "" if it need not."""
        if why_not() or not self._weights_leave(head):
            return why_not()
        return "its weights are freed between forward and backward (fully_shard with reshard_after_forward=True)"

    def _proof(self, rows: int, columns: int) -> Proof:
        """The comparison of tiles of logits of so many rows and columns."""
        return Proof(parts(rows), parts(columns), self._config.tile == "rounding", room=self._left_nbytes)

    def _left_nbytes(self) -> int | None:
        """Bytes that are left on the device of the model; None where that is not known."""
        return backend_of(device_of(self._model)).left_nbytes()

    def _weights(self, head: TiledHead) -> list[nn.Parameter]:
        module = self._model.get_submodule(head.module)
        return list(module.parameters(recurse=not head.module))

    def _weights_leave(self, head: TiledHead) -> bool:
        """Whether sharded weights of a head are not in memory all the time from its forward to its backward."""
        weights = set(map(id, self._weights(head)))
        leaving = (unit for unit in units_of(self._model) if not keeps_weights(unit))
        return any(id(present) in weights for unit in leaving for _, present, _ in sharded_parameters(unit))

    def _of_unit(self, unit: Any, event: Event) -> contextlib.AbstractContextManager[None]:
        if event == "leaving" and self.mode is not None:
            reader = HELD if backward_runs() or keeps_weights(unit) else "reshard_after_forward"
            self.mode.leaving([weight for _, weight in weights_of(unit) if is_there(weight)], reader)
        return contextlib.nullcontext()

    def _tell(self, why: str) -> None:
        if why and why not in self._said:
            self._said.add(why)
            self._say(f"MemOpt: no loss head runs in tiles: {why}")

    def _was_read(self, mode: TileMode) -> None:
        if self._begun is not None and mode.outcome.unproven:
            self._begun.changed = True
        for reader, nbytes in mode.outcome.read.items():
            if reader not in self._said:
                self._said.add(reader)
                what = "the loop still held logits when weights changed" if reader == HELD else f"{reader} read logits"
                new = " (it did not in steps that were compared)" if reader in mode.outcome.unproven else ""
                self._say(f"MemOpt: {what}, which are made in tiles: {format_nbytes(nbytes)} were made whole{new}")

    # -- the plan ----------------------------------------------------------------------------------

    def solved(self, solve: Solve, machine: Machine, limit_nbytes: int | None, graph: Graph) -> Solved:
        """Solve for the step of this graph. Where it ran in tiles, its plan does, unless a plan of the step as it is keeps the
        budget in less time. Raises InfeasibleError where no plan keeps it, if only tiles could have (`savable_nbytes`).
        """
        solved = self._now.solved(solve, machine, graph, self._say)
        deferred, self._deferred = self._deferred, False
        if deferred and solved.above is not None:
            needed_nbytes = solved.plan.budget_nbytes
            raise InfeasibleError(
                f"No plan of this step fits {limit_nbytes} bytes, and none fits with its loss head in tiles. Set "
                f"{budget_for(needed_nbytes, self._config)}, or make the batch smaller. A few steps were trained to find out.",
                smallest_nbytes=needed_nbytes + self._config.headroom,
                budget_nbytes=limit_nbytes,
            )
        return solved

    def _cost(self, graph: Graph, limit_nbytes: int | None, machine: Machine) -> Cost:
        """What the best plan for the step of this graph costs."""
        if limit_nbytes is None:
            return 1, planner.smallest_nbytes(graph, machine)
        objective, seconds = self._config.objective, self._config.solver_seconds
        frontier = planner.solve(graph, machine, objective=objective, limit_seconds=seconds, budgets=(limit_nbytes,))
        if frontier.smallest_nbytes > limit_nbytes:
            return 1, frontier.smallest_nbytes
        return 0, frontier.graph.step_seconds + frontier.within(limit_nbytes).predicted.seconds


def _ignored(t: torch.Tensor) -> None:
    pass


def _reading(original: Any) -> Any:
    @uncompiled
    @wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for listener in tuple(_reads.listeners):
            listener(self, original.__name__)
        return original(self, *args, **kwargs)

    return method


_METHODS = ("tolist", "share_memory_", "_typed_storage", "__repr__", "__reduce_ex__", "__deepcopy__")
"""Methods of tensors that read bytes without an op, or without modes, and that hand out no raw memory (record/exposure.py)."""
_reads: Seams[Callable[[torch.Tensor, str], None]] = Seams(
    lambda: [(torch.Tensor, name, _reading) for name in _METHODS], stays=True
)
