"""Models of the size that people train on one GPU, by name: `transformers` configurations with random weights, no downloads.
Where `transformers` is not installed, building one raises ModuleNotFoundError.

Each builder gives (model, batch, blocks) on a device; the sizes are those of an H200 or an H100. The `smoke` ones are the same
code, small enough for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.convolutional import Blocks, Built

Build = Callable[[torch.device], Built]

_WORDS: dict[str, Any] = dict(use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0)


def _text(model: nn.Module, words: int, batch: int, length: int, dtype: torch.dtype, blocks: Blocks, device: Any) -> Built:
    x = torch.randint(1, words, (batch, length), device=device)
    return model.to(dtype).train(), {"input_ids": x, "labels": x}, blocks


def gpt2(
    device: torch.device, layers: int, width: int, heads: int, batch: int, length: int, words: int = 50257, dtype: Any = None
) -> Built:
    """GPT-2, dropout on."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, n_positions=length, attn_implementation="sdpa", **_WORDS
    )
    with device:
        model = transformers.GPT2LMHeadModel(config)
    return _text(model, words, batch, length, dtype or torch.bfloat16, lambda m: list(m.transformer.h), device)


def llama(
    device: torch.device, layers: int, width: int, heads: int, batch: int, length: int, words: int, dtype: Any = None
) -> Built:
    """The shape of Llama 3.2 1B: grouped-query attention, gated MLP, tied embeddings."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=words,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        **_WORDS,
    )
    with device:
        model = transformers.LlamaForCausalLM(config)
    return _text(model, words, batch, length, dtype or torch.bfloat16, lambda m: list(m.model.layers), device)


def resnet(device: torch.device, depths: list[int], sizes: list[int], batch: int, pixels: int) -> Built:
    """A ResNet of bottlenecks, float32."""
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=sizes[0] // 4, hidden_sizes=sizes, depths=depths, layer_type="bottleneck", num_labels=1000
    )
    with device:
        model: Any = transformers.ResNetForImageClassification(config).train()
        batch_of = {
            "pixel_values": torch.randn(batch, 3, pixels, pixels),
            "labels": torch.randint(0, 1000, (batch,)),
        }
    return model, batch_of, lambda m: [layer for stage in m.resnet.encoder.stages for layer in stage.layers]


def lstm_nmt(device: torch.device, **sizes: int) -> Built:
    """LSTM translation with attention, cells in loops, float32. Raises ImportError where the recurrent models are missing."""
    from benchmarks.models.recurrent import nmt

    with device:
        model, batch, blocks = nmt(**sizes)
    return model, batch, blocks


MODELS: dict[str, Build] = {
    "GPT-2 medium": partial(gpt2, layers=24, width=1024, heads=16, batch=8, length=1024),
    "GPT-2 large": partial(gpt2, layers=36, width=1280, heads=20, batch=4, length=1024),
    "Llama 1B": partial(llama, layers=16, width=2048, heads=32, batch=4, length=2048, words=128256),
    "ResNet-152": partial(resnet, depths=[3, 8, 36, 3], sizes=[256, 512, 1024, 2048], batch=64, pixels=224),
    "LSTM NMT": partial(lstm_nmt, time=64, batch=128, width=512),
}
SMOKE: dict[str, Build] = {
    "GPT-2": partial(gpt2, layers=2, width=32, heads=2, batch=8, length=32, words=64, dtype=torch.float32),
    "Llama": partial(llama, layers=2, width=32, heads=4, batch=8, length=32, words=64, dtype=torch.float32),
    "ResNet": partial(resnet, depths=[1, 1], sizes=[16, 32], batch=8, pixels=32),
    "LSTM NMT": partial(lstm_nmt, time=4, batch=8, width=16),
}
