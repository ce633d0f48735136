"""Llama 3 at its real sizes: 8 billion parameters, and 70 billion as QLoRA trains them, without a library's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BLOCKS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "use_cache": False,
}
"""Of Llama 3 8B, and of Mixtral 8x7B."""
_WORDS, _LENGTH = 128256, 8192
configs: Any = transformers
"""Its configurations take keywords that their signatures do not name."""


def in_bfloat16(build: Callable[[], Any]) -> Any:
    """What this builds, in bfloat16 from the beginning: in float32 a card has no room for it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build()
    finally:
        torch.set_default_dtype(torch.float32)


def llama_8b(length: int) -> Any:
    """Llama 3 8B, bfloat16, for samples of this length."""
    config = configs.LlamaConfig(vocab_size=_WORDS, max_position_embeddings=max(_LENGTH, length), **BLOCKS)
    return in_bfloat16(lambda: transformers.LlamaForCausalLM(config))


def llama_70b() -> Any:
    """Llama 3 70B, bfloat16, frozen: the linear layers of its blocks packed to 4 bits, with adapters of rank 16."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = configs.LlamaConfig(vocab_size=_WORDS, max_position_embeddings=_LENGTH, **BLOCKS | sizes)

    def build() -> Any:
        model: Any = transformers.LlamaForCausalLM(config)
        _pack_and_adapt(model, model.model.layers)
        return model

    return in_bfloat16(build)


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


def _pack_and_adapt(model: nn.Module, blocks: nn.Module) -> None:
    """Freeze a model, and pack and adapt each linear layer of its blocks."""
    model.requires_grad_(False)
    for module in list(blocks.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, AdaptedPacked(child.in_features, child.out_features))
