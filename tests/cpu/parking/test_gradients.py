"""Gradients that are parked from backward until the update: bits, bytes, readers, holders, and what goes wrong."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_memopt import optimize
from lightning_memopt.errors import OffloadError
from lightning_memopt.native.engine import loaded
from lightning_memopt.runtime import parked_gradients
from lightning_memopt.runtime.parked_gradients import ParkedGradients
from lightning_memopt.runtime.tiers.shelf import AWAY, Shelf, is_away
from lightning_memopt.torch_private import accumulation_hooks
from tests.cpu.lib.engines import elements, needs_native
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Known, given
from tests.cpu.parking.test_states import MIB, net

pytestmark = needs_native  # without it gradients are not parked, and a line says so

NEVER: dict[str, Any] = dict(offload="disk", max_slowdown=1e6, optimizer_in_backward="never")


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())


class Parked:
    """A model whose gradients are parked as soon as they are accumulated, with a twin whose gradients are not."""

    def __init__(self, optimizer: Callable[..., optim.Optimizer] = optim.AdamW) -> None:
        self.said: list[str] = []
        self.model, self.twin = net(), net()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        nbytes: dict[Tensor, int] = {p: p.nbytes for p in self.model.parameters() if p.nbytes >= 4096}
        self.gradients = ParkedGradients(self.optimizer, nbytes, None, self.said.append)
        self.backward()

    def backward(self) -> None:
        for each in (self.model, self.twin):
            torch.manual_seed(1)
            each(torch.randn(16, 128)).square().mean().backward()

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each gradient that is parked, and the same one of the twin."""
        both = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        return [(p.grad, q.grad) for p, q in both if p.nbytes >= 4096 and p.grad is not None and q.grad is not None]

    def away(self) -> int:
        return sum(is_away(gradient) for gradient, _ in self.pairs)

    def is_same(self) -> bool:
        ours, plain = zip(*self.pairs, strict=True)
        return elements(ours) == elements(plain)


@pytest.fixture
def parked() -> Iterator[Parked]:
    parked = Parked()
    yield parked
    parked.gradients.close()
    assert not parked.away() and (not parked.pairs or parked.is_same())


# -- whoever reads or writes one that is away ------------------------------------------------------


def clipped(parked: Parked) -> None:
    for each in (parked.model, parked.twin):
        nn.utils.clip_grad_norm_(each.parameters(), 0.01)


def scaled(parked: Parked) -> None:
    for each in (parked.model, parked.twin):
        for p in each.parameters():
            assert p.grad is not None
            p.grad.mul_(3.0)


def scaled_data(parked: Parked) -> None:
    for each in (parked.model, parked.twin):
        for p in each.parameters():
            assert p.grad is not None
            p.grad.data.mul_(3)


def zeroed(parked: Parked) -> None:
    for each in (parked.model, parked.twin):
        each.zero_grad(set_to_none=False)


@pytest.mark.parametrize("write", [clipped, scaled, scaled_data, zeroed, Parked.backward])
def test_a_gradient_that_is_away_is_written(parked: Parked, write: Callable[[Parked], None]) -> None:
    """In its place: by clipping, a loop, `.data`, `zero_grad`, another backward. It stays away."""
    assert parked.away() == 4 and parked.is_same()
    write(parked)
    assert parked.away() == 4 and parked.is_same()
    with parked.gradients.there(list(parked.model.parameters())):
        assert parked.away() == 0 and parked.is_same()
    assert parked.away() == 4 and parked.is_same()


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_what_an_update_writes_is_there_after_it(kind: Callable[..., optim.Optimizer]) -> None:
    parked = Parked(kind)
    with parked.gradients.there(list(parked.model.parameters())):
        scaled(parked)
    assert parked.away() == 4 and parked.is_same()
    if kind is optim.SGD:  # Nesterov's momentum by foreach kernels: no version says so on CUDA
        with parked.gradients.there(list(parked.model.parameters())):
            scaled_data(parked)
        assert parked.away() == 4 and parked.is_same()
    parked.gradients.close()


def test_a_gradient_is_copied_and_pickled(parked: Parked) -> None:
    gradient, plain = parked.pairs[0]
    copies = [copy.deepcopy(gradient), gradient.clone(), pickle.loads(pickle.dumps(gradient))]
    copied = copy.deepcopy(parked.model)[0].weight  # type: ignore[index]
    assert all(torch.equal(each, plain) and not is_away(each) for each in copies)
    before = parked.gradients.moved_nbytes
    copied.square().sum().backward()  # the copy's gradients are its own
    assert parked.gradients.moved_nbytes == before and not is_away(copied.grad)


# -- the place of a gradient -----------------------------------------------------------------------


def test_a_gradient_that_is_held_keeps_its_bits_when_the_next_one_comes(parked: Parked) -> None:
    held = [gradient for gradient, _ in parked.pairs]
    bits = elements(held)
    for each in (parked.model, parked.twin):
        each.zero_grad()
        torch.manual_seed(2)
        each(torch.randn(16, 128)).square().mean().backward()
    assert elements(held) == bits and not any(map(is_away, held)) and parked.away() == 4


def test_nothing_is_remembered_of_gradients_that_are_gone() -> None:
    parked = Parked()
    assert len(AWAY) >= 4
    before = len(AWAY)
    parked.model.zero_grad()
    parked.twin.zero_grad()
    assert len(AWAY) == before - 4
    parked.gradients.close()


@pytest.mark.parametrize("held", [False, True])
def test_a_gradient_that_is_resized_is_not_away_for_ever(held: bool) -> None:
    """Torch gives it other memory; nobody tells us."""
    parked = Parked()
    gradients = [gradient for gradient, _ in parked.pairs]
    before = len(AWAY)
    for gradient in gradients:
        gradient.resize_(256, 128).resize_(128, 128)
    assert parked.is_same()
    if held:
        parked.model.zero_grad()
        parked.model(torch.randn(16, 128)).square().mean().backward()  # the next ones have their places
        parked.model.zero_grad()
        parked.gradients.close()
        del gradient, gradients
    else:
        parked.gradients.close()
    assert len(AWAY) == before - 4


def test_gradients_that_have_no_memory_of_their_own_stay() -> None:
    """Parts of one tensor, as the backward of `cat` makes them; sparse ones; ones that have a history."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))
            self.table = nn.Embedding(64, 64, sparse=True)

        def forward(self) -> Tensor:
            return (torch.cat([self.a, self.b]) ** 2).sum() + self.table(torch.arange(4)).sum()

    model = Joined()
    nbytes: dict[Tensor, int] = {p: p.nbytes for p in model.parameters()}
    gradients = ParkedGradients(optim.SGD(model.parameters(), lr=0.1), nbytes, None, lambda line: None)
    model().backward()
    assert not any(is_away(p.grad) for p in (model.a, model.b) if p.grad is not None)
    model.zero_grad()
    model().backward(create_graph=True)
    gradients.park()
    assert model.a.grad is not None and model.a.grad.requires_grad and not is_away(model.a.grad)
    gradients.close()
    model.zero_grad()  # a gradient with a history holds its parameter


def test_a_forked_process_keeps_what_it_had(parked: Parked) -> None:
    """What is written to the file later is not for it."""
    reads, writes = os.pipe()
    go, going = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(go, 1)
            os.write(writes, b"\1" if parked.is_same() else b"\0")
        finally:
            os._exit(0)
    for p in parked.model.parameters():
        assert p.grad is not None
        p.grad.mul_(2)
    parked.gradients.park()
    os.write(going, b"\1")
    assert os.read(reads, 1) == b"\1"
    os.waitpid(child, 0)
    for p in parked.twin.parameters():
        assert p.grad is not None
        p.grad.mul_(2)
    assert parked.away() == 4


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list descriptors and maps there")
def test_a_gradient_that_is_away_takes_no_descriptor(parked: Parked) -> None:
    """A process may have few of them. And its pages are unmapped with it."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_bytes().count(b"(deleted)")

    before, descriptors = mapped(), len(os.listdir("/proc/self/fd"))
    other = Parked()
    assert other.away() == 4 and mapped() > before
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1  # its file
    other.model.zero_grad()
    assert mapped() == before
    other.gradients.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_full_disk_keeps_gradients_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Shelf):
        def put(self, flat: Tensor, offset: int, what: str) -> memoryview:
            if offset:
                raise OffloadError(f"no space left for {what}")
            return super().put(flat, offset, what)

    monkeypatch.setattr(parked_gradients, "Shelf", Full)
    parked = Parked()
    assert parked.away() == 1 and parked.is_same()
    assert parked.said == ["MemOpt: gradients that the plan parks: no space left for a gradient: it stays on the device"]
    parked.gradients.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(24))
def test_an_interrupt_in_a_copy_loses_nothing(monkeypatch: pytest.MonkeyPatch, at: int, after: bool) -> None:
    """Wherever it comes: in the copy out, the copy back, an exchange, or between them. The step may go on."""
    parked = Parked()
    count = 0

    def interrupting(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count != at + 1:
                return function(*args, **kwargs)
            if after:
                function(*args, **kwargs)
            raise KeyboardInterrupt

        return called

    with monkeypatch.context() as patch:
        patch.setattr(parked_gradients, "copy", interrupting(parked_gradients.copy))
        patch.setattr(parked_gradients, "storage_on", interrupting(parked_gradients.storage_on))
        patch.setattr(Shelf, "put", interrupting(Shelf.put))
        patch.setattr(loaded(), "exchange", interrupting(loaded().exchange))
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                scaled(parked)
                parked.gradients.park()
                with parked.gradients.there(list(parked.model.parameters())):
                    pass
    assert parked.is_same()
    with parked.gradients.there(list(parked.model.parameters())):
        assert parked.is_same()
    parked.gradients.park()
    assert parked.away() == 4 and parked.is_same()
    parked.gradients.close()
    assert parked.is_same()


def test_gradients_for_which_there_is_no_room_at_the_end_stay_in_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have their bits, and the tier's memory lives as long as they do."""

    def full(place: Any) -> None:
        raise torch.OutOfMemoryError

    parked = Parked()
    with monkeypatch.context() as patch:
        patch.setattr(parked_gradients._Place, "bring_home", full)
        parked.gradients.close()
    assert parked.away() == 4 and parked.is_same() and "so they stay in the tier" in parked.said[0]
    shelf = weakref.ref(parked.gradients._shelf)
    del parked.gradients
    gc.collect()
    assert parked.is_same() and shelf() is not None
    parked.model.zero_grad()
    gc.collect()
    assert shelf() is None


# -- a run -----------------------------------------------------------------------------------------


def trained_by(
    budget: Any,
    loop: Callable[[nn.Module, optim.Optimizer], Iterator[None]],
    make: Callable[..., optim.Optimizer],
    build: Callable[[], nn.Module] = net,
) -> tuple[Any, list[bytes]]:
    """(status, bits of weights, state and gradients) after this loop."""
    model = build()
    optimizer = make(model.parameters())
    torch.manual_seed(1)
    status = None
    if budget is None:
        list(loop(model, optimizer))
    else:
        with optimize(model, optimizer, budget=budget, **NEVER) as run:
            for _ in loop(model, optimizer):
                status = run.status()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return status, elements([*(p.detach() for p in model.parameters()), *states, *gradients])


def clips(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(64, 128)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        yield


def accumulates(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
    for _ in range(6):
        for _ in range(3):
            model(torch.randn(64, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def zeroes_in_place(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
    for _ in range(6):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(64, 128)).square().mean().backward()
        optimizer.step()
        yield


def zeroes_before_backward(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
    for _ in range(6):
        loss = model(torch.randn(64, 128)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def scales(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(16, 128)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield


def logs_norms(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
    """And leaves out the gradient of a weight in every other step."""
    norms = []
    for i in range(6):
        optimizer.zero_grad()
        model(torch.randn(64, 128)).square().mean().backward()
        norms.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
        if not i % 2:
            model[2].weight.grad = None  # type: ignore[index]
        optimizer.step()
        norms.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
        yield
    assert len(set(norms)) >= 6


LOOPS = [clips, accumulates, zeroes_in_place, zeroes_before_backward, scales, logs_norms]
KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-3),
    "adamw foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "nesterov": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_give_the_plain_bits_and_keep_to_the_prediction(loop: Any, kind: str) -> None:
    """All state and all gradients are parked, and the peak is that of weights and one chunk."""
    status, bits = trained_by("min", loop, KINDS[kind])
    assert bits == trained_by(None, loop, KINDS[kind])[1]
    parked = [(state.what, state.parameter) for state in status.plan.states]
    assert [what for what, _ in parked] == ["state"] * 4 + ["gradient"] * 4
    assert 0 <= status.predicted_peak_nbytes - status.measured_peak_nbytes <= 4096
    assert status.measured_peak_nbytes < status.plan.unmodified_peak_nbytes - 6 * 64 * 1024  # of 12 or 8 matrices


def test_a_model_trains_whose_gradients_have_no_room() -> None:
    """Weights and gradients together exceed the budget, also in observed steps; updates in backward are not needed for it."""

    def deep() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(6) for layer in net()))

    gc.collect()  # what a program holds counts
    peaks = []

    def watched(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[None]:
        for _ in clips(model, optimizer):
            peaks.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None and not is_away(p.grad)))
            yield

    weights = sum(p.nbytes for p in deep().parameters())
    budget = 2 * weights - MIB // 8
    plain = trained_by(None, clips, KINDS["adamw"], deep)[1]
    status, bits = trained_by(budget, watched, KINDS["adamw"], deep)
    assert bits == plain and status.measured_peak_nbytes <= budget
    assert len(peaks) == 6 and max(peaks[:2]) < 16 << 10  # from the first step on; biases are not parked
    assert max(peaks) <= budget - weights  # what a plan has room for stays


def test_a_line_and_the_plan_name_gradients() -> None:
    with listening() as said:
        status, _ = trained_by("min", clips, KINDS["adamw"])
        text = said.taken()
    assert "and the gradients of 4 parameters (256.00 KiB), in the disk tier" in text
    saved = {life.tensor: life.parked_nbytes for life in status.plan.lives if life.how == "fetch"}
    parked_nbytes = sum(saved.values()) + sum(state.nbytes for state in status.plan.states)
    weights = status.plan.weights
    assert status.plan.predicted.tier_nbytes == parked_nbytes + sum(unit.nbytes for unit in weights)
    assert status.plan.predicted.moved_nbytes == 2 * parked_nbytes + sum(unit.moved_nbytes for unit in weights)


def test_a_later_run_counts_the_state_that_an_earlier_one_had_parked() -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    weights = sum(p.nbytes for p in model.parameters())
    for set_to_none in (False, True):
        with optimize(model, optimizer, budget="min", **NEVER) as run:
            for _ in range(6):
                model(torch.randn(64, 128)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none)
            status = run.status()
        assert status.plan is not None and status.measured_peak_nbytes is not None
        assert status.plan.unmodified_peak_nbytes > 4 * weights  # with gradients and two states
        assert weights < status.measured_peak_nbytes <= status.plan.predicted_peak_nbytes


def test_an_interrupt_while_hooks_are_registered_parks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when torch has registered a hook, before anybody has a handle of it."""
    model = net()
    register = Tensor.register_post_accumulate_grad_hook

    def interrupted(p: Tensor, hook: Any) -> None:
        register(p, hook)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tensor, "register_post_accumulate_grad_hook", interrupted)
        ParkedGradients(optim.SGD(model.parameters(), lr=0.1), {p: p.nbytes for p in model.parameters()}, None, print)
    assert not any(map(accumulation_hooks, model.parameters()))
