"""The requests of an update on CUDA: an allocator serves each tensor by itself, and many small ones fit into cached blocks."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from lightning_memopt.graph import BEFORE, Graph, Op, Point, Tensor, unmodified_levels
from lightning_memopt.plan import Machine
from lightning_memopt.session.observe.graphs import pieces, with_state
from lightning_memopt.session.solve.foresight import with_early_updates, with_update
from lightning_memopt.session.solve.rehearsal import Update, rehearse, with_gradients
from tests.cpu.lib.observed_graph import CPU

MIB = 1 << 20


def two_activations(device: str) -> Graph:
    """A step that makes two tensors of 128 MiB, one after the other, and has freed both before its update."""
    tensors = [Tensor(id=i, name="h", nbytes=128 * MIB, kind="activation", storage=i, born_at=i, freed_at=1) for i in range(2)]
    ops = [Op(id=i, name="op", phase="forward", inputs=(), outputs=(i,) if i < 2 else (), at=i) for i in range(3)]
    points = tuple(Point("op", i) for i in range(3))
    return Graph(ops=tuple(ops), tensors=tuple(tensors), saves=(), points=points, device=device)


def reserved_mib(graph: Graph) -> int:
    reserve = Machine().reserve(graph)
    assert reserve is not None
    nbytes = reserve(())
    assert nbytes % MIB == 0
    return nbytes // MIB


def test_temporaries_of_an_update_fit_into_cached_blocks() -> None:
    """By the allocator's rules: sixteen blocks of 16 MiB are cut from two of 128, and one of 256 needs a segment of its own."""
    graph = two_activations("cuda")
    assert reserved_mib(graph) == 256
    many, one = ((16 * MIB,) * 16, (256 * MIB,))
    assert reserved_mib(with_update(graph, Update(beside=many))) == 256
    assert reserved_mib(with_update(graph, Update(beside=one))) == 512


def test_state_is_many_tensors() -> None:
    """The first update makes it in cached blocks: two of 48 MiB in one of 128, the third in the other, and pins both."""
    graph, state = two_activations("cuda"), (48 * MIB,) * 3
    of_later_steps = with_update(with_state(graph, state), Update())
    assert [t.nbytes for t in of_later_steps.tensors if t.born_at == BEFORE] == [48 * MIB] * 3
    assert reserved_mib(of_later_steps) == 2 * 128 + 2 * 128


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_are_the_same_in_one_request_or_in_many(device: str) -> None:
    """On the CPU only live bytes count, so one request represents all of them."""
    graph, update = two_activations(device), Update(state=(8, 8, 24), beside=(100, 40, 60))
    later = with_early_updates(with_update(graph, update), [(1, (7, 9))])
    assert unmodified_levels(later) == [40 + 128 * MIB, 40 + 256 * MIB + 16, 40, 40 + 200]
    assert len(later.tensors) == 2 + (2 if device == "cpu" else 3 + 2 + 2)


@pytest.mark.parametrize("foreach", [True, False])
def test_sizes_are_those_of_the_parameters(foreach: bool) -> None:
    """All parameters are updated at once, or one after the other."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 4))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = optim.AdamW(model.parameters(), foreach=foreach)
    update = rehearse(optimizer, with_gradients(optimizer), CPU, lambda nbytes: nbytes)
    of_parameters = [p.nbytes for p in model.parameters()]
    moments = [nbytes for nbytes in update.state if nbytes > 4]  # beside the number of steps
    assert sorted(moments) == sorted(of_parameters * 2)
    temporaries = [nbytes for nbytes in update.beside if nbytes in of_parameters]
    assert set(temporaries) == set(of_parameters) if foreach else max(temporaries) == max(of_parameters)
    assert len(temporaries) >= len(of_parameters) if foreach else len(temporaries) <= 3


def test_pieces_add_up() -> None:
    assert pieces(10, (4, 4, 4)) == (4, 4, 2)
    assert pieces(10, (4,)) == (4, 6)
    assert pieces(0, (4,)) == () and pieces(3, ()) == (3,)
