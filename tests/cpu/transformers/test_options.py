"""Options of `TrainingArguments`, models, precisions and resuming: the bits of the Trainer without the callback."""

from __future__ import annotations

import os
import warnings
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks.robustness.front_case import Case
from benchmarks.robustness.front_trainers import transformers
from lightning_memopt import MemOptTrainerCallback
from tests.cpu.lib.harness import same_bits
from tests.cpu.lib.trainers import agrees, assert_same, callback, kept, train

# Every model, every variant and both precisions; `python -m benchmarks fronts` runs all combinations. The ResNet is not here in
# bfloat16: without instructions for it, the workspace of one convolution outweighs all that so small a model saves.
PAIRS = [
    ("gpt2", "bf16", "accumulation"),
    ("gpt2", "fp32", "from plain"),
    ("t5", "bf16", "schedule"),
    ("vit", "bf16", "clipping"),
    ("resnet", "fp32", "average"),
    ("resnet", "fp32", "from plain"),
    ("lora_llama", "bf16", "to plain"),
]


class Watch:
    """The package at the smallest plan, or nothing."""

    def __init__(self, mine: MemOptTrainerCallback | None) -> None:
        self.mine = mine

    def callbacks(self) -> list[Any]:
        return [] if self.mine is None else [self.mine]


def trained(case: Case, mine: MemOptTrainerCallback | None) -> tuple[dict[str, Any], list[Any]]:
    logged: list[Any] = []
    results = transformers(case, Watch(mine), lambda *values: logged.append(values))  # type: ignore[arg-type]
    tensors: dict[str, Any] = {"generator": torch.get_rng_state()}
    for name, owner in results.items():
        if isinstance(owner, nn.Module):
            tensors |= {f"{name}.{key}": t for key, t in (*owner.named_parameters(), *owner.named_buffers())}
        else:
            values = (value for state in owner.state.values() for value in state.values())
            tensors |= {f"{name}.{i}": value for i, value in zip(count(), values, strict=False)}
    return tensors, logged


@pytest.mark.parametrize(("model", "precision", "variant"), PAIRS)
def test_twenty_steps(model: str, precision: str, variant: str) -> None:
    if model == "lora_llama":
        pytest.importorskip("peft")
    case, mine = Case(model, precision, variant), callback()
    plain, ours = trained(case, None), trained(case, mine)
    kept(mine)
    assert plain[1] == ours[1] and len(plain[1]) == 20
    assert plain[0].keys() == ours[0].keys()
    for name, t in plain[0].items():
        assert same_bits(t, ours[0][name]) if isinstance(t, Tensor) else t == ours[0][name], name


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor"])
def test_optimizers(optim: str) -> None:
    agrees(optim=optim)


def test_changed_losses_and_embeddings() -> None:
    """Smoothed labels, and noise on the embeddings by a hook (NEFTune)."""
    agrees(label_smoothing_factor=0.1, neftune_noise_alpha=5.0)


def test_compiled() -> None:
    """torch_compile=True: the same bits; one warning says that nothing is rebuilt inside of compiled code."""
    options = dict(torch_compile=True, torch_compile_backend="eager", max_steps=4)
    mine = callback()
    with mock.patch.dict(os.environ):  # older releases leave the request to compile there
        plain = train(**options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = train([mine], **options)
    assert_same(plain, ours)
    assert sum("compiled code" in str(warning.message) for warning in said) == 1
    assert mine.status().phase == "planned" and "torch.compile" in mine.report()
