"""Models that nobody here wrote: `transformers` configurations with random weights, small widths, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()
Blocks = Callable[[nn.Module], list[nn.Module]]


def gpt2(layers: int = 8) -> tuple[nn.Module, dict[str, torch.Tensor], Blocks]:
    """GPT-2 of the first gate: batch 8, 256 tokens, width 256, dropout on."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=256, n_head=4, vocab_size=1024, n_positions=256, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    x = torch.randint(0, 1024, (8, 256))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": x, "labels": x}, lambda m: list(m.transformer.h)


def llama(layers: int = 8) -> tuple[nn.Module, dict[str, torch.Tensor], Blocks]:
    """Llama: batch 8, 256 tokens, width 256, grouped-query attention, attention dropout on."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        use_cache=False,
        attention_dropout=0.1,
    )
    x = torch.randint(0, 1024, (8, 256))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": x, "labels": x}, lambda m: list(m.model.layers)


def resnet50() -> tuple[nn.Module, dict[str, torch.Tensor], Blocks]:
    """ResNet-50 (bottleneck, 3-4-6-3) at an eighth of its width: batch 32, 64 x 64 pixels."""
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=10
    )
    batch = {"pixel_values": torch.randn(32, 3, 64, 64), "labels": torch.randint(0, 10, (32,))}
    model: Any = transformers.ResNetForImageClassification(config).train()
    return model, batch, lambda m: [layer for stage in m.resnet.encoder.stages for layer in stage.layers]


MODELS = {"gpt2": gpt2, "llama": llama, "resnet50": resnet50}
