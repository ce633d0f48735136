"""What FSDP2's own streams keep of a card's memory.

FSDP2 gathers weights on one stream and reduces gradients on another. torch's caching allocator gives a block back to the stream
that it was made for, so each of these streams has a pool of its own, which stays reserved when nothing in it is used: the
buffers of gathered weights during most of a step, and the reduced gradients in all of the forward. (torch's functions
`foreach_all_gather` and `foreach_reduce`; of two cards to eight, these pools are 10 to 17 % of what is reserved.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_memopt.graph import BEFORE, POOLS, UNRECORDED, Graph, Tensor
from lightning_memopt.plan.allocator.model import Allocator
from lightning_memopt.plan.allocator.settings import Settings
from lightning_memopt.units import divided


def with_pools(graph: Graph, reduced_nbytes: int | None = None) -> Graph:
    """The step of a card among several with these pools as one tensor that is always there. What the collectives hold, which
    the recorder saw as bytes that no op made, is taken out: the gathered weights' buffers of the forward, and the gradients
    that stay until the update. The same for temporaries of the update: they are of the sizes of its weights, not one.

    reduced_nbytes: of all reduced gradients; None: those that stay until the update.
    """
    gathered = _gathered(graph)
    if not gathered:
        return graph
    last = len(graph.points) - 1
    backward, update = (min((op.at for op in graph.ops if op.phase == phase), default=last) for phase in ("backward", "update"))
    shards = [t.nbytes for t in graph.tensors if t.kind == "parameter" and not t.windows and t.nbytes]
    tensors: list[Tensor] = []
    temporaries: list[Tensor] = []
    reduced = 0
    for t in graph.tensors:
        if t.name == UNRECORDED and t.nbytes:
            until_update = t.born_at < update and t.freed_at >= last - 1
            reduced += t.nbytes * until_update
            if until_update or t.born_at < backward - 1:
                t = replace(t, nbytes=0)
            elif t.born_at >= update:
                temporaries += [replace(t, nbytes=nbytes) for nbytes in divided(t.nbytes, shards)]
                t = replace(t, nbytes=0)
        tensors.append(t)
    nbytes = pool_nbytes(gathered, reduced if reduced_nbytes is None else reduced_nbytes)
    pools = Tensor(id=0, name=POOLS, nbytes=nbytes, kind="temporary", storage=0, born_at=BEFORE, freed_at=last)
    tensors += [replace(t, id=id, storage=id) for id, t in enumerate((*temporaries, pools), len(tensors))]
    return replace(graph, tensors=tuple(tensors))


def _gathered(graph: Graph) -> list[tuple[int, bool]]:
    """(bytes, whether it is the first time) of each time that the weights of a unit are gathered, in order."""
    nbytes: dict[int, int] = {}
    firsts = set()
    for t in graph.tensors:
        for i, (first, _) in enumerate(t.windows):
            nbytes[first] = nbytes.get(first, 0) + t.nbytes
            if i == 0:
                firsts.add(first)
    return [(nbytes[point], point in firsts) for point in sorted(nbytes)]


def pool_nbytes(gathered: Sequence[tuple[int, bool]], reduced_nbytes: int) -> int:
    """What the two pools reserve. `reduced_nbytes`: of all reduced gradients, which units have in proportion to their weights.

    The buffer of a unit is there until the next unit's was made. The gradients of all units are there at the same time.
    """
    gathering, reducing = Allocator(Settings.from_environment()), Allocator(Settings.from_environment())
    for i, (nbytes, _) in enumerate(gathered):
        gathering.alloc(i, nbytes)
        gathering.free(i - 1)
    units = [nbytes for nbytes, is_first in gathered if is_first]
    for i, nbytes in enumerate(reversed(units)):
        reducing.alloc(i, round(reduced_nbytes * nbytes / sum(units)))
    return gathering.reserved + reducing.reserved
