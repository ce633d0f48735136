"""Loss heads in tiles: which steps run in them, and whether the plan of a step does.

    step                     what is learned
    observed as it is        which module makes the logits (plan/logits.py), and whether the step is too large
    observed, proving        which sizes of tiles give the bits of the whole ops on this machine, and what else reads the logits
    observed in tiles        the graph of the step in tiles, for which a plan is made like for any other; a step for each way

A step can run in tiles in two ways: the gradient of the logits is never whole, or it is made whole once, from tiles, which
takes a product less. The plans of both are compared with the one for the step as it is. What keeps the budget in the least
time wins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from lightning_memopt.config import MemOptConfig
from lightning_memopt.graph import Graph, Op
from lightning_memopt.native.engine import loaded
from lightning_memopt.plan import Machine, TiledHead, tiles_text
from lightning_memopt.plan.logits import head_of
from lightning_memopt.record import (
    Seams,
    around_innermost,
    in_transform,
    listening_to,
    numeric_flags,
    told_of_compiled,
    uncompiled,
    watching,
)
from lightning_memopt.runtime.tiles import HELD, Proof, Sizes, TileMode
from lightning_memopt.session.forward.recording import Recording, in_checkpoint
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.observing import Observing
from lightning_memopt.session.parts import Part, Parts
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.session.solve.solving import Solved
from lightning_memopt.solvers import planner
from lightning_memopt.trace import backward_runs
from lightning_memopt.units import format_nbytes

_PARTS = (2, 4, 8, 16)
"""Tiles of which sizes are tried: these shares of the logits."""
_VECTOR, _STEP = 16, 64
"""Numbers of rows and columns of a tile are multiples of the first, or of the second where tiles are not equally large: kernels
work on blocks of so many.
"""
_REMEMBERED = 16
"""Maximum number of signatures whose steps may run in tiles: each has a graph."""
_UNKNOWN_NBYTES = 1 << 62
AnyRecording = TypeVar("AnyRecording", bound=Recording)
Say = Callable[[str], None]
Solve = Callable[[Graph], Solved]


@dataclass(eq=False)
class _Signature:
    """What is known of the steps of one input signature.

    phase: what the next observed step is for; `whole`: its head stays whole.
    head: the head, if there is one, with tiles of all rows and columns.
    plain: the graph of the step as it is.
    proof: the next proof, if it is not the first one.
    ways: the tiles in which it may run.
    observed: the graphs of steps that ran in these ways, as far as they have.
    proved: the step that is over was one that proves: its graph is not that of a usual step.
    flags: the numeric settings under which tiles were compared, the number of threads among them.
    """

    phase: Literal["look", "prove", "tiled", "whole"] = "look"
    head: TiledHead | None = None
    plain: Graph | None = None
    proof: Proof | None = None
    ways: Sequence[TiledHead] = ()
    observed: list[Graph] = field(default_factory=list)
    proved: bool = False
    flags: object = None


_OTHER = _Signature(phase="whole")
"""What is known of all signatures after the first ones."""


class Tiling(Part):
    """The loss heads of a session's model that run in tiles.

    mode: the mode of this step; None where no head runs in tiles.
    """

    def __init__(self, model: nn.Module, config: MemOptConfig, alone: bool, say: Say, parts: Parts) -> None:
        """`alone`: no other process trains with this one. `parts`: those of the session; it is one if it is wanted."""
        self._model = model
        self._config = config
        self._alone = alone
        self._say = say
        self._wanted = config.tile != "off"
        if self._wanted:
            parts.add(self)
        self._known: dict[object, _Signature] = {}
        self._now = _Signature()
        self._step = contextlib.ExitStack()
        self._said = set[str]()
        self._flags: object = None  # the numeric settings under which tiles of the user's plan were compared
        self._given: bool | None = None  # whether the tiles of the user's plan have given the bits of whole ops
        self.mode: TileMode | None = None

    # -- moments of a step -------------------------------------------------------------------------

    def forward_begins(self, signature: object) -> None:
        self._now = self._known.get(signature, _OTHER)
        if self._now is _OTHER and len(self._known) < _REMEMBERED:
            self._now = self._known[signature] = _Signature()
        elif self._now is _OTHER:
            self._tell(f"there are batches of more than {_REMEMBERED} shapes; those of others are whole")

    def step_begins(self, state: object, limit_nbytes: int | None) -> None:
        self._leave()
        head = self._now.head
        work: Sizes | Proof | None = None
        if isinstance(state, Running):
            head = state.plan.tiles[0] if state.plan.tiles else None
            work = None if head is None else self._work(state, head)
        elif isinstance(state, Observing) and head is not None:
            now = self._now
            if now.phase == "tiled" and now.flags != numeric_flags():
                now.phase, now.proof, now.observed = "prove", None, []
            if now.phase == "prove":
                work = now.proof or _sizes(head, self._config.tile == "rounding")
            elif now.phase == "tiled":
                head = now.ways[min(len(now.observed), len(now.ways) - 1)]
                work = _proven(head)
        if head is None or work is None or self._why_not():
            return
        module = self._model.get_submodule(head.module)
        weights = module.parameters(recurse=False) if head.module else module.parameters()
        self.mode = mode = TileMode(head.classes, work, notes=any(p.requires_grad for p in weights))
        self._step.enter_context(around_innermost(module, self._head_begins, self._head_ends))
        raw = watching(mode.exposed, mode.settings_changed, _no_hook, mode.opened)
        self._step.enter_context(listening_to([raw, (_reads, mode.asked), *told_of_compiled(mode.compiled)]))
        if not head.module:
            self._head_begins(module)  # its call has begun already

    def _work(self, state: Running, head: TiledHead) -> Sizes | None:
        """What a step of this plan does. If the user gave the plan, its first step also runs whole ops, to compare bits."""
        if head.threads != torch.get_num_threads():
            self._tell(f"they were compared with {head.threads} threads, and now there are {torch.get_num_threads()}")
            return None
        flags = self._now.flags if self._now.flags is not None else self._flags
        if state.is_given and self._given is False:
            return None
        if flags is not None and flags != numeric_flags():
            self._tell("they were compared under other numeric settings")
            return None
        if state.is_given and self._given is None:
            return replace(_proven(head), checked=True)
        return _proven(head)

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

    def recorded(self, recording: AnyRecording | None) -> AnyRecording | None:
        """A forward is recorded: its recorder is told which ops cannot run again by themselves. Returns the recording."""
        if recording is not None:
            recording.recorder.tiles = self.mode
        return recording

    def update_begins(self, own: bool, closure: bool) -> None:
        if self.mode is not None and not closure and not backward_runs():
            self.mode.end()

    def step_ended(self, planned: bool) -> None:
        if self.mode is None:
            return
        mode = self.mode
        self._leave()
        if mode.outcome.tokens and isinstance(mode.work, Sizes):
            self._tell(f"they were compared for {mode.work.tokens:,} tokens, and some steps have others")
        if isinstance(mode.work, Proof):
            self._proven(mode.work)
        elif planned and mode.outcome.heads and mode.work.checked:
            self._given = not mode.outcome.wrong
            self._flags = numeric_flags()
            if mode.outcome.wrong:
                self._tell(_other_bits(mode.outcome.wrong))
        elif planned:
            self._was_read(mode)

    def evaluation_begins(self) -> None:
        self._leave()

    def evaluates(self, within_step: bool) -> None:
        if not within_step:
            self._leave()

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        mode, self.mode = self.mode, None
        if mode is not None:
            mode.end()
            mode.leave()
        self._step.close()

    # -- what observed steps show ------------------------------------------------------------------

    def savable_nbytes(self, by_regions: Callable[[bool], int], surely: bool) -> int:
        """Bytes by which other ways to run the step lower its peak, surely or at most. `by_regions`: those of compiled regions.
        Before a step has run in tiles, any budget may be kept.
        """
        may = self._wanted and self._now.phase in ("look", "prove") and not self._why_not() and not surely
        return _UNKNOWN_NBYTES if may else by_regions(surely)

    def observes_again(self, graph: Graph, limit_nbytes: int | None, machine: Machine) -> bool:
        """A step of this signature was observed. Returns whether another one must be, before a plan is made."""
        now = self._now
        if self._wanted and now.phase == "look":
            return self._look(graph, limit_nbytes, machine)
        if now.phase == "tiled" and not now.proved:
            now.observed.append(graph)
        again, now.proved = now.proved or now.phase == "prove", False
        return again or (now.phase == "tiled" and len(now.observed) < len(now.ways))

    def _look(self, graph: Graph, limit_nbytes: int | None, machine: Machine) -> bool:
        now = self._now
        now.phase = "whole"
        if limit_nbytes is not None and unmodified_peak(graph, machine) <= limit_nbytes:
            return False
        op = head_of(graph)
        head = None if op is None else _head(graph, op, self._model)
        why = self._why_not()
        if head is None or why:
            self._tell(why or "no product of matrices was found from which a loss takes the logarithm of a softmax")
            return False
        now.phase = "prove"
        now.head = head
        now.plain = graph
        return True

    def _why_not(self) -> str:
        if not self._alone:
            return "several processes train together"
        if loaded() is None:
            return "the native engine is not there"
        return "" if loaded().can_be_hollow() else "they need a newer torch"

    def _proven(self, proof: Proof) -> None:
        """A step has compared tiles of some sizes."""
        now = self._now
        now.proved = True
        head = now.head
        now.proof = proof.again()
        if now.proof is not None:
            return
        ways = proof.results(head.tokens) if head is not None else []
        if head is None or not ways:
            now.phase = "whole"
            self._tell(_other_bits(proof.wrong) if proof.wrong else "no loss reads the logits in a way that can run on tiles")
            return
        now.phase = "tiled"
        now.flags = numeric_flags()
        now.ways = [_tiled(head, sizes) for sizes in ways]

    def _tell(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            self._say(f"MemOpt: no loss head runs in tiles: {why}")

    def _was_read(self, mode: TileMode) -> None:
        for reader, nbytes in mode.outcome.read.items():
            if reader not in self._said:
                self._said.add(reader)
                held = reader == HELD
                what = "the loop still held logits when weights changed" if held else f"{reader} read logits"
                self._say(f"MemOpt: {what}, which are made in tiles: {format_nbytes(nbytes)} were made whole")

    # -- the plan ----------------------------------------------------------------------------------

    def solved(self, solve: Solve, limit_nbytes: int | None, machine: Machine, graph: Graph) -> Solved:
        """Solve for the step of this graph. Where it ran in tiles, its plan does, unless a plan of the step as it is keeps the
        budget in less time.
        """
        now = self._now
        if now.phase != "tiled" or now.plain is None:
            return solve(graph)
        best = self._best([now.plain, *now.observed], limit_nbytes, machine)
        if not best:
            now.phase = "whole"
            self._tell("plans without tiles are no worse")
            return solve(now.plain)
        graph, tiles = now.observed[best - 1], (now.ways[best - 1],)
        now.ways, now.observed = tiles, []
        self._say(f"MemOpt: {tiles_text(tiles)}. Their bits were compared with those of the whole ops on this machine")
        solved = solve(graph)
        plain_nbytes = unmodified_peak(machine.usual_step(now.plain), machine)
        frontier = replace(solved.frontier, tiles=tiles, unmodified_peak_nbytes=plain_nbytes)
        return solved._replace(frontier=frontier, plan=replace(solved.plan, tiles=tiles, unmodified_peak_nbytes=plain_nbytes))

    def _best(self, graphs: Sequence[Graph], limit_nbytes: int | None, machine: Machine) -> int:
        """Which of these ways to run a step has the best plan: the first one of the smallest if none keeps the limit."""
        if limit_nbytes is None:
            smallest = [planner.smallest_nbytes(graph, machine) for graph in graphs]
            return smallest.index(min(smallest))
        objective, seconds = self._config.objective, self._config.solver_seconds
        ranks = []
        for graph in graphs:
            frontier = planner.solve(graph, machine, objective=objective, limit_seconds=seconds, budgets=(limit_nbytes,))
            kept = frontier.smallest_nbytes <= limit_nbytes
            cost = frontier.graph.step_seconds + frontier.within(limit_nbytes).predicted.seconds if kept else 0.0
            ranks.append((not kept, cost, 0 if kept else frontier.smallest_nbytes))
        return ranks.index(min(ranks))


def _head(graph: Graph, op: Op, model: nn.Module) -> TiledHead | None:
    path = op.scope.partition("#")[0]
    product = graph.tensors[op.outputs[0]]
    if len(product.size) < 2 or path not in dict(model.named_modules()):
        return None
    classes = product.size[-1]
    rows = prod(product.size[:-1])
    return TiledHead(module=path, classes=classes, tokens=rows, rows=rows, columns=classes, unmade_nbytes=product.nbytes)


def _other_bits(op: str) -> str:
    return f"tiles give other bits than the whole op on this machine ({op})"


def _sizes(head: TiledHead, rounding: bool) -> Proof:
    """The sizes that are tried. `head`: with all rows and columns."""

    def parts(n: int) -> tuple[int, ...]:
        even = {n // part for part in _PARTS if n % (part * _VECTOR) == 0}  # the last tile is as large as the others
        sizes = even or {-(-n // (part * _STEP)) * _STEP for part in _PARTS}
        return tuple(sorted(size for size in sizes if size < n))

    return Proof(parts(head.rows), parts(head.columns), rounding)


def _tiled(head: TiledHead, sizes: Sizes) -> TiledHead:
    return replace(
        head,
        rows=sizes.rows,
        columns=sizes.columns,
        ops=tuple(sorted(sizes.ops)),
        assembled=tuple(sorted(sizes.assembled)),
        rounded=tuple(sorted(sizes.rounded)),
        threads=torch.get_num_threads(),
    )


def _proven(head: TiledHead) -> Sizes:
    return Sizes(head.rows, head.columns, head.tokens, frozenset(head.ops), frozenset(head.assembled), frozenset(head.rounded))


def _no_hook(t: torch.Tensor) -> torch.Tensor:
    return t


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
