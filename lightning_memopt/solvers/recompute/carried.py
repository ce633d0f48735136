"""Carry a plan from one recording of a step over to another one: that of other sizes, or of a device that was not there.

A plan is carried as its runs: which ops run again, and at which of autograd's requests. The lives then follow from the other
graph, so that tensors which only that one has are kept, and ops which only the first one had are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_memopt.graph import Graph
from lightning_memopt.plan import Life, LoweringError, Rebuild, lower, validate
from lightning_memopt.solvers.rollout import Rollout

_APART = 64
"""Maximum number of ops in a row that only one of two recordings has."""
_AGAIN = 3
"""Number of ops with the same names after which two recordings are the same again."""

_SEED_NBYTES = 512
"""Maximum number of bytes of a seed, which some kernels keep on the host, and others in a block of the device."""


def paired(names: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]]:
    """The positions of equal names, in order. What is only in one of the sequences is left out."""
    pairs = []
    i = j = 0
    while i < len(names) and j < len(others):
        if names[i] == others[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        i, j = _joined(names, others, i, j)
    return pairs


def _joined(names: Sequence[str], others: Sequence[str], i: int, j: int) -> tuple[int, int]:
    """The next positions from which the names are the same again."""
    for apart in range(1, _APART + 1):
        for x in range(apart + 1):
            a, b = names[i + x : i + x + _AGAIN], others[j + apart - x : j + apart - x + _AGAIN]
            if a and a == b:
                return i + x, j + apart - x
    return i + 1, j + 1


@dataclass(frozen=True, eq=False)
class Pairing:
    """Two recordings of a step, and what of the forward of `first` is in `second`, too."""

    first: Graph
    second: Graph

    @cached_property
    def ops(self) -> dict[int, int]:
        """Forward op of the first graph -> the same one of the second."""
        first, second = self.first.forward, self.second.forward
        pairs = paired([op.name for op in first], [op.name for op in second])
        return {i: j for i, j in pairs if len(first[i].outputs) == len(second[j].outputs)}

    @property
    def others(self) -> int:
        """How many ops that autograd saves results of are in one forward only: in the one where there are more of them. Ops
        without saves may be metrics, or what a loop does beside the model.
        """
        same = {(i, j) for i, j in self.ops.items() if i in self._saved[0] and j in self._saved[1]}
        return max(map(len, self._saved)) - len(same)

    @property
    def share(self) -> float:
        """The share of these ops that are in both."""
        return 1 - self.others / max(1, *map(len, self._saved))

    @cached_property
    def _saved(self) -> tuple[frozenset[int], frozenset[int]]:
        """The forward ops that autograd saves results of, in either graph."""
        first, second = (
            frozenset(op.id for op in graph.forward if any(t in graph.saves_of for t in op.outputs))
            for graph in (self.first, self.second)
        )
        return first, second

    @cached_property
    def tensors(self) -> dict[int, int]:
        """Tensor of the first graph -> the same one of the second, where an op of the forward reads or makes it."""
        found: dict[int, int] = {}
        for i, j in self.ops.items():
            op, same = self.first.ops[i], self.second.ops[j]
            found.update(zip(op.outputs, same.outputs, strict=True))
            if len(op.inputs) == len(same.inputs):
                for t, other in zip(op.inputs, same.inputs, strict=True):
                    found.setdefault(t, other)
        return found

    @property
    def resized(self) -> int:
        """How many results of ops have other sizes, the smallest ones excepted."""
        made = (t for i in self.ops for t in self.first.ops[i].outputs)
        sizes = ((self.first.tensors[t].nbytes, self.second.tensors[self.tensors[t]].nbytes) for t in made)
        return sum(nbytes != other and max(nbytes, other) > _SEED_NBYTES for nbytes, other in sizes)

    def asked_at(self, point: int) -> int | None:
        """The point at which autograd makes the same request in the second graph; None where it does not."""
        _, id, occurrence = self.first.points[point]
        tensor = self.first.saves[id].tensor
        same = self.second.saves_of.get(self.tensors.get(tensor, -1), ())
        saves = self.first.saves_of[tensor]
        if len(same) != len(saves):
            return None
        points = same[[save.id for save in saves].index(id)].unpacked_at
        return points[occurrence] if occurrence < len(points) else None


def carried(pairing: Pairing, lives: Iterable[Life]) -> tuple[Life, ...] | None:
    """The lives, for the first graph, of a plan that recomputes, as lives for the second one; None where that one does not
    allow them.
    """
    roll = Rollout(pairing.second)
    for point, steps in lower(pairing.first, lives).segments.items():
        at = pairing.asked_at(point)
        ops = [pairing.ops[step.op] for step in steps if isinstance(step, Rebuild) and step.op in pairing.ops]
        if at is not None:
            roll.run(at, [op for op in ops if pairing.second.ops[op].recomputable])
    carried = roll.lives()
    try:
        return carried if validate(pairing.second, carried, lower(pairing.second, carried)).ok else None
    except LoweringError:
        return None
