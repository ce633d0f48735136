"""Who may borrow whose plan, and how many states and plans there may be: by shapes alone, nothing is run."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memopt.session.buckets import Observing
from lightning_memopt.session.signatures import PLANS, Buckets, serves, signature_of


def signature(*shape: int) -> Any:
    return signature_of(0, (True,), (torch.empty(shape, device="meta"), torch.empty(shape[:1], dtype=torch.long)))


def test_serves() -> None:
    """Who may borrow from whom."""
    assert serves(signature(8, 64), signature(8, 64)) and serves(signature(8, 64), signature(8, 63))
    assert serves(signature(8, 64), signature(7, 64)) and serves(signature(8, 64), signature(15, 32))
    assert not serves(signature(8, 64), signature(8, 65)) and not serves(signature(8, 64), signature(7, 65))
    assert not serves(signature(8, 64), signature(17, 32)) and not serves(signature(8, 64), signature(8, 64, 1))
    other = signature_of(1, (True,), (torch.empty(8, 64), torch.empty(8, dtype=torch.long)))
    assert not serves(signature(8, 64), other)


def test_states_are_bounded() -> None:
    """Ever longer batches: no more states than `PLANS`, the oldest make room, and planning becomes rare."""
    found = Buckets()
    waiting = 0
    for n in range(1, 501):
        state = found.enter(signature(4, n), 1)
        assert isinstance(state, Observing)
        waiting += state.waits
        assert len(found) <= PLANS and found.planned <= PLANS + n // 50
    assert waiting == 500 - found.planned and found.planned == PLANS + 500 // 50
    assert not found.keys() & {signature(4, n) for n in range(1, 400)}
