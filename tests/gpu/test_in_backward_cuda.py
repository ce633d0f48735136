"""Updates in backward on CUDA: the plain loop's bits, whichever kernels optimizers take by default there, in fewer bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from lightning_memopt import optimize
from lightning_memopt.plan.allocator.settings import SMALL_SEGMENT_NBYTES
from tests.cpu.lib.early import OPTIMIZERS, counted
from tests.cpu.lib.harness import same_bits

DEVICE = "cuda"
STEPS, WIDTH = 7, 512


class Net(nn.Module):
    """Matrices alone, which all optimizers take; tied weights and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + nn.functional.dropout(nn.functional.gelu(layer(h)), 0.1)
        return self.head(h)


def trained(name: str, mixed: bool, **options: Any) -> tuple[list[Tensor], Any]:
    """What a loop leaves, and the session's state where it ran inside `optimize`."""
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    x = torch.randint(0, 256, (8, 16), device=DEVICE)
    optimizer = OPTIMIZERS[name](model.parameters())
    torch.manual_seed(1)
    losses = []
    with optimize(model, optimizer, verbose=False, profile_steps=2, **options) if options else contextlib.nullcontext() as run:
        for _ in range(STEPS):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
            with run.last_backward() if run is not None else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    state = [optimizer.state[p][key] for p in model.parameters() for key in sorted(optimizer.state[p])]
    left = [t for t in (*losses, *model.parameters(), *state) if isinstance(t, Tensor)]
    # on the host: on the device they would count as held outside of the steps of the next run
    return [t.detach().cpu() for t in left], run and run.status()


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p19_exact(name: str, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = counted(monkeypatch)
    plain, _ = trained(name, mixed)
    usual, at_end = trained(name, mixed, budget="min")
    assert not updates
    found, early = trained(name, mixed, budget="min", optimizer_in_backward="always")
    assert all(map(same_bits, plain, usual)) and all(map(same_bits, plain, found))
    assert updates and not early.deviates
    assert early.plan.predicted_peak_nbytes < at_end.plan.predicted_peak_nbytes
    # the runs before this one left small tensors (weights of checksums), and one more small segment may be needed beside theirs
    assert early.measured_peak_nbytes <= early.plan.budget_nbytes + SMALL_SEGMENT_NBYTES
