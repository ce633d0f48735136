"""The graph of a CUDA device has the bytes that the allocator gives; a storage has the bytes that were requested."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.program import Program
from lightning_memopt.solvers.rollout import keep_all
from tests.cpu.lib.engines import observed_graph

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class _Small(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


def test_small_tensors_match_their_tensor_of_the_plan() -> None:
    graph = observed_graph(lambda: (_Small(), torch.randn(3, 2)))
    at = next(t for t in graph.tensors if t.kind == "activation")
    assert at.nbytes == 24
    rounded = tuple(replace(t, nbytes=512 * -(-t.nbytes // 512)) for t in graph.tensors)
    learned = Learned(Program(replace(graph, device="cuda", tensors=rounded), keep_all(graph)))
    assert [learned.fits_storage(nbytes, CUDA, at.id) for nbytes in (0, 24, 512, 513)] == [False, True, True, False]
    assert not learned.fits_storage(24, CPU, at.id)

    host = tuple(replace(t, nbytes=0) if t.id == at.id else t for t in rounded)
    learned = Learned(Program(replace(graph, device="cuda", tensors=host), keep_all(graph)))
    assert learned.fits_storage(24, CPU, at.id)
    assert not learned.fits_storage(24, CUDA, at.id)
