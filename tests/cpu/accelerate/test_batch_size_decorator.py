"""`find_max_batch_size` around a training function, instead of Accelerate's decorator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

from lightning_memopt.accelerate import find_max_batch_size  # noqa: E402
from lightning_memopt.errors import ConfigError, InfeasibleError, UnsupportedError  # noqa: E402
from lightning_memopt.integrations import accelerate as front  # noqa: E402
from tests.cpu.lib.launched import same  # noqa: E402
from tests.cpu.lib.loops import batches, counted_nbytes, loss_of, small  # noqa: E402
from tests.cpu.lib.prepared import fresh, run_of  # noqa: E402
from tests.cpu.lib.said import Said  # noqa: E402

SEEN: list[int] = []
"""Sizes that were trained. In a variable around the function, trials would leave no trace."""
QUIET: dict[str, Any] = dict(profile_steps=1, verbose=False)


@pytest.fixture(autouse=True)
def nothing_was_seen() -> None:
    SEEN.clear()


def trained(accelerator: Any, size: int, model: Any) -> tuple[Any, ...]:
    """Four steps, with accumulation; what they end with, and the measured peak."""
    SEEN.append(size)
    accelerator.free_memory()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in batches(8, 10 * size):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    run = run_of(accelerator, model)
    peak = None if run is None else run.status().measured_peak_nbytes
    return peak, [losses, model.state_dict(), optimizer.state_dict(), torch.rand(2), size]


def test_the_largest_size_is_found_and_leaves_no_trace(said: Said) -> None:
    """The model comes from outside; the training with the size that was found is the plain one with that size."""
    front._install()
    accelerator = fresh(gradient_accumulation_steps=2)
    budget = counted_nbytes() + 1_500_000
    model = small()

    @find_max_batch_size(starting_batch_size=40, budget=budget, profile_steps=1)
    def train(batch_size: int, model: Any) -> tuple[Any, ...]:
        return trained(accelerator, batch_size, model)

    torch.manual_seed(9)
    peak, found = train(model)
    size = SEEN[-1]
    assert 1 < size < 40 and SEEN.count(size) == 2 and len(SEEN) <= 9 and size + 1 in SEEN
    assert peak <= budget
    assert f"batch size {size} is the largest up to 40 that fits" in said.taken()
    front.end()
    plain = fresh(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    twin = small()
    torch.manual_seed(9)
    _, expected = trained(plain, size, twin)
    assert same(found, expected)


def test_a_size_that_fits_is_taken_at_once() -> None:
    accelerator = fresh()
    train = find_max_batch_size(lambda size: trained(accelerator, size, small()), 16, budget="1GiB", **QUIET)
    train()
    assert SEEN == [16, 16]


def test_what_cannot_be_searched(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    accelerator = fresh()
    tiny = find_max_batch_size(lambda size: trained(accelerator, size, small()), 4, budget=1000, **QUIET)
    with pytest.raises(InfeasibleError):
        tiny()
    assert sorted(set(SEEN)) == [1, 2, 4]
    assert find_max_batch_size(lambda size: size, 8, budget="1GiB", **QUIET)() == 8
    assert "never called Accelerator.prepare" in said.taken()
    with pytest.raises(TypeError, match="without that argument"):
        find_max_batch_size(lambda size: size)(8)
    with pytest.raises(ConfigError, match="fits every batch size"):
        find_max_batch_size(lambda size: trained(accelerator, size, small()), 4, budget="min", **QUIET)()
    with pytest.raises(ConfigError, match="starting_batch_size is 0"):
        find_max_batch_size(starting_batch_size=0)

    def gan(batch_size: int) -> None:
        models = [small(1), small(2)]
        accelerator.prepare(*models, *(torch.optim.SGD(m.parameters(), 0.1) for m in models))

    with pytest.raises(UnsupportedError, match="several models"):
        find_max_batch_size(gan, 4, budget="1GiB", **QUIET)()
    monkeypatch.setattr("lightning_memopt.integrations.accelerate_batch_size.several_processes", lambda: True)
    with pytest.raises(UnsupportedError, match="one process"):
        find_max_batch_size(gan, 4, budget="1GiB", **QUIET)()


def test_other_errors_are_the_functions_own() -> None:
    def broken(batch_size: int) -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        find_max_batch_size(broken, 4, budget="1GiB", **QUIET)()
    assert front._process.trial is None and front._process.now is None
