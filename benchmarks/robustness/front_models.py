"""The models that every front trains, tiny and with random weights, and their data: random, but the same in every run.

A sample is what the model's forward takes, without a batch dimension. The forward returns an output with a `loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WORDS, LENGTH, CLASSES, SIDE = 64, 24, 5, 24
Sample = dict[str, Any]


def gpt2() -> nn.Module:
    """Dropout everywhere, the head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = dict(bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=LENGTH, **ids))


def t5() -> nn.Module:
    """Encoder and decoder, a position bias that all layers share."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=WORDS)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
    rest = dict(image_size=SIDE, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0.1)
    return ViTForImageClassification(ViTConfig(**sizes, **rest))


def resnet() -> nn.Module:
    """BatchNorm: buffers that the forward writes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=CLASSES)
    return ResNetForImageClassification(ResNetConfig(**sizes))


def lora_llama() -> nn.Module:
    """Only the adapters of a Llama are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, vocab_size=WORDS, **heads)
    adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), adapters)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "lora_llama": lora_llama,
}
PICTURES = ("vit", "resnet")
NEEDS = {"lora_llama": ("transformers", "peft")}
"""Packages that a model needs; the others need transformers alone."""


def built(name: str, seed: int = 5) -> nn.Module:
    """The model with the same weights every time."""
    torch.manual_seed(seed)
    return MODELS[name]()


class Samples(Dataset[Sample]):
    """`count` samples for a model; sample i is the same whenever it is asked for."""

    def __init__(self, model: str, count: int) -> None:
        self.model, self.count = model, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.count:
            raise IndexError(index)
        source = torch.Generator().manual_seed(index)
        if self.model in PICTURES:
            return {"pixel_values": torch.rand(3, SIDE, SIDE, generator=source), "labels": index % CLASSES}
        ids = torch.randint(1, WORDS, (LENGTH,), generator=source)
        return {"input_ids": ids, "labels": ids}


def collated(samples: list[Sample]) -> dict[str, Tensor]:
    """A batch of samples."""
    return {key: torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in samples[0]}
