"""What FSDP2's streams keep of a card: sizes of pools, and the step that has them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from build import random_step

from lightning_memopt.graph import BEFORE, POOLS, UNRECORDED, Graph, Tensor
from lightning_memopt.plan.peak import at_peak
from lightning_memopt.plan.side_streams import pool_nbytes, with_pools
from lightning_memopt.solvers.rollout import keep_all

MIB = 1 << 20
BLOCKS = 32
LLAMA = (1050677248 * 2, 218112000 * 2)
MIXTRAL = (262148096 * 2, 1451270144 * 2)


@pytest.mark.parametrize(
    ("units", "ranks", "expected"),
    [(LLAMA, 2, 7724 + 2424), (LLAMA, 8, 252 + BLOCKS * 54 + 2424), (MIXTRAL, 8, 11200 + 6042)],
    ids=["llama-8b on 2", "llama-8b on 8", "mixtral-8x7b on 8"],
)
def test_pools_are_those_that_torchs_allocator_had(units: tuple[int, int], ranks: int, expected: int) -> None:
    """MiB of the segments of both streams on an emulated device, with the models of `tests/emulated/sharded.py`; on 8 cards,
    those of Llama's gradients by arithmetic: 250.5 and 52.002 MiB in segments of 2 MiB each.
    """
    rest, block = units
    forward = [(rest, True)] + [(block, True)] * BLOCKS
    gathered = [*forward, *[(block, False)] * BLOCKS]
    assert pool_nbytes(gathered, (rest + BLOCKS * block) // ranks) == pytest.approx(expected * MIB, abs=2 * MIB)


def sharded() -> Graph:
    """A step whose only weight is gathered twice, with a buffer in the forward and a reduced gradient at its end."""
    graph = random_step(random.Random(0), 20)
    backward = min(op.at for op in graph.ops if op.phase == "backward")
    last, n = len(graph.points) - 1, len(graph.tensors)
    weight = Tensor(
        id=n, name="weight", nbytes=40 * MIB, kind="parameter", storage=n, born_at=BEFORE, freed_at=last,
        windows=((0, 1), (backward, backward)),
    )  # fmt: skip
    found = [
        Tensor(id=n + 1 + i, name=UNRECORDED, nbytes=nbytes, kind="temporary", storage=n + 1 + i, born_at=born, freed_at=freed)
        for i, (nbytes, born, freed) in enumerate([(40 * MIB, 0, 0), (20 * MIB, backward, last), (3 * MIB, backward, backward)])
    ]
    return replace(graph, tensors=(*graph.tensors, weight, *found))


@pytest.mark.parametrize(("reduced", "expected"), [(None, 20), (10 * MIB, 10), (0, 0)])
def test_what_collectives_hold_is_in_the_pools(reduced: int | None, expected: int) -> None:
    """Two buffers, since the second one is made before the first is freed, and the gradient. The rest stays as it was."""
    graph = sharded()
    pooled = with_pools(graph, reduced)
    (pools,) = [t for t in pooled.tensors if t.name == POOLS]
    assert pools.nbytes == (80 + expected) * MIB and pools.born_at == BEFORE
    left = [t.nbytes for t in pooled.tensors if t.name == UNRECORDED and t.nbytes]
    assert left == [3 * MIB]
    assert at_peak(pooled, keep_all(pooled)).by(1)[POOLS] == pools.nbytes


def test_a_model_that_is_not_sharded_has_none() -> None:
    graph = random_step(random.Random(0), 20)
    assert with_pools(graph) is graph
