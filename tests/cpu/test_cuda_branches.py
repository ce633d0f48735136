"""What the library does on CUDA, as far as it can be seen without: `torch.cuda` is replaced where the library calls it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from lightning_memopt.record import tensors


def test_a_random_op_draws_from_the_generator_of_its_device(monkeypatch: Any) -> None:
    """A factory reads no tensor: its device is where it is told to make its result."""
    made = torch.Generator(), torch.Generator()
    module = types.SimpleNamespace(default_generators=made, current_device=lambda: 1)
    monkeypatch.setattr(tensors.torch, "get_device_module", lambda device: module)
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert tensors.device_of([], {"device": "cuda"}) == torch.device("cuda")
    assert tensors.device_of([cuda], {"device": cpu}) == cpu
    assert tensors.device_of([cpu, cuda], {}) == cuda and tensors.device_of([cpu], {"device": None}) == cpu
    assert tensors.generator_of(cuda) is made[0]
    assert tensors.generator_of(torch.device("cuda")) is made[1]
    assert tensors.generator_of(cpu) is torch.default_generator
    assert tensors.generator_of(torch.device("cuda", 5)) is None
