"""What observed steps of one input signature have shown of their loss head, and what the next one is for.

    phase    what the next observed step shows                                                  then
    look     which module makes the logits (plan/logits.py), and whether the step is too large  prove or whole
    prove    which sizes of tiles give the bits of whole ops, and what else reads the logits    prove, tiled or whole
    tiled    the graph of a step in tiles, once for each way in which it may run                a plan
    whole    nothing more: the head stays whole                                                 a plan

A step can run in tiles in two ways: the gradient of the logits is never whole, or it is made whole once, from tiles, which
takes a product less. The plans of both are compared with the one for the step as it is. What keeps the budget in the least
time wins. Where logits do not fit into the device's memory, the step never runs as it is: a step that looks also proves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from lightning_memopt.graph import Graph, Op
from lightning_memopt.plan import Machine, TiledHead, tiles_text
from lightning_memopt.plan.logits import head_of
from lightning_memopt.runtime.tiles import Proof, Sizes
from lightning_memopt.session.ranks.shared_heads import Cost, KnownHead
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.session.solve.solving import Solved

_PARTS = (2, 4, 8, 16)
"""Tiles of which sizes are tried: these shares of the logits."""
_VECTOR, _STEP = 16, 64
"""Numbers of rows and columns of a tile are multiples of the first, or of the second where tiles are not equally large: kernels
work on blocks of so many.
"""
NO_HEAD = "no product of matrices was found from which a loss takes the logarithm of a softmax"
NO_LOSS = "no loss reads the logits in a way that can run on tiles"
NO_STEP = "its product of matrices does not run where it was seen: steps begin with other calls of the model"
_PATIENCE = 3
"""Maximum number of steps that may miss the head: then it stays whole."""
BLANK = 32
"""Maximum number of steps whose comparisons may show nothing: a head that begins with zeros, and a rate that begins with 0."""
_RESTARTS = 4
"""Maximum number of times that tiles are compared anew because something has changed."""
_NEVER: Cost = (2, 0.0)
"""What the step as it is costs where it does not fit into the device's memory."""


@dataclass(eq=False)
class LossHead:
    """See the module. After an observed step, one of `looked`, `proven` and `ran` says what is known now; `follows` takes what
    this rank, or all ranks together, know; and `solved` makes the plan, once no further step is observed.

    phase: what the next observed step is for.
    head: the head, if there is one.
    plain: the graph of the step as it is; None where it did not fit.
    proof: what the step that is over has compared, or the next one compares; None for the first sizes.
    proved: the step that is over has compared tiles.
    missed: how many steps in a row should have run the head in tiles, and did not come to it.
    blank: how many steps have compared numbers that show nothing about tiles.
    flags: the numeric settings under which tiles were compared, the number of threads among them.
    ways: the tiles in which it may run.
    observed: the graphs of steps that ran in these ways, as far as they have.
    changed: a planned step read logits otherwise than the step that was compared: if another is observed, it compares again.
    best: which plan is the best: 0 for the one of the step as it is, else that of a way, from 1 on.
    """

    phase: Literal["look", "prove", "tiled", "whole"] = "look"
    head: TiledHead | None = None
    plain: Graph | None = None
    proof: Proof | None = None
    proved: bool = False
    missed: int = 0
    blank: int = 0
    flags: object = None
    ways: Sequence[TiledHead] = ()
    observed: list[Graph] = field(default_factory=list)
    changed: bool = False
    restarts: int = 0
    best: int = 0

    def compares_anew(self) -> str:
        """What was compared is not what runs now, so the step that begins compares again. If that happens time and again, the
        head stays whole: returns why.
        """
        self.restarts += 1
        if self.restarts > _RESTARTS:
            self.phase = "whole"
            return "the loss, or numeric settings, change time and again"
        self.phase = "prove"
        self.proof = None
        self.observed = []
        if self.changed:
            self.plain = None  # of another loss
        self.changed = False
        return ""

    # -- the step that is over ---------------------------------------------------------------------

    def compared(self, proof: Proof, flags: object) -> None:
        """It has compared tiles. `flags`: the numeric settings of its forward."""
        self.proof = proof
        self.proved = True
        self.flags = flags

    def looked(self, graph: Graph, model: nn.Module, needed: bool, cannot: Callable[[TiledHead], str]) -> KnownHead:
        """It shows which module makes the logits. needed: the step is too large. `cannot`: says why a head must stay whole, or
        "".
        """
        op = head_of(graph)
        logits = self.proof.logits if self.proved and self.proof is not None else None
        self.head = None if op is None else tiled_head(graph, op, model, logits)
        self.plain = None if self.proved else graph
        if self.head is None:
            why = NO_HEAD
        else:
            why = cannot(self.head)
        return KnownHead("look", why, needed)

    def proven(self) -> KnownHead:
        """It has compared tiles, or should have."""
        if not self.proved or self.proof is None or self.head is None:
            return self.missed_head()
        self.missed = 0
        size, nbytes = self.proof.logits
        if nbytes:  # tiles are for as many tokens as were compared
            self.head = replace(self.head, tokens=size[0], rows=size[0], unmade_nbytes=nbytes)
        op = self.proof.shows_nothing
        self.blank += bool(op)
        again = self.proof.again(waits=self.blank < BLANK)
        ways = self.proof.results(self.head.tokens) if again is None else []
        why = ""
        if again is None and not ways:
            wrong = self.proof.wrong
            why = other_bits(wrong) if wrong else blank_text(op) if op else NO_LOSS
        return KnownHead("prove", why, True, again is not None, len(ways))

    def missed_head(self) -> KnownHead:
        """It should have run the head in tiles, and did not: it begins with another call, or with a batch of another shape."""
        self.missed += 1
        return KnownHead(f"{self.phase}, but no head ran", NO_STEP if self.missed >= _PATIENCE else "")

    def ran(self, graph: Graph, cost: Callable[[Graph], Cost]) -> KnownHead:
        """It ran in tiles, and had this graph. `cost`: of the best plan for a graph."""
        if len(self.observed) < len(self.ways):
            self.observed.append(graph)
        if len(self.observed) < len(self.ways):
            return KnownHead("tiled", "", True)
        plain = _NEVER if self.plain is None else cost(self.plain)
        return KnownHead("tiled", "", True, costs=(plain, *map(cost, self.observed)))

    # -- what follows ------------------------------------------------------------------------------

    def follows(self, known: KnownHead, alone: bool, tell: Callable[[str], None]) -> bool:
        """Decide. Returns whether another step is observed. alone: no other ranks decide. `tell`: says why no head runs in
        tiles.
        """
        if self.phase == "look":
            self.phase = "prove" if known.needed and not known.why else "whole"
            if known.needed:
                tell(known.why)
            if not self.proved:
                return self.phase == "prove"
            if alone and self.phase == "prove" and self._has_compared_head():
                self._prove_on(self.proven(), tell)
            else:  # ranks prove together; or another product was taken for that of the head
                self.proof, self.proved = None, False
            return True  # a graph of a step that proves is not that of a usual step
        if self.phase == "prove":
            self._prove_on(known, tell)
            return True
        if self.phase == "tiled" and known.why:
            tell(known.why)
            self.best = 0
        elif self.phase == "tiled":
            if not known.costs:
                return True
            self.best = known.best
            tell("" if self.best else "plans without tiles are no worse")
        return False

    def _has_compared_head(self) -> bool:
        if self.proof is None or self.head is None:
            return False
        return self.proof.logits[0] == (self.head.tokens, self.head.classes)

    def _prove_on(self, known: KnownHead, tell: Callable[[str], None]) -> None:
        if known.why:
            self.phase = "whole"
            tell(known.why)
        elif self.proof is not None and self.head is not None and self.proved:
            if known.again:
                self.proof = self.proof.again() or self.proof.anew()
            else:
                head = self.head
                self.ways = [_tiled(head, sizes) for sizes in self.proof.results(head.tokens)[-known.ways :]]
                self.phase = "tiled"
                self.observed = []
        self.proved = False

    def solved(self, solve: Callable[[Graph], Solved], machine: Machine, graph: Graph, say: Callable[[str], None]) -> Solved:
        """Solve for the step of this graph. Where it ran in tiles, its plan does, unless a plan of the step as it is keeps the
        budget in less time.
        """
        if self.phase != "tiled":
            return solve(graph)
        if not self.best and (self.plain is not None or not self.observed):
            self.phase = "whole"
            return solve(self.plain or graph)
        graph = self.observed[self.best - 1]
        tiles = self.ways = (self.ways[self.best - 1],)
        self.observed = []
        fit = 0 if self.proof is None else self.proof.compared
        on = f", for {fit:,} of {tiles[0].tokens:,} rows: more do not fit" if fit else ""
        say(f"MemOpt: {tiles_text(tiles)}. Their bits were compared with those of the whole ops on this machine{on}")
        solved = solve(graph)
        changes: dict[str, Any] = {"tiles": tiles}
        if self.plain is not None:
            changes["unmodified_peak_nbytes"] = unmodified_peak(machine.usual_step(self.plain), machine)
        return solved._replace(frontier=replace(solved.frontier, **changes), plan=replace(solved.plan, **changes))


def tiled_head(graph: Graph, op: Op, model: nn.Module, logits: tuple[Sequence[int], int] | None = None) -> TiledHead | None:
    """The head whose product an op of a step is, with all rows and columns; None if no module of the model is. `logits`: their
    sizes and bytes, where the graph does not have them, because they had no bytes.
    """
    path = op.scope.partition("#")[0]
    product = graph.tensors[op.outputs[0]]
    size, nbytes = (product.size, product.nbytes) if product.nbytes or logits is None else logits
    if len(size) < 2 or path not in dict(model.named_modules()):
        return None
    classes = size[-1]
    rows = prod(size[:-1])
    return TiledHead(module=path, classes=classes, tokens=rows, rows=rows, columns=classes, unmade_nbytes=nbytes)


def other_bits(op: str) -> str:
    """Why a head is whole whose tiles were compared."""
    return f"tiles give other bits than the whole op on this machine ({op})"


def blank_text(op: str) -> str:
    """Why a head is whole whose comparisons have shown nothing."""
    return f"{op} added up only zeros, nan or too few numbers in {BLANK} steps, which proves nothing"


def parts(n: int) -> tuple[int, ...]:
    """The sizes of tiles that are tried, from small to large, for so many rows or columns."""
    even = {n // part for part in _PARTS if n % (part * _VECTOR) == 0}  # the last tile is as large as the others
    uneven = {-(-n // (part * _STEP)) * _STEP for part in _PARTS if n % (part * _VECTOR)}
    return tuple(sorted(size for size in even | uneven if size < n))


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


def sizes_of(head: TiledHead) -> Sizes:
    """The tiles in which a head runs."""
    return Sizes(head.rows, head.columns, head.tokens, frozenset(head.ops), frozenset(head.assembled), frozenset(head.rounded))
