"""Python's own generator, which data loaders and augmentations draw from: a run draws nothing from it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_START = """
import random, sys
import numpy, torch
{before}
random.seed(0)
numpy.random.seed(0)
states = random.getstate(), numpy.random.get_state()[1].tobytes()
"""
_END = """
assert (random.getstate(), numpy.random.get_state()[1].tobytes()) == states
"""
_USES = {
    "imported": (
        "",
        "import lightning_memopt\nfrom lightning_memopt import optimize, find_max_batch_size\nassert 'rich' not in sys.modules",
    ),
    "a run and its report": (
        "",
        """
from lightning_memopt import optimize
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with optimize(model, optimizer, budget="min", profile_steps=1) as run:
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert "MemOpt" in run.report()
assert "solved in" in run.report() and "rich.style" in sys.modules
""",
    ),
    "beside Lightning": ("import lightning.pytorch", "from lightning_memopt import MemOptStrategy, MemOptMonitor"),
}


@pytest.mark.long
@pytest.mark.parametrize("use", _USES)
def test_nothing_is_drawn(use: str) -> None:
    before, body = _USES[use]
    program = _START.format(before=before) + body + _END
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
