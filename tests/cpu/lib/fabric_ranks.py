"""Two ranks of Fabric with gloo between them: `python -m tests.cpu.lib.fabric_ranks FOLDER`. Rank r writes what each case came
to into FOLDER/r.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptFabricDDPStrategy
from tests.cpu.lib.fabrics import QUIET, fabric_of, within
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.loops import batches, small
from tests.cpu.lib.process import digest
from tests.cpu.lib.two_ranks import WORLD, alike


class Steps(nn.Module):
    """A model whose loop calls a method that it has marked as a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small(depth=5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x).flatten(0, 1).float(), y.flatten())

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self(x, y) * 2


def train(strategy: Any, method: str, precision: str) -> dict[str, Any]:
    """An epoch over each rank's share, accumulating two backwards and clipping; batches of the last step are smaller."""
    fabric: Any = fabric_of(strategy, devices=WORLD, precision=precision)
    fabric.launch()
    torch.manual_seed(3)
    module = Steps()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), 1e-2))
    model.mark_forward_method("loss")
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*batches(1, 488)[0]), 32, shuffle=True))
    torch.manual_seed(5 + fabric.global_rank)
    losses = []
    for i, batch in enumerate([*loader]):
        last = i % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = (model if method == "forward" else model.loss)(*batch)
            fabric.backward(loss)
        losses.append(loss.item())
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    run = fabric.strategy.run(model) if hasattr(fabric.strategy, "run") else None
    return {
        "strategy": type(fabric.strategy).__name__,
        "state": digest(module.state_dict(), optimizer.state_dict()),
        "alike": alike(module),
        "losses": losses,
        "drawn": torch.rand(1).item(),
        "rebuilt": run is not None and run.plan is not None and run.plan.predicted.rebuilt_ops,
        "attached": run is not None and type(run.session.model).__name__,
    }


def rank(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(number), "NODE_RANK": "0"}  # where Fabric finds that it need not start the others
    store = distributed.FileStore(str(folder / "store"), WORLD)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
    found = {}
    for method, precision, ours in (
        ("forward", "32-true", within()),
        ("loss", "bf16-mixed", MemOptFabricDDPStrategy(budget="min", **QUIET)),
    ):
        found[method] = [train(strategy, method, precision) for strategy in ("ddp", ours)]
        distributed.barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(failed(forked(rank, [(number, Path(sys.argv[1])) for number in range(WORLD)], seconds=150)))
