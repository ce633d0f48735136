"""One training run in a process of its own, for tests that compare processes: `python -m tests.cpu.lib.process MODE FOLDER`.

`plain` runs where `lightning_memopt` cannot be imported; `memopt` and `open` in a run of `optimize`. Each writes what it ended
with to FOLDER/MODE.json, and FOLDER/MODE.pt, a checkpoint made after half of the steps. `open` then leaves the interpreter with
runs that are still open, one of them in an observed step and one in a planned one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

torch.set_num_threads(1)
STEPS = 6


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [m for _ in range(3) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2))]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def data(i: int) -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(i))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    model(data(i)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(*states: Any) -> str:
    """A hash of all bits of models' and optimizers' states and of the generator."""
    found = hashlib.sha256()
    for t in [*torch.utils._pytree.tree_leaves(states), torch.get_rng_state()]:
        found.update(t.numpy().tobytes() if isinstance(t, torch.Tensor) else repr(t).encode())
    return found.hexdigest()


def main(mode: str, folder: Path) -> None:
    if mode == "plain":
        sys.modules["lightning_memopt"] = None  # type: ignore[assignment]
        block: Any = contextlib.nullcontext()
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if mode != "plain":
        from lightning_memopt import optimize

        block = optimize(model, optimizer, budget="min", profile_steps=2, verbose=False)
    found: dict[str, Any] = {}
    torch.manual_seed(5)
    with block as run:
        for i in range(STEPS):
            step(model, optimizer, i)
            if i == STEPS // 2:
                checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
                torch.save(checkpoint, folder / f"{mode}.pt")
        found["state"] = digest(model.state_dict(), optimizer.state_dict())
        found["enabled"] = run is not None and run.session.enabled
        found["planned"] = run is not None and run.plan is not None and run.plan.predicted.rebuilt_ops
    given = folder / "given.json"
    if mode != "plain" and given.exists():
        from lightning_memopt.plan import plan_to_json, read_plan
        from lightning_memopt.solvers import planner

        graph = read_plan(given)[1]
        frontier = planner.solve(graph)
        plans = [plan_to_json(frontier.plan(c.predicted.peak_nbytes + 4096), graph)["plan"] for c in frontier.candidates]
        found["plans"] = [plan | {"solve_seconds": 0.0} for plan in plans]
    if mode == "plain":
        found["resumed"] = {path.stem: resumed(path) for path in folder.glob("*.pt")}
    found["threads"] = threading.active_count()
    (folder / f"{mode}{os.environ.get('PYTHONHASHSEED', '')}.json").write_text(json.dumps(found))
    if mode == "open":
        from lightning_memopt import optimize

        global left
        left = []
        for steps in (0, 3):
            model = model_of()
            optimizer = torch.optim.AdamW(model.parameters())
            run = optimize(model, optimizer, budget="min", profile_steps=1, verbose=False)
            run.__enter__()
            for i in range(steps):
                step(model, optimizer, i)
            left += [run, model(data(0)).square().mean()]


def resumed(path: Path) -> str:
    """What a plain run ends with that goes on from a checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(checkpoint["model"], strict=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"])
    for i in range(STEPS // 2 + 1, STEPS):
        step(model, optimizer, i)
    return digest(model.state_dict(), optimizer.state_dict())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
