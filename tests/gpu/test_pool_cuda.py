"""The planned pool on a device: the bits of a run without it, requests at their addresses, torch's statistics as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from torch import Tensor, nn

from lightning_memopt import optimize
from lightning_memopt.native import CudaAllocator, cuda_allocator
from lightning_memopt.runtime.pool import PoolStatus
from tests.cpu.lib.loops import QUIET
from tests.cpu.lib.pooled import batch, classifier, same

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def allocator() -> Iterator[CudaAllocator]:
    it = cuda_allocator(DEVICE, print)  # without CUDA's headers an error, which says so: nobody would look at a skip
    yield it
    gc.collect()
    assert all(pool.arenas_nbytes() == (0, 0) for pool in it.streams(0)), "an arena is left"


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(nn.Unflatten(1, (3, 8, 8)), *layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 64, 10))


def trained(in_pool: bool, wide: bool, side: bool = False) -> tuple[list[Tensor], PoolStatus | None]:
    """(weights and buffers after twelve steps, the pool's status). `side`: the batch is made on another stream."""
    model = (convolutions() if wide else classifier()).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(1)
    other = torch.cuda.Stream(DEVICE)
    with optimize(model, optimizer, **(QUIET | {"budget": "90%", "pool": "planned" if in_pool else None})) as run:
        for _ in range(12):
            x, y = (torch.randn(64, 192), batch()[1]) if wide else batch()
            with torch.cuda.stream(other if side else torch.cuda.current_stream()):
                x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
                x = x + 0.0
            torch.cuda.current_stream().wait_stream(other)
            for made in (x, y):
                made.record_stream(torch.cuda.current_stream())
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        run.session.pool.rests()
        status = run.status().pool
    return [t.detach().cpu().clone() for t in model.state_dict().values()], status


@pytest.mark.parametrize("wide", [False, True], ids=["linear", "cudnn"])
@pytest.mark.parametrize("side", [False, True], ids=["one stream", "two streams"])
def test_the_bits_of_the_ordinary_allocator(allocator: CudaAllocator, wide: bool, side: bool) -> None:
    plain, _ = trained(False, wide, side)
    pooled, status = trained(True, wide, side)
    assert same(plain, pooled)
    assert status is not None and status.reason is None and status.addresses is not None
    assert status.steps > 0 and status.total.served > 0 and status.last.fallen == 0
    assert status.addresses.planned > 0.9 * len(status.addresses.nbytes)


def test_statistics_of_torch_are_as_before(allocator: CudaAllocator) -> None:
    trained(True, False)  # what is made once (workspaces of cuBLAS) is there
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_stats(DEVICE)["allocation.all.current"]
    _, status = trained(True, False)
    gc.collect()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_stats(DEVICE)["allocation.all.current"]) == before
    assert status is not None and status.addresses is not None
    assert torch.cuda.max_memory_allocated(DEVICE) >= status.addresses.arena_nbytes


def test_a_captured_graph_beside_the_pool(allocator: CudaAllocator) -> None:
    trained(True, False)
    x = torch.ones(1000, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    x.fill_(3)
    graph.replay()
    assert torch.equal(y.cpu(), torch.full((1000,), 6.0))
    trained(True, False)
