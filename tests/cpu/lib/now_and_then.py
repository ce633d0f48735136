"""Loops that do more in some steps than in others, in a process that counts torch's allocations from outside (loops_count.py).

`python -m tests.cpu.lib.now_and_then FOLDER` runs each case in a process of its own, forked after all imports, and writes
FOLDER/CASE.json: for each step with a plan whether it is one that does more, its peak by that count above what was there before
the model, and the peak that the plan in force predicted; if the parameters have the bits of a plain run; and what was said.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # optimizers would import it in each process
from torch import Tensor, nn

from benchmarks.robustness.loops_count import live_nbytes, true_peak
from lightning_memopt import optimize
from tests.cpu.lib.forked import failed, forked

torch.set_num_threads(1)
WIDTH = 64


class Net(nn.Module):
    """A trunk, a head, and a second head that a loop may train on now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))])
        self.head, self.aside = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.asked = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.trunk(x)
        if self.asked:
            return torch.cat([self.head(out), self.aside(out).sin().mean(1, keepdim=True).expand(-1, 8)])
        return self.head(out)


class Loop(NamedTuple):
    """One of the loops.

    every: number of steps from one that does more to the next.
    first: the first step that does more.
    steps: how many steps there are.
    step: trains once: `(model, optimizer, batch, more, kept)`, where `kept` lasts from step to step.
    """

    every: int
    first: int
    steps: int
    step: Callable[[Net, torch.optim.Optimizer, Tensor, bool, dict[str, Any]], None]


def _updated(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def penalty(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, more: bool, kept: dict[str, Any]) -> None:
    """A gradient penalty, as of a lazily regularised discriminator."""
    x = x.detach().requires_grad_()
    loss = model(x).square().mean()
    if more:
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + grad.square().sum()
    _updated(optimizer, loss)


def matrix(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, more: bool, kept: dict[str, Any]) -> None:
    """The agreement of all pairs of samples is logged, between the forward and the backward."""
    out = model(x)
    if more:
        like = out.detach() @ out.detach().T
        kept["agreement"] = (like > 0).float().mean()
    _updated(optimizer, out.square().mean())


def auxiliary(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, more: bool, kept: dict[str, Any]) -> None:
    """A second head has a loss of its own."""
    model.asked = more
    _updated(optimizer, model(x).square().mean())


def averaged(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, more: bool, kept: dict[str, Any]) -> None:
    """An averaged copy of the model is evaluated within the backward, when the head has its gradient."""
    if "hook" not in kept:
        copy = Net()
        copy.load_state_dict(model.state_dict())

        def evaluated(_: Tensor) -> None:
            if kept["more"]:
                with torch.no_grad():
                    kept["of copy"] = copy(kept["x"].repeat(3, 1)).mean()

        kept["hook"] = model.head.weight.register_hook(evaluated)
    kept["more"], kept["x"] = more, x
    _updated(optimizer, model(x).square().mean())


def factors(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, more: bool, kept: dict[str, Any]) -> None:
    """Statistics of the inputs of layers are taken, and kept until they are taken again."""
    if "hooks" not in kept:

        def taken(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if kept["more"]:
                wide = inputs[0].detach().repeat(1, 3)
                kept[f"of {id(layer)}"] = wide.T @ wide

        kept["hooks"] = [m.register_forward_pre_hook(taken) for m in model.trunk if isinstance(m, nn.Linear)]
    kept["more"] = more
    _updated(optimizer, model(x).square().mean())


def between(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, more: bool, kept: dict[str, Any]) -> None:
    """Something is made between the backward and the update."""
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if more:
        torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).sum()
    optimizer.step()


def casts(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, more: bool, kept: dict[str, Any]) -> None:
    """The backward runs under autocast, too, whose cache holds the cast weights for so long."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
        if more:
            loss.backward()
    if not more:
        loss.backward()
    optimizer.step()


LOOPS: dict[str, Loop] = {
    "penalty every 4th": Loop(4, 0, 16, penalty),
    "penalty every 4th, later": Loop(4, 4, 28, penalty),
    "matrix every 2nd": Loop(2, 0, 12, matrix),
    "matrix every 3rd, later": Loop(3, 4, 24, matrix),
    "auxiliary every 2nd": Loop(2, 1, 12, auxiliary),
    "averaged every 3rd": Loop(3, 0, 12, averaged),
    "averaged every 5th, later": Loop(5, 6, 30, averaged),
    "factors every 2nd": Loop(2, 0, 12, factors),
    "factors every 3rd": Loop(3, 0, 12, factors),
    "between every 3rd": Loop(3, 0, 12, between),
    "casts every 2nd": Loop(2, 0, 12, casts),
}


def trained(name: str, budget: int | str | None) -> tuple[list[tuple[bool, int, int]], list[Tensor]]:
    """((does more, peak, predicted) of each planned step, the parameters)."""
    loop = LOOPS[name]
    torch.manual_seed(0)
    gc.collect()
    base = live_nbytes() or 0
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    kept: dict[str, Any] = {}
    found = []
    with contextlib.nullcontext() if budget is None else optimize(model, optimizer, budget=budget) as run:
        for i in range(loop.steps):
            before = None if run is None else run.status()
            true_peak()
            more = i >= loop.first and (i - loop.first) % loop.every == 0
            x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(i))
            loop.step(model, optimizer, x, more, kept)
            peak = (true_peak() or 0) - base
            if before is not None and before.predicted_peak_nbytes is not None:
                found.append((more, peak, before.predicted_peak_nbytes))
    return found, [p.detach().clone() for p in model.parameters()]


def main(name: str, folder: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        planned, ours = trained(name, "min")
        _, plain = trained(name, None)
    found = {"planned": planned, "same": all(map(torch.equal, ours, plain)), "said": said.getvalue()}
    (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(failed([code for name in LOOPS for code in forked(main, [(name, Path(sys.argv[1]))])]))
