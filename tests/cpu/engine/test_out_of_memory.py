"""An op of an observed step for which the device has no memory: what can be rebuilt is evicted, and the op runs again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_memopt import optimize, register_op
from lightning_memopt.runtime.engine.observing import ObservingEngine
from tests.cpu.lib.loops import QUIET

fails: list[int] = []
"""How often each call of `hungry` finds no memory before it runs: the next call first."""


@torch.library.custom_op("memopt_test::hungry", mutates_args=())
def hungry(x: torch.Tensor) -> torch.Tensor:
    if fails and fails[0] > 0:
        fails[0] -= 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    if fails:
        fails.pop(0)
    return x * 2


hungry.register_fake(torch.empty_like)
hungry.register_autograd(lambda ctx, grad: grad * 2)


class Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return hungry(x).square().mean()


def trained(budget: str | None, times: list[int]) -> tuple[list[torch.Tensor], str | None]:
    torch.manual_seed(0)
    model = Hungry()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fails[:] = times

    def steps() -> Iterator[torch.Tensor]:
        for _ in range(5):
            loss = model(torch.randn(64, 32))
            loss.backward()
            yield from (loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None))
            optimizer.step()
            optimizer.zero_grad()

    if budget is None:
        return list(steps()), None
    with optimize(model, optimizer, budget=budget, **QUIET) as run:
        seen = list(steps())
        return seen, run.status().phase


@pytest.fixture(autouse=True)
def pure() -> None:
    register_op(torch.ops.memopt_test.hungry.default, "pure")


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_an_observed_step_gives_way_and_is_exact(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gave: list[bool] = []
    original = ObservingEngine.gives_way

    def noted(self: ObservingEngine) -> bool:
        gave.append(original(self))
        return gave[-1]

    monkeypatch.setattr(ObservingEngine, "gives_way", noted)
    expected, _ = trained(None, [])
    found, phase = trained(budget, [2])
    assert gave == [True, True] and not fails, "each time, half of what may be evicted"
    assert phase == "planned" and len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("evicted", [False, True])
def test_a_rebuild_of_an_observed_step_gives_way_and_is_exact(evicted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of `hungry` is kept, and its check finds no memory; or it is evicted, and its rebuild finds none."""
    gave: list[bool] = []
    original = ObservingEngine.gives_way
    monkeypatch.setattr(ObservingEngine, "gives_way", lambda self: gave.append(True) or original(self))
    if evicted:
        pack = ObservingEngine.pack

        def evicting(self: ObservingEngine, t: torch.Tensor) -> object:
            packed = pack(self, t)
            made_by = {v.call.func.name(): v for v in self.evictable.values() if v.call is not None}
            if version := made_by.get("memopt_test::hungry"):
                self.evict(version)
            return packed

        monkeypatch.setattr(ObservingEngine, "pack", evicting)
    expected, _ = trained(None, [])
    found, phase = trained("min", [0, 1])
    assert not fails and gave == [True] * evicted
    assert phase == "planned" and len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_where_nothing_is_left_to_evict_the_error_is_the_users() -> None:
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"1\.00 GiB"):
            trained("min", [1 << 30])
    finally:
        fails.clear()
    expected, _ = trained(None, [])
    assert all(map(torch.equal, trained("min", [])[0], expected)), "nothing stays behind"
