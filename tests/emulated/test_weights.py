"""Weights in the host's memory: bits, bytes, the order of copies and kernels; models larger than the card."""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize, to_device
from lightning_memopt.plan import WeightParking
from lightning_memopt.runtime import install_native
from lightning_memopt.runtime.parked_weights import ParkedWeights
from lightning_memopt.runtime.tiers.shelf import is_away
from tests.cpu.lib.parked import parked_of
from tests.cpu.lib.said import listening
from tests.emulated import device

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")

MIB = 1 << 20


class Block(nn.Module):
    """Two frozen matrices of 1 MiB each, and a bias that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)
        self.bias = nn.Parameter(torch.zeros(256))
        self.dropout = nn.Dropout(0.1)
        for layer in (self.wide, self.narrow):
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(x)))) + self.bias


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


def train(model: nn.Module, budget: Any, early: str = "auto", batch: int = 64, **options: Any) -> tuple[list[Tensor], Any]:
    """The losses and weights of some steps, and the run's status. `early`: whether parameters are updated in backward."""
    torch.manual_seed(1)
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    losses = []

    def loop(last: Any = contextlib.nullcontext) -> None:
        for _ in range(7):
            optimizer.zero_grad()
            loss = model(torch.randn(batch, 256, device="cuda")).square().mean()
            with last():
                loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())

    status = None
    if budget is None:
        loop()
    else:
        options |= {"optimizer_in_backward": early, "max_slowdown": 1e6}
        with optimize(model, optimizer, budget=budget, **options) as run:
            loop(run.last_backward if early == "always" else contextlib.nullcontext)
            status = run.status()
    return [*losses, *(p.detach().cpu() for p in model.parameters())], status


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_weights_come_from_the_host() -> None:
    """Bits are the plain ones, nothing is read before its copy has ended, and reserved bytes are as predicted."""
    plain, _ = train(model_of().cuda(), None)
    before = device.races()
    without, least = train(model_of().cuda(), "min", offload="none")
    found, status = train(model_of().cuda(), "min", offload="host")
    assert equal(found, plain) and equal(without, plain) and device.races() == before
    assert len(status.plan.weights) == 6 and least.plan.budget_nbytes - status.plan.budget_nbytes >= 6 * MIB
    assert status.measured_peak_nbytes == status.predicted_peak_nbytes <= status.plan.budget_nbytes


def test_a_model_that_never_was_on_the_card() -> None:
    plain, _ = train(model_of().cuda(), None)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    model = to_device(model_of(), "cuda")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert torch.cuda.memory_allocated() - held < MIB and all(p.is_cuda and is_away(p) for p in frozen)
    copied = copy.deepcopy(model[0]).cpu()  # type: ignore[index]
    assert torch.equal(copied.wide.weight, model_of()[0].wide.weight)  # type: ignore[index]
    outside = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")  # counted, although weights are not there that could be
    found, status = train(model, 28 * MIB, offload="host")
    assert equal(found, plain) and status.plan.weights and all(map(is_away, frozen))
    assert (
        status.measured_peak_nbytes == status.predicted_peak_nbytes <= 28 * MIB < outside.nbytes + sum(p.nbytes for p in frozen)
    )


def test_weights_make_room_for_an_observed_step() -> None:
    """The card has room for the weights, and for little else: they leave while the first step runs."""
    plain, _ = train(model_of().cuda(), None, batch=512)
    model = model_of().cuda()
    gc.collect()
    torch.cuda.empty_cache()
    before, room = device.races(), torch.cuda.memory_reserved() + 22 * MIB  # one segment of large blocks takes 20
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        with listening() as said:
            found, status = train(model, room, offload="host", batch=512)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert said.taken().count("MemOpt: an observed step has no memory left: weights leave") == 1
    assert equal(found, plain) and device.races() == before
    assert status.plan.weights and status.measured_peak_nbytes == status.predicted_peak_nbytes


def test_weights_are_copied_while_another_module_computes() -> None:
    """With room for two blocks. Nothing reads a weight before its copy has ended, and nothing gets memory that a copy uses."""
    plain, _ = train(model_of().cuda(), None)
    least = train(model_of().cuda(), "min", offload="host")[1].plan.budget_nbytes
    before = device.races()
    found, status = train(model_of().cuda(), least + 4 * MIB, offload="host")
    assert equal(found, plain) and device.races() == before
    assert any(any(unit.beside) for unit in status.plan.weights)
    assert status.measured_peak_nbytes == status.predicted_peak_nbytes <= status.plan.budget_nbytes


def test_a_backward_that_raises_loses_no_write() -> None:
    """It leaves weights on the device. A write through `.data` moves no version counter, and a copy ahead has the old bytes."""
    install_native(lambda line: None)
    layers = nn.Sequential(*(nn.Linear(256, 256, device="cuda") for _ in range(3))).requires_grad_(False)
    plain = copy.deepcopy(layers)
    x = torch.randn(16, 256, device="cuda", requires_grad=True)
    with parked_of(layers) as parked:
        parked.copy_ahead([in_backward("0", "1"), in_backward("1", "2")])
        for k in (1, 2):
            parts = [x]
            for layer in layers:
                parts.append(layer(parts[-1]))
            parts[k].register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                parts[-1].sum().backward()
            torch.cuda.synchronize()
            for model in (layers, plain):
                for p in model.parameters():
                    p.data.mul_(0.9)
            assert torch.equal(layers(x), plain(x))
        assert all(map(torch.equal, layers.parameters(), plain.parameters()))


def in_backward(path: str, beside: str) -> WeightParking:
    """It is copied ahead in backward."""
    return WeightParking(
        module=path, tier="host", nbytes=1, tier_nbytes=4096, beside=("", beside), moved_nbytes=2, copy_seconds=0.0, seconds=0.0
    )


@pytest.mark.parametrize("then", ["an update", "another block", "the next block"])
def test_blocks_that_are_called_on_streams_of_their_own(then: str) -> None:
    """A copy ahead is let go of on another stream than that of its memory, which asks for memory then."""
    install_native(lambda line: None)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(256, 256, device="cuda") for _ in range(3))).requires_grad_(False)
    ahead = WeightParking(
        module="1", tier="host", nbytes=1, tier_nbytes=4096, beside=("0",), moved_nbytes=1, copy_seconds=0.0, seconds=0.0
    )
    x = torch.randn(16, 256, device="cuda")
    expected = [layer(x) for layer in layers]
    aside, before = torch.cuda.Stream(), device.races()

    def lets_go(parked: ParkedWeights) -> None:
        if then == "an update":
            parked.backward_ended()
        else:
            at = 2 if then == "another block" else 1
            assert torch.equal(layers[at](x), expected[at])

    with parked_of(layers) as parked:
        parked.copy_ahead([ahead])
        for _ in range(3):
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                first = layers[0](x)
            lets_go(parked)
            with torch.cuda.stream(aside):
                ones = [torch.ones(256, 256, device="cuda") for _ in range(4)]
            torch.cuda.synchronize()
            assert torch.equal(first, expected[0]) and all(one.eq(1).all() for one in ones)
    assert device.races() == before


class Trained(nn.Module):
    """Two matrices of 1 MiB each, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(x))))


def trained_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Trained() for _ in range(6)))


@pytest.mark.parametrize("early", ["never", "always"])
def test_weights_that_are_trained_come_from_the_host(early: str) -> None:
    """Their updates write them on the device, where fused kernels move no version counter, and they are copied out. With room
    for two blocks, they are copied ahead. Nothing is read before it is written.
    """
    plain, _ = train(trained_model().cuda(), None)
    without, least = train(trained_model().cuda(), "min", early, offload="none")
    smallest, status = train(trained_model().cuda(), "min", early, offload="host")
    before = device.races()
    assert equal(without, plain) and equal(smallest, plain)
    assert len(status.plan.weights) == 6 and all(unit.are_trained for unit in status.plan.weights)
    assert least.plan.budget_nbytes - status.plan.budget_nbytes >= 8 * MIB
    assert status.measured_peak_nbytes == status.predicted_peak_nbytes <= status.plan.budget_nbytes
    found, status = train(trained_model().cuda(), status.plan.budget_nbytes + 6 * MIB, early, offload="host")
    assert equal(found, plain) and device.races() == before
    assert any(any(unit.beside) for unit in status.plan.weights)
    assert status.measured_peak_nbytes == status.predicted_peak_nbytes <= status.plan.budget_nbytes


def test_a_model_that_is_trained_and_never_was_on_the_card() -> None:
    plain, _ = train(trained_model().cuda(), None)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    model = to_device(trained_model(), "cuda", trained=True)
    assert torch.cuda.memory_allocated() - held < MIB
    found, status = train(model, 11 * MIB, offload="host")
    assert equal(found, plain) and status.plan.weights
    assert status.measured_peak_nbytes == status.predicted_peak_nbytes <= 11 * MIB < sum(p.nbytes for p in model.parameters())
