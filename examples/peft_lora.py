"""LoRA by PEFT within a budget: only the adapters of a Llama are trained, and nothing is saved for what is frozen."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memopt import MemOptTrainerCallback

from .transformers_trainer import CHARACTERS, train


def llama() -> nn.Module:
    """Four layers with random weights, and adapters for attention; the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=CHARACTERS,
    )
    adapters = LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapters)


def main() -> None:
    plain = train(llama())
    planned = train(llama(), MemOptTrainerCallback(budget="14MiB"))
    print("loss identical to the plain Trainer's:", plain == planned)


if __name__ == "__main__":
    main()
