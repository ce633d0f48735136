"""Optimizer state that comes while other state goes, and state that never is on the device as a whole."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import optim

from lightning_memopt.runtime import parked_states
from lightning_memopt.runtime.parked import LEAST_NBYTES
from lightning_memopt.runtime.state_dicts import ParkedState
from tests.cpu.lib.times import Known, given
from tests.cpu.parking.test_states import MIB, Trained, away, bits_left, plainly, trained_by, wide


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())


def there_nbytes(optimizer: optim.Optimizer) -> int:
    """Bytes of state that have memory."""
    tensors = (t for s in optimizer.state.values() for t in dict.values(s))
    return sum(t.untyped_storage().nbytes() for t in tensors if t.nbytes >= LEAST_NBYTES)


def test_the_next_chunk_comes_while_one_is_updated() -> None:
    """Where both take no more than the largest: bytes are those of one matrix at a time, and bits the plain ones."""
    trained = Trained(model=wide)
    there, ahead = [], []
    read = trained.states._read

    def reading(state: ParkedState, name: Any) -> None:
        read(state, name)
        there.append(there_nbytes(trained.optimizer))
        ahead.append(sum(len(s.coming) for s in trained.optimizer.state.values() if type(s) is ParkedState and s is not state))

    trained.states._read = reading  # type: ignore[method-assign]
    for _ in range(2):
        trained.step()
    assert max(there) == 2 * 128 * 256 * 4 and max(ahead) == 2
    assert not there_nbytes(trained.optimizer) and away(trained.optimizer) == 10
    trained.states.close()
    assert bits_left(trained) == plainly(2, model=wide)


def test_state_that_came_for_no_update_goes_again() -> None:
    """A parameter has no gradient in a step: its state has come ahead, and nobody reads it."""
    trained, plain = Trained(model=wide), Trained(model=wide)
    for each in (trained, plain):
        torch.manual_seed(1)
        each.backward()
        each.model[3].weight.grad = None  # type: ignore[index, union-attr]
    trained.states.park()
    trained.states.step_begins()
    trained.optimizer.step()
    trained.states.step_ended()
    plain.optimizer.step()
    assert not there_nbytes(trained.optimizer) and away(trained.optimizer) == 10
    for each in (trained, plain):
        each.states.close()
    assert bits_left(trained) == bits_left(plain)


def test_state_that_has_no_room_is_away_from_the_first_update_on() -> None:
    """Weights, gradients and state together exceed the budget, so observed steps have no state on the device either."""
    least = trained_by("min")[0].plan
    plain = trained_by(None)[1]
    for budget, first in ((least.budget_nbytes + MIB // 4, 12), (least.unmodified_peak_nbytes - MIB // 4, 0)):
        there: list[int] = []

        def adamw_seen(params: Any, lr: float, there: list[int] = there) -> optim.Optimizer:
            optimizer = optim.AdamW(params, lr=lr)
            optimizer.register_step_pre_hook(lambda *_: there.append(away(optimizer)))
            return optimizer

        status, bits = trained_by(budget, make=adamw_seen)
        assert bits == plain and there[:2] == [0, first] and status.measured_peak_nbytes <= budget
        assert 0 <= status.predicted_peak_nbytes - status.measured_peak_nbytes <= 4096


@pytest.mark.parametrize("more", [MIB // 4, 3 * MIB])
def test_a_plan_goes_on_with_what_observed_steps_have_parked(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, or a part: only the state that the plan does not park comes home."""
    gc.collect()  # what a program holds counts
    came: set[int] = set()
    plain = ParkedState.plain

    def coming(state: ParkedState) -> dict[Any, Any]:
        came.update([id(state)] if state.away else [])
        return plain(state)

    least = trained_by("min")[0].plan.budget_nbytes
    monkeypatch.setattr(ParkedState, "plain", coming)
    there: list[tuple[int, int]] = []

    def adamw_seen(params: Any, lr: float) -> optim.Optimizer:
        optimizer = optim.AdamW(params, lr=lr)
        optimizer.register_step_pre_hook(lambda *_: there.append((len(came), away(optimizer))))
        return optimizer

    status, bits = trained_by(least + more, make=adamw_seen)
    parked = sum(state.what == "state" for state in status.plan.states)
    assert (parked == 6) == (more < MIB) and bits == trained_by(None)[1]
    observed_parked = there[1][1] > 0  # where other tests hold memory, the larger budget has room for all state
    assert observed_parked or more > MIB
    assert there[-1][0] == (6 - parked if observed_parked else 0)
    assert status.measured_peak_nbytes <= least + more


def test_state_for_which_there_is_no_room_at_the_end_stays_in_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has it in the host's memory, and it comes back as it is read."""
    trained = Trained()
    trained.step()
    monkeypatch.setattr(parked_states, "_have_room", lambda states: not list(states))
    checkpoint = trained.optimizer.state_dict()
    assert away(trained.optimizer) == 8 and all(type(state) is dict for state in checkpoint["state"].values())
    assert not trained.states.close() and away(trained.optimizer) == 8
    assert "a checkpoint has it in the host's memory" in trained.said[0] and "it stays in the tier" in trained.said[1]
    fresh = Trained()
    fresh.states.close()
    fresh.optimizer.load_state_dict(checkpoint)
    plain = plainly(1)
    assert bits_left(fresh)[8:] == plain[8:]
    for state in trained.optimizer.state.values():
        dict(state)
    assert not away(trained.optimizer) and bits_left(trained) == plain


def test_a_device_has_room_for_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left:
        def __init__(self, nbytes: int | None) -> None:
            self.left_nbytes = lambda: nbytes

    trained = Trained()
    trained.step()
    states = [state for state in trained.optimizer.state.values() if type(state) is ParkedState]
    nbytes = sum(stored.nbytes for state in states for stored in state.away.values())
    for left, fits in ((None, True), (nbytes, True), (nbytes - 1, False)):
        monkeypatch.setattr(parked_states, "backend_of", lambda device, left=left: Left(left))
        assert parked_states._have_room(states) is fits
