"""A module that trains: `build` makes (model, optimizer, step), and run as a script it takes eight steps."""

from __future__ import annotations

_TEXT = """
import torch
from torch import nn

def build():
    model = {model}
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn({batch}, 64)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step

if __name__ == "__main__":
    _, _, step = build()
    for _ in range(8):
        step()
"""


def training_script(model: str, batch: int) -> str:
    """The text of the module. `model`: an expression that makes a model of 64 features."""
    return _TEXT.format(model=model, batch=batch)
