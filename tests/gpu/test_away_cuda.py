"""Training steps with everything away on a card (I1 to I6, P13): late producers, side streams, memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import DiskTier, HostTier
from tests.cpu.lib.stepped import Stepped, held, same

CUDA = torch.device("cuda", 0)
LONG = 20_000_000  # cycles: about 10 ms


class Slow(nn.Module):
    """Layers between waits of the device; `change` writes into what has been saved, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4)).to(CUDA)
        self.x = torch.randn(512, 256, device=CUDA)
        self.late = self.change = False

    def forward(self) -> Tensor:
        h = self.x
        for layer in self.layers:
            if self.late:
                torch.cuda._sleep(LONG)
            h = torch.nn.functional.dropout(torch.tanh(layer(h)).sin(), 0.1)
            if self.change:
                h.data.mul_(0.5)
        return h.square().mean()


@pytest.fixture(params=["host", "disk"])
def one(request: Any, tmp_path: Path) -> Iterator[Stepped]:
    model = Slow()
    found = Stepped(model, model, device=CUDA)
    found.depot.close()
    form = request.param
    tier = HostTier(1 << 26, CUDA) if form == "host" else DiskTier(1 << 26, tmp_path, CUDA)
    found.depot = Depot({form: tier})
    found.form = form  # type: ignore[attr-defined]
    yield found
    found.depot.close()


def rubbish() -> list[Tensor]:
    return [torch.full((512 * 256 * 4,), 0x7B, dtype=torch.uint8, device=CUDA) for _ in range(4)]


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_p13_bits_whoever_is_late(one: Stepped, late: bool, change: bool) -> None:
    one.model.late, one.model.change = late, False  # type: ignore[assignment]
    programs = [one.away(form=one.form), one.away(held(one.graph, 3), form=one.form)]  # type: ignore[attr-defined]
    one.model.change = change  # type: ignore[assignment]
    expected = one.step()
    for program in programs:
        for _ in range(3):
            loss = one.forward(program, verify=False)
            held_up = rubbish()
            del held_up
            loss.backward()
            assert same(expected, one.outcome(loss))
            del loss


def test_i1_another_stream_than_the_last_time(one: Stepped) -> None:
    """The stream is asked for at every pack and request, not remembered."""
    expected, program = one.step(), one.away(form=one.form)  # type: ignore[attr-defined]
    for n in range(4):
        stream = torch.cuda.Stream() if n % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = one.forward(program, verify=False)
            loss.backward()
            found = one.outcome(loss)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert same(expected, found)


def test_copies_and_waits_are_timed_between_events(one: Stepped) -> None:
    """In steps 2 to 9, with the same bits; a link that has no time makes the step wait, and that is seen."""
    expected, program = one.step(), one.away(form=one.form)  # type: ignore[attr-defined]
    seen = []
    for _ in range(12):
        assert same(expected, one.step(program))
        torch.cuda.synchronize()
        seen.append((one.depot.timed, one.depot.copied_seconds, one.depot.waited.seconds))
    assert [timed for timed, _, _ in seen] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
    assert seen[1][1:] == (0, 0) and all(a[1] < b[1] for a, b in pairwise(seen[1:10]))
    assert seen[9][2] > 0 and seen[9][1:] == seen[11][1:]
