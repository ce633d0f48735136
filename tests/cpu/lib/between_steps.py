"""Loops that take memory between an update and the next forward, in a process that counts from outside (loops_count.py).

`python -m tests.cpu.lib.between_steps FOLDER` runs each case in a process of its own, forked after all imports, and writes
FOLDER/CASE.json: the budget; the largest peak by that count, from update to update, while a plan was in force; that of the
forward, backward and update alone; what the run measured and how often it planned again; and the warnings.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers would import it in each process
from torch import Tensor, nn

from benchmarks.robustness.loops_count import live_nbytes, true_peak
from lightning_memopt import optimize
from tests.cpu.lib.forked import failed, forked

torch.set_num_threads(1)
WIDTH, STEPS, ROOM = 64, 12, 700_000


def net(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def nothing(model: nn.Module, x: Tensor, kept: dict[str, Any]) -> None:
    """The loop of the others, without what they do between steps."""


def teacher(model: nn.Module, x: Tensor, kept: dict[str, Any]) -> None:
    """A larger model says what is to be learned, before the forward."""
    with torch.no_grad():
        kept["wanted"] = kept.setdefault("teacher", net(8 * WIDTH))(x)


def graph_kept(model: nn.Module, x: Tensor, kept: dict[str, Any]) -> None:
    """As above, by a user who forgot `no_grad`."""
    kept["wanted"] = kept.setdefault("teacher", net(8 * WIDTH))(x).detach()


def polyak(model: nn.Module, x: Tensor, kept: dict[str, Any]) -> None:
    """An average of the weights is updated in wider numbers than it is kept in, all at once."""
    average = kept.setdefault("average", copy.deepcopy(model).requires_grad_(False))
    wide = [torch.stack([p.detach().double()] * 16) for p in model.parameters()]
    for a, b in zip(average.parameters(), wide, strict=True):
        a.lerp_(b.mean(0).float(), 0.1)


def tested(model: nn.Module, x: Tensor, kept: dict[str, Any]) -> None:
    """The model is tested on a larger batch."""
    model.eval()
    with torch.no_grad():
        kept["score"] = model(x.repeat(8, 1)).mean()
    model.train()


CASES: dict[str, Callable[[nn.Module, Tensor, dict[str, Any]], None]] = {
    case.__name__: case for case in (nothing, teacher, graph_kept, polyak, tested)
}


def main(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    kept: dict[str, Any] = {}
    model = net()
    CASES[name](model, torch.randn(8, WIDTH), kept)  # what it keeps is there before the run
    kept.pop("wanted", None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    largest = in_step = 0
    budget = (live_nbytes() or 0) + ROOM
    with warnings.catch_warnings(record=True) as said, optimize(model, optimizer, budget=budget, verbose=False) as run:
        warnings.simplefilter("always")
        for i in range(STEPS):
            planned = run.status().phase == "planned"
            x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(i))
            if i % 2:
                CASES[name](model, x, kept)
            before = true_peak() or 0
            loss = (model(x) - kept.pop("wanted", 0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            peak = true_peak() or 0
            del loss
            if planned:
                largest, in_step = max(largest, before, peak), max(in_step, peak)
        status = run.status()
    lines = [str(w.message) for w in said if "MemOpt" in str(w.message)]
    found = {"budget": budget, "largest": largest, "step": in_step, "measured": status.measured_peak_nbytes}
    (folder / f"{name}.json").write_text(json.dumps(found | {"replans": status.replans, "said": lines}))


if __name__ == "__main__":
    sys.exit(failed([code for name in CASES for code in forked(main, [(name, Path(sys.argv[1]))])]))
