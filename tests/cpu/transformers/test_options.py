"""Options of `TrainingArguments`: the bits of the Trainer without the callback. Models, precisions and resuming are in
tests/cpu/benchmarks/test_fronts.py.
"""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.cpu.lib.trainers import agrees, assert_same, callback, train


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
