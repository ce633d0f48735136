"""Loss heads in tiles: which steps run in them, and whether the plan of a step does.

    step                     what is learned
    observed as it is        which module makes the logits (plan/logits.py), and whether the step is too large
    observed, proving        which sizes of tiles give the bits of the whole ops on this machine, and what else reads the logits
    observed in tiles        the graph of the step in tiles, for which a plan is made like for any other; a step for each way

A step can run in tiles in two ways: the gradient of the logits is never whole, or it is made whole once, from tiles, which
takes a product less. The plans of both are compared with the one for the step as it is. What keeps the budget in the least
time wins. Ranks that train together decide together, after each of these steps (ranks/shared_heads.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
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
    watching_sizes,
)
from lightning_memopt.record.gathered import Event, around_units, is_there, units_of, weights_of
from lightning_memopt.runtime.tiles import HELD, Proof, Sizes, TileMode
from lightning_memopt.session.forward.recording import Recording, in_checkpoint
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.observing import Observing
from lightning_memopt.session.parts import Part, Parts
from lightning_memopt.session.ranks.agreement import Agreement
from lightning_memopt.session.ranks.shared_heads import Cost, Known
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.session.solve.solving import Solved
from lightning_memopt.solvers import planner
from lightning_memopt.torch_private import keeps_weights, sharded_parameters
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
NO_HEAD = "no product of matrices was found from which a loss takes the logarithm of a softmax"
NO_LOSS = "no loss reads the logits in a way that can run on tiles"
AnyRecording = TypeVar("AnyRecording", bound=Recording)
Say = Callable[[str], None]
Solve = Callable[[Graph], Solved]


@dataclass(eq=False)
class _Signature:
    """What is known of the steps of one input signature.

    phase: what the next observed step is for; `whole`: its head stays whole.
    head: the head, if there is one.
    plain: the graph of the step as it is.
    proof: what the step that is over has compared, or the next one compares; None for the first sizes.
    proved: the step that is over has compared tiles.
    flags: the numeric settings under which tiles were compared, the number of threads among them.
    ways: the tiles in which it may run.
    observed: the graphs of steps that ran in these ways, as far as they have.
    best: which plan is the best: 0 for the one of the step as it is, else that of a way, from 1 on.
    """

    phase: Literal["look", "prove", "tiled", "whole"] = "look"
    head: TiledHead | None = None
    plain: Graph | None = None
    proof: Proof | None = None
    proved: bool = False
    flags: object = None
    ways: Sequence[TiledHead] = ()
    observed: list[Graph] = field(default_factory=list)
    best: int = 0


_OTHER = _Signature(phase="whole")
"""What is known of all signatures after the first ones."""


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


class Tiling(Part):
    """The loss heads of a session's model that run in tiles.

    mode: the mode of this step; None where no head runs in tiles.

    Many methods: one for each moment of a step, and for each phase in which a head is looked at, proven, and chosen.
    """

    def __init__(self, model: nn.Module, config: MemOptConfig, meetings: Agreement, say: Say, parts: Parts) -> None:
        """`meetings`: where ranks that train together decide. `parts`: those of the session; it is one if it is wanted."""
        self._model = model
        self._config = config
        self._meetings = meetings
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
        self._assumed: tuple[TiledHead, Callable[[bool], TileMode]] | None = None
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
                now.phase = "prove"
                now.proof = None
                now.observed = []
            if now.phase == "prove":
                work = now.proof or _sizes(head, self._config.tile == "rounding")
            elif now.phase == "tiled":
                head = now.ways[min(len(now.observed), len(now.ways) - 1)]
                work = _proven(head)
        if self._assumed is not None:
            head, made_by = self._assumed
        elif head is None or work is None or why_not():
            return
        else:
            made_by = partial(TileMode, head.classes, work)
        module = self._model.get_submodule(head.module)
        self.mode = mode = made_by(any(p.requires_grad for p in self._weights(head)))
        self._step.enter_context(around_innermost(module, self._head_begins, self._head_ends))
        raw = watching(mode.exposed, mode.settings_changed, _ignored, mode.opened)
        sizes = watching_sizes(lambda t: mode.leaving([t], "resize_"), _ignored)
        self._step.enter_context(listening_to([raw, sizes, (_reads, mode.asked), *told_of_compiled(mode.compiled)]))
        if units_of(self._model):
            self._step.enter_context(around_units(self._of_unit))
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
            self._now.proof = mode.work
            self._now.proved = True
            self._now.flags = numeric_flags()
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
        may = self._wanted and self._now.phase in ("look", "prove") and not why_not() and not surely
        return _UNKNOWN_NBYTES if may else by_regions(surely)

    def observes_again(self, state: Observing, graph: Graph, limit_nbytes: int | None, machine: Machine) -> bool:
        """A step of this state was observed. Returns whether another one must be, before a plan is made."""
        now = self._now
        if now.phase == "look" and not state.plans_next and not self._meetings.alone:
            return False  # ranks look together, at the step of which they would plan
        own = self._shown(now, graph, limit_nbytes, machine)
        together = self._meetings.known(own)
        again = self._wanted and self._goes_on(now, own if together is None else together)
        if again and together is not None:
            self._meetings.observes_again()
        return again

    def _shown(self, now: _Signature, graph: Graph, limit_nbytes: int | None, machine: Machine) -> Known:
        """What the step has shown."""
        if not self._wanted:
            return Known("whole", why="tile='off'")
        if now.phase == "look":
            needed = limit_nbytes is None or unmodified_peak(graph, machine) > limit_nbytes
            op = head_of(graph) if needed or not self._meetings.alone else None
            now.head = None if op is None else tiled_head(graph, op, self._model)
            now.plain = graph
            why = why_not()
            if now.head is None:
                why = why or NO_HEAD
            elif not why and self._weights_leave(now.head):
                why = "its weights are freed between forward and backward (fully_shard with reshard_after_forward=True)"
            return Known("look", why, needed)
        if now.phase == "prove" and now.proved and now.proof is not None and now.head is not None:
            again = now.proof.again()
            ways = now.proof.results(now.head.tokens) if again is None else []
            why = ""
            if again is None and not ways:
                wrong = now.proof.wrong
                why = _other_bits(wrong) if wrong else NO_LOSS
            return Known("prove", why, True, again is not None, len(ways))
        if now.phase == "tiled" and now.plain is not None:
            if len(now.observed) < len(now.ways):
                now.observed.append(graph)
            if len(now.observed) < len(now.ways):
                return Known("tiled", "", True)
            costs = tuple(self._cost(each, limit_nbytes, machine) for each in (now.plain, *now.observed))
            return Known("tiled", "", True, costs=costs)
        return Known("prove, but no head ran" if now.phase == "prove" else "whole")

    def _goes_on(self, now: _Signature, known: Known) -> bool:
        """Decide by what this rank, or all together, know. Returns whether another step is observed."""
        if now.phase == "look":
            now.phase = "prove" if known.needed and not known.why else "whole"
            if known.needed:
                self._tell(known.why)
            return now.phase == "prove"
        if now.phase == "prove":  # its graph is not that of a usual step
            self._prove_on(now, known)
            return True
        if now.phase == "tiled" and known.why:
            self._tell(known.why)
            now.best = 0
        elif now.phase == "tiled":
            if not known.costs:
                return True
            now.best = known.best
            self._tell("" if now.best else "plans without tiles are no worse")
        return False

    def _prove_on(self, now: _Signature, known: Known) -> None:
        """After a step that proves tiles, or should have."""
        if known.why:
            now.phase = "whole"
            self._tell(known.why)
        elif now.proof is not None and now.head is not None and now.proved:
            if known.again:
                now.proof = now.proof.again() or now.proof.anew()
            else:
                head = now.head
                now.ways = [_tiled(head, sizes) for sizes in now.proof.results(head.tokens)[-known.ways :]]
                now.phase = "tiled"
                now.observed = []
        now.proved = False

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
        for reader, nbytes in mode.outcome.read.items():
            if reader not in self._said:
                self._said.add(reader)
                held = reader == HELD
                what = "the loop still held logits when weights changed" if held else f"{reader} read logits"
                self._say(f"MemOpt: {what}, which are made in tiles: {format_nbytes(nbytes)} were made whole")

    # -- the plan ----------------------------------------------------------------------------------

    def solved(self, solve: Solve, machine: Machine, graph: Graph) -> Solved:
        """Solve for the step of this graph. Where it ran in tiles, its plan does, unless a plan of the step as it is keeps the
        budget in less time.
        """
        now = self._now
        if now.phase != "tiled" or now.plain is None:
            return solve(graph)
        if not now.best:
            now.phase = "whole"
            return solve(now.plain)
        graph = now.observed[now.best - 1]
        tiles = (now.ways[now.best - 1],)
        now.ways = tiles
        now.observed = []
        self._say(f"MemOpt: {tiles_text(tiles)}. Their bits were compared with those of the whole ops on this machine")
        solved = solve(graph)
        plain_nbytes = unmodified_peak(machine.usual_step(now.plain), machine)
        frontier = replace(solved.frontier, tiles=tiles, unmodified_peak_nbytes=plain_nbytes)
        return solved._replace(frontier=frontier, plan=replace(solved.plan, tiles=tiles, unmodified_peak_nbytes=plain_nbytes))

    def _cost(self, graph: Graph, limit_nbytes: int | None, machine: Machine) -> Cost:
        """What the best plan for the step of this graph costs."""
        if limit_nbytes is None:
            return 1, planner.smallest_nbytes(graph, machine)
        objective, seconds = self._config.objective, self._config.solver_seconds
        frontier = planner.solve(graph, machine, objective=objective, limit_seconds=seconds, budgets=(limit_nbytes,))
        if frontier.smallest_nbytes > limit_nbytes:
            return 1, frontier.smallest_nbytes
        return 0, frontier.graph.step_seconds + frontier.within(limit_nbytes).predicted.seconds


def why_not() -> str:
    """Why no head can run in tiles in this process; "" if one can."""
    if loaded() is None:
        return "the native engine is not there"
    return "" if loaded().can_be_hollow() else "they need a newer torch"


def tiled_head(graph: Graph, op: Op, model: nn.Module) -> TiledHead | None:
    """The head whose product an op of a step is, with all rows and columns; None if no module of the model is."""
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
    return Proof(sizes_of(head.rows), sizes_of(head.columns), rounding)


def sizes_of(n: int) -> tuple[int, ...]:
    """The sizes of tiles of `n` rows or columns that are tried, from small to large."""
    even = {n // part for part in _PARTS if n % (part * _VECTOR) == 0}  # the last tile is as large as the others
    sizes = even or {-(-n // (part * _STEP)) * _STEP for part in _PARTS}
    return tuple(sorted(size for size in sizes if size < n))


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
