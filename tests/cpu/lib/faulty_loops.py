"""Training scripts with one fault each that only shows within a budget, judged as `python -m benchmarks loops` judges.

Run as a program, in a process that counts: a line of JSON, the name of a script with what was found.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.robustness.loops_judge import sizes, within
from benchmarks.robustness.loops_run import Watching, forked
from benchmarks.robustness.scripts import Log, Script

STEPS = 6
FAULTS = ("wrong", "draws", "hungry", "aborts")


def _train(watch: Any, log: Log, steps: int, fault: str = "") -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert isinstance(watch, Watching)
    watched = watch.budget is not None
    with watch(model, optimizer):
        for i in range(steps):
            x = torch.randn(64, 32)
            loss = model(x).square().mean()
            extra: Tensor | None = torch.empty(1 << 20) if fault == "hungry" and watched and i == steps - 1 else None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del extra
            log(loss.item())
    if fault == "wrong" and watched:
        with torch.no_grad():
            bits = model[0].bias.view(torch.int32)
            bits[3] ^= 1
    if fault == "draws" and watched:
        torch.rand(1)
    if fault == "aborts" and watched:
        os.abort()
    return {"model": model, "sgd": optimizer}


def main() -> None:
    run = {fault: partial(forked, Script(fault, "faulty", partial(_train, fault=fault), steps=STEPS)) for fault in FAULTS}
    plain = run["wrong"](None)
    counted = sizes(plain)
    assert counted is not None
    for fault in FAULTS:
        print(json.dumps({fault: within(run[fault], plain, counted[0])}), flush=True)


if __name__ == "__main__":
    main()
