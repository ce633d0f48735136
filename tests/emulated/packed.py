"""Frozen linear layers with weights of 4 bits and adapters, as QLoRA has them, without a library's kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Packed(nn.Module):
    """A frozen linear layer whose weight is packed, two numbers of 4 bits to a byte, with a scale for each row."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = n_in, n_out
        self.packed = nn.Parameter(torch.empty(n_out, n_in // 2, dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(n_out, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)
        return nn.functional.linear(x, both.to(x.dtype).sub_(8).mul_(self.scale.to(x.dtype)))


class AdaptedPacked(nn.Module):
    """With an adapter of rank 16."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.base = Packed(n_in, n_out)
        self.down, self.up = nn.Parameter(torch.empty(16, n_in)), nn.Parameter(torch.empty(n_out, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.T) @ self.up.T


def pack_and_adapt(model: nn.Module, blocks: nn.Module) -> None:
    """Freeze a model, and pack and adapt each linear layer of its blocks."""
    model.requires_grad_(False)
    for module in list(blocks.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, AdaptedPacked(child.in_features, child.out_features))
