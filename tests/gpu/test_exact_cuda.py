"""Random ops, loops inside `optimize` and streams on CUDA: the same bits as the plain run, and the budget kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from lightning_memopt import optimize
from lightning_memopt.integrations.plain import Run
from tests.cpu.lib.harness import assert_exact, dropping, outcome, same_bits
from tests.cpu.lib.models import Body, Noisy, data, made, verified

TYPES = [torch.float32, torch.bfloat16]


class Factories(Body):
    """Random factories that read no tensor: which generator they draw from says the device that they are given alone."""

    def between(self, h: torch.Tensor, i: int) -> torch.Tensor:
        noise = torch.rand(h.shape, device=h.device, dtype=h.dtype)
        mask = torch.rand(h.shape, device="cuda") < 0.5
        host = torch.rand(h.shape).to(h)  # of the CPU's generator
        return nn.functional.dropout(h * (noise + host).exp(), 0.2) * mask


class LSTMCells(nn.Module):
    """torch's fused cell, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for now in x.unsqueeze(0).expand(5, -1, -1).unbind():
            state = self.cell(torch.tanh(now), state)
        return state[0]


class Attends(nn.Module):
    """Attention without dropout, of a length that is not a multiple of a tile."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(x.shape[0], -1, 4, 48).transpose(1, 2).split(16, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_is_rebuilt_without_distrust(dtype: torch.dtype) -> None:
    """Also where memory is not filled: what no kernel writes is not compared."""
    torch.use_deterministic_algorithms(False)
    x = data(4, 50, 64).to("cuda", dtype)
    model = made(Attends).to("cuda", dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not verified(model, lambda m: m(x).square().sum()).opaque_ops


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("factory", [Body, Noisy, Factories, LSTMCells])
def test_dropped_tensors_are_rebuilt_with_the_same_bits(factory: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    x = data(8, 16).to("cuda", dtype)
    model = made(factory).to("cuda", dtype)
    plain = outcome(copy.deepcopy(model), lambda m: m(x).square().sum(), drop=False)
    again = outcome(copy.deepcopy(model), lambda m: m(x).square().sum(), drop=False)
    assert_exact(plain, again)
    replayed = outcome(copy.deepcopy(model), lambda m: m(x).square().sum(), drop=True)
    assert replayed.dropped > 0
    assert_exact(plain, replayed)


def _trained(model: nn.Module, x: torch.Tensor, steps: int, make: Any, **options: Any) -> tuple[list[Any], Run | None]:
    """Losses and parameters after some steps, inside `optimize` where there are options."""
    optimizer = make(model.parameters())
    torch.manual_seed(5)
    losses = []

    def loop() -> None:
        for _ in range(steps):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())

    run = None
    if options:
        with optimize(model, optimizer, verbose=False, profile_steps=2, **options) as run:
            loop()
    else:
        loop()
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.rand(4, device="cuda")], run


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_a_loop_inside_optimize_is_the_plain_one_and_keeps_its_budget(make: Any, dtype: torch.dtype) -> None:
    x = data(4096, 512).to("cuda", dtype)
    model = made(lambda: Noisy(512, 6)).to("cuda", dtype)
    plain, _ = _trained(copy.deepcopy(model), x, 7, make)
    torch.cuda.empty_cache()
    found, run = _trained(copy.deepcopy(model), x, 7, make, budget="min")
    assert run is not None
    assert all(same_bits(a, b) for a, b in zip(plain, found, strict=True))
    assert run.plan is not None and run.plan.predicted.rebuilt_ops > 0
    frontier = run.status().frontier
    assert frontier is not None and frontier.reserve is not None
    unmodified = frontier.reserve(frontier.candidates[-1].lives)
    for share in (0.5, 0.25):
        budget = int(frontier.smallest_nbytes + share * (unmodified - frontier.smallest_nbytes))
        torch.cuda.empty_cache()
        found, run = _trained(copy.deepcopy(model), x, 7, make, budget=budget)
        assert run is not None and all(same_bits(a, b) for a, b in zip(plain, found, strict=True))
        measured = run.status().measured_peak_nbytes
        assert measured is not None and run.plan is not None
        assert measured <= budget
        assert abs(measured / run.plan.predicted.reserved_nbytes - 1) <= 0.03


class TwoStreams(nn.Module):
    """Two branches on streams of their own, joined at the end; both save what has to be rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Body(512, 3), Body(512, 3)
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = torch.sin(x)
        found = []
        for stream, branch in zip(self.streams, (self.a, self.b), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            start.record_stream(stream)
            with torch.cuda.stream(stream):
                found.append(branch(start.exp()))
        for stream, y in zip(self.streams, found, strict=True):
            torch.cuda.current_stream().wait_stream(stream)
            y.record_stream(torch.cuda.current_stream())
        return found[0] * found[1]


def test_branches_on_streams_of_their_own() -> None:
    """Rebuilds run on the stream that asks; a delay on one of them, and freed memory that is used again, would show a race."""
    torch.manual_seed(0)
    model, x = TwoStreams().cuda(), torch.randn(4096, 512, device="cuda")

    def step(drop: bool) -> list[torch.Tensor | None]:
        model.zero_grad()
        if drop:
            with dropping() as engine:
                loss = model(x).square().sum()
            assert engine.evictions
        else:
            loss = model(x).square().sum()
        for stream in model.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
        loss.backward()
        rubbish = [torch.full((4096, 512), float("nan"), device="cuda") for _ in range(8)]
        del rubbish
        torch.cuda.synchronize()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    plain = step(False)
    for _ in range(5):
        assert all(same_bits(a, b) for a, b in zip(plain, step(True), strict=True))
