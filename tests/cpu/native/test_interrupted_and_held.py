"""What an exception where a forward begins or ends must not cost, and what an observed step without a meter counts."""

from __future__ import annotations

import pytest
import torch

from lightning_memopt import optimize
from lightning_memopt.native import install
from lightning_memopt.native.counting import Window
from lightning_memopt.record.below import below_autograd
from lightning_memopt.record.seams import Seams
from lightning_memopt.session.cache.plan_cache import PlanCache
from lightning_memopt.session.judge.drift import Drift
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.torch_private import AUTOGRAD
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, batches, installed, leaves_nothing, sgd, small, step


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "name", "interrupting"),
    [
        (Drift, "inputs_changed", property(interrupted)),
        (PlanCache, "pop", lambda self, *args: (dict.pop(self, *args), interrupted())),
    ],
    ids=["a forward begins", "a state is looked up"],
)
def test_a_plan_outlives_an_interrupt(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, interrupting: object) -> None:
    model, data = small(depth=1), batches(1)[0]
    with optimize(model, o := sgd(model), budget="min", **QUIET) as run:
        for _ in range(3):
            step(model, o, data)
        before = state_of(run)
        assert isinstance(before, Running)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupting)
            step(model, o, data)
        step(model, o, data)
        assert state_of(run) is before


def test_an_interrupt_behind_the_entry_of_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on, but the call that entered them has raised: they are left all the same."""
    model, data = small(depth=1), batches(1)[0]
    with leaves_nothing(model), optimize(model, o := sgd(model), budget="min", **QUIET):
        for _ in range(3):
            step(model, o, data)
        before, push = installed(), AUTOGRAD._push_saved_tensors_default_hooks
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(AUTOGRAD, "_push_saved_tensors_default_hooks", lambda *hooks: (push(*hooks), interrupted()))
            step(model, o, data)
        assert installed() == before
        step(model, o, data)


class Once:
    """A lock whose n-th entry is interrupted."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __enter__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("n", [1, 2])
def test_an_interrupt_at_the_entry_of_a_seams_lock(n: int) -> None:
    class Torchs:
        function = len

    seams: Seams[str] = Seams(lambda: [(Torchs, "function", lambda original: lambda: original("four"))])
    seams._lock = Once(n)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), seams.listening("one"):
        assert Torchs.function() == 4
    assert seams.listeners == [] and Torchs.function is len


def test_an_interrupt_behind_the_entry_of_what_is_below_autograd() -> None:
    """The context is closed when its exception goes, long after the function that entered it."""
    late = below_autograd()
    with torch.no_grad():
        late.__enter__()
    del late
    assert torch.is_grad_enabled()


def test_an_interrupted_window_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = install()
    if counter is None:
        pytest.skip("no compiler")
    with monkeypatch.context() as patch:
        patch.setattr(Window, "__init__", interrupted)
        for _ in range(100):  # more than there are
            with pytest.raises(KeyboardInterrupt):
                counter.window()
    window = counter.window()
    assert window is not None
    window.close()


def test_observed_steps_without_a_meter_count_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of many observed steps, with a budget that is far away: its room is less by what is held meanwhile."""
    if install() is None:
        pytest.skip("without the counter nobody knows what others hold")
    peaks = []
    pressure = Observation._pressure
    monkeypatch.setattr(Observation, "_pressure", lambda self: peaks.append(pressure(self)) or peaks[-1])
    model, data = small(depth=1), batches(1)[0]
    most = []
    with optimize(model, o := sgd(model), budget=1 << 30, verbose=False, profile_steps=9):
        for _ in range(3):
            step(model, o, data)
        for held in (0, 1 << 20):
            others = torch.empty(held, dtype=torch.uint8)
            peaks.clear()
            step(model, o, data)
            most.append(max(peaks))
            del others
    assert most[1] - most[0] == 1 << 20
