"""What can be asked of each kind of device, and what is said where a device lacks it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memopt import optimize
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device import backends
from lightning_memopt.device.accelerator import Accelerator
from lightning_memopt.device.backends import backend_of, current_stream, empty_caches, generators_kept
from lightning_memopt.device.cpu import Cpu
from lightning_memopt.device.cuda import Cuda
from lightning_memopt.device.determinism import is_tuned, repeats_bits
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.native import counter_of
from lightning_memopt.session.budget import budget_on
from lightning_memopt.units import host_memory_nbytes
from tests.cpu.lib.loops import sgd, small

CPU, XPU, MPS = torch.device("cpu"), torch.device("xpu", 1), torch.device("mps")


def test_each_type_of_device_has_its_backend() -> None:
    assert type(backend_of(CPU)) is Cpu and type(backend_of(torch.device("meta"))) is Cpu
    assert type(backend_of(torch.device("cuda", 1))) is Cuda and type(backend_of(XPU)) is Accelerator
    assert backend_of(XPU) is backend_of(torch.device("xpu:1"))


def test_what_plans_know_of_a_type() -> None:
    cpu, cuda, other = (kind_of(name) for name in ("cpu", "cuda", "npu"))
    assert [k.allocated_nbytes(513) for k in (cpu, cuda, other)] == [513, 1024, 513]
    assert [k.is_host for k in (cpu, cuda, other)] == [True, False, False]
    assert [k.has_segments for k in (cpu, cuda, other)] == [False, True, False]
    assert [k.slow_tier for k in (cpu, cuda, other)] == ["disk", "host", "host"]


def test_the_host_has_no_statistics_and_no_streams() -> None:
    backend = backend_of(CPU)
    assert backend.total_nbytes() == host_memory_nbytes() and backend.free_nbytes() is None
    assert current_stream(CPU) is None and backend.name == "cpu" and backend.uuid is None
    for ask in (backend.statistics, backend.allocated, backend.peak_nbytes, backend.reset_peaks):
        with pytest.raises(UnsupportedError, match="native counter"):
            ask()
    assert backend.generator_state_nbytes() == torch.get_rng_state().nbytes
    assert counter_of(XPU) is None


class Answers:
    """`torch.accelerator` of a device with two cards; what is not given is not implemented."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.asked: list[tuple[str, torch.device]] = []
        for name in ("memory_stats", "get_memory_info", "memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.accelerator, name, lambda device, name=name: self.answer(name, device), raising=False)
        self.answers = answers

    def answer(self, name: str, device: torch.device) -> Any:
        self.asked.append((name, device))
        if name not in self.answers:
            raise NotImplementedError(f"{name} is not implemented for {device}.\nMore lines.")
        return self.answers[name]


STATISTICS = {
    f"{what}.all.{when}": nbytes
    for what, both in {"requested_bytes": (10, 70), "allocated_bytes": (512, 1024)}.items()
    for when, nbytes in zip(("current", "peak"), both, strict=True)
}


def test_an_accelerator_is_asked_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each card answers for itself, and a budget counts requested bytes: its allocator is not modelled."""
    answers = Answers(monkeypatch, memory_stats=STATISTICS, get_memory_info=(600, 1000), memory_reserved=100)
    backend = Accelerator(XPU)
    assert backend.statistics() == (10, 70, (0, 0)) and backend.allocated() == (512, 1024) and backend.peak_nbytes() == 70
    assert backend.total_nbytes() == 1000 and backend.free_nbytes() == 700
    assert {device for _, device in answers.asked} == {XPU}
    assert budget_on(XPU, MemOptConfig(budget="50%")) == 500, "of the device, not of the host"
    with pytest.warns(UserWarning, match="other programs leave 700 bytes"):
        assert budget_on(XPU, MemOptConfig(budget="auto")) == 700


def test_allocators_that_count_no_requests_and_those_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = {name: nbytes for name, nbytes in STATISTICS.items() if name.startswith("allocated")}
    answers = Answers(monkeypatch, memory_stats=allocated, reset_peak_memory_stats=None)
    assert Accelerator(XPU).statistics()[:2] == (512, 1024)
    answers.answers["memory_stats"] = {}
    assert Accelerator(XPU).statistics() == (0, 0, (0, 0))


@pytest.mark.parametrize("budget", ["min", "8GiB", "auto"])
def test_a_device_that_lacks_a_capability_is_refused_by_its_name(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is observed, whatever the budget. MPS keeps no statistics."""
    Answers(monkeypatch)
    with pytest.raises(UnsupportedError, match="memory_stats for mps.*not implemented.*MEMOPT_DISABLE=1"):
        budget_on(MPS, MemOptConfig(budget=budget))
    with pytest.raises(UnsupportedError, match="newer one"):
        monkeypatch.delattr(torch.accelerator, "get_memory_info")
        Accelerator(XPU).total_nbytes()
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(UnsupportedError, match="offload='disk'"):
        Accelerator(MPS).streams  # noqa: B018


def test_a_refusal_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch)
    monkeypatch.setitem(backends._OF_TYPE, "cpu", Accelerator)
    backend_of.cache_clear()
    model = small()
    before = dict(vars(model))
    try:
        with pytest.raises(UnsupportedError, match="memory_stats"), optimize(model, sgd(model), budget="min"):
            pass
    finally:
        backend_of.cache_clear()
    assert vars(model) == before


def test_generators_and_caches_of_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators and caches of a device that this process has not used are left alone: reading them would open a context."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: XPU)
    put: list[Any] = []
    calls: list[str] = []
    used = True
    module = SimpleNamespace(
        is_initialized=lambda: used,
        get_rng_state=lambda: "state",
        set_rng_state=put.append,
        empty_cache=lambda: calls.append("emptied"),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    generators_kept()()
    empty_caches()
    assert put == ["state"] and calls == ["emptied"]
    module.get_rng_state_all, module.set_rng_state_all = lambda: ["a", "b"], put.append
    generators_kept()()
    assert put == ["state", ["a", "b"]]
    used = False
    generators_kept()()
    empty_caches()
    assert len(put) == 2 and len(calls) == 1


def test_ops_that_vary_vary_off_the_host() -> None:
    assert repeats_bits("index_add", "cpu") and not repeats_bits("index_add", "cuda") and not repeats_bits("index_add", "xpu")
    assert not is_tuned("aten::convolution", "cpu")
