"""A plan that gets addresses later is the same plan for those who borrow it, and for what it parks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_memopt import optimize
from lightning_memopt.plan import Addresses
from lightning_memopt.session.judge.states import Running
from lightning_memopt.session.observe.observing import Waiting
from lightning_memopt.session.pooling import _decided
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, batches, sgd, small, train

ADDRESSES = Addresses(nbytes=(64,), offsets=(0,), until=(1,), arena_nbytes=64, max_live_nbytes=64, needed_nbytes=64)


def test_a_borrower_with_larger_tensors_waits_whoever_has_addresses() -> None:
    model = small(width=64, depth=6)
    with optimize(model, o := sgd(model), **(QUIET | {"budget": "min", "profile_steps": 1})) as run:
        train(model, o, batches(3, size=64))
        lender = state_of(run)
        assert isinstance(lender, Running)
        before = lender.lend()
        lender.plan = replace(lender.plan, addresses=ADDRESSES)
        after, own = lender.lend(), lender.lend()
        _decided(own, ADDRESSES)
        for borrower in (before, after, own):
            borrower.drift.excess_nbytes = 1 << 30
            assert isinstance(borrower.step_ended(lambda _: None, None), Waiting)


def test_addresses_move_nothing_into_another_tier(tmp_path: Path) -> None:
    model = small(width=64, depth=6)
    options = {"budget": "min", "offload": f"disk:{tmp_path}", "recompute": False, "profile_steps": 1}
    with optimize(model, o := sgd(model), **(QUIET | options)) as run:
        train(model, o, batches(3, size=64))
        state = state_of(run)
        assert isinstance(state, Running) and state.depot is not None
        depot = state.depot
        _decided(state, ADDRESSES)
        train(model, o, batches(1, size=64))
        assert state.depot is depot and len(run.session._offloading.depots._of_plan) == 1
