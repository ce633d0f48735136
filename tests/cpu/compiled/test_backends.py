"""Backends other than Inductor: their regions are planned, too, and their ops stay the eager ones, bit by bit."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from lightning_memopt import optimize, torch_private
from lightning_memopt.compiled import backends
from lightning_memopt.compiled.partitioner import Regions
from lightning_memopt.torch_private import AOT_ENTRY
from tests.cpu.compiled.training import losses_of

STEPS = 9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.norm = nn.BatchNorm1d(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), 0.1, self.training)
        return self.norm(x).square().mean()


def as_it_stands(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    return module.forward


pytestmark = pytest.mark.usefixtures("bytes_are_counted")


def train(backend: Any, budget: str | int | None) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, parameters and buffers, and the status. `backend` None: eager. `budget` None: without us."""
    torch._dynamo.reset()
    gc.collect()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    call = net if backend is None else torch.compile(net, backend=backend)
    torch.manual_seed(1)
    status = None
    with contextlib.ExitStack() as stack:
        if budget is not None:
            run = stack.enter_context(optimize(net, optimizer, budget=budget, profile_steps=1, solver_seconds=2, verbose=False))
        losses = losses_of(call, optimizer, STEPS)
        if budget is not None:
            status = run.status()
    return losses, [t.detach().clone() for t in (*net.parameters(), *net.buffers())], status


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_default_partitioner", aot_autograd(fw_compiler=as_it_stands)])
def test_budgets_are_kept_exactly_with_the_bits_of_the_eager_model(backend: Any) -> None:
    gc.collect()  # budgets are of the process: what other tests have left must not go between two runs
    losses, state, _ = train(None, None)
    smallest = train(backend, "min")
    unplanned = train(backend, "50%")
    least, most = smallest[2].measured_peak_nbytes, unplanned[2].measured_peak_nbytes
    assert least < 0.8 * most
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="MemOpt")
        middle = train(backend, (least + most) // 2)
    assert middle[2].measured_peak_nbytes <= (least + most) // 2
    assert "1 of 1 compiled regions run ops again" in smallest[2].compiled
    for run_losses, run_state, status in (smallest, unplanned, middle):
        assert run_losses == losses
        assert all(torch.equal(a, b) for a, b in zip(run_state, state, strict=True))
        assert abs(status.plan.predicted.peak_nbytes - status.measured_peak_nbytes) <= 0.001 * status.measured_peak_nbytes


def test_the_way_to_the_backend_is_torchs_own_after_the_run() -> None:
    train("aot_eager", "min")
    entry = getattr(backends.backends(), AOT_ENTRY)
    assert (entry.__module__, entry.__name__) == ("torch._functorch.aot_autograd", AOT_ENTRY)


def test_settings_are_others_only_while_a_watched_model_compiles() -> None:
    inductor, autograd = torch_private.inductor_config(), torch_private.autograd_config()

    def settings() -> list[Any]:
        return [inductor.custom_partitioner_fn, inductor._post_fusion_custom_pass, autograd.enable_autograd_cache]

    class Looking(torch_private.scheduler_pass_class()):  # type: ignore[misc]
        """A pass of the user's."""

        def __call__(self, nodes: list[Any]) -> list[Any]:
            seen.append(settings())
            return nodes

        def uuid(self) -> Any:
            return "looking"

    seen: list[list[Any]] = []
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48))
    other = nn.Linear(48, 48)
    x = torch.randn(4, 48)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    compiled, beside = torch.compile(net), torch.compile(lambda x: functional.gelu(other(x)).sum())
    looking = inductor.patch(_pre_fusion_custom_pass=Looking(), fx_graph_cache=False)
    with looking, optimize(net, optimizer, profile_steps=1, verbose=False):
        before = settings()
        loss = compiled(x).square().mean()
        within, seen = seen, []
        assert settings() == before
        loss.backward()
        seen.clear()
        beside(x).backward()
    assert within and all(now != then for found in within for now, then in zip(found, before, strict=True))
    assert seen and all(found == before for found in seen)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sessions_of_two_threads_may_leave_in_any_order(backend: str) -> None:
    def settings() -> list[Any]:
        inductor, autograd = torch_private.inductor_config(), torch_private.autograd_config()
        entry = getattr(backends.backends(), AOT_ENTRY)
        return [inductor.custom_partitioner_fn, autograd.enable_autograd_cache, entry]

    before, first, second = settings(), Regions(), Regions()
    entered, entering = first.listening(), second.listening()
    entered.__enter__()
    thread = threading.Thread(target=entering.__enter__)
    thread.start()
    thread.join()
    torch._dynamo.reset()
    torch.compile(Net(), backend=backend)(torch.randn(4, 48))
    entered.__exit__(None, None, None)
    entering.__exit__(None, None, None)
    assert first.splits > 0  # Inductor also compiles patterns of its own, once
    assert second.splits == 0, "who watches in another thread is not asked"
    assert settings() == before


def test_an_error_of_the_compiler_is_the_users() -> None:
    def fails(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        raise ZeroDivisionError("of the user")

    with pytest.raises(Exception, match="of the user"):
        train(aot_autograd(fw_compiler=fails), "min")
