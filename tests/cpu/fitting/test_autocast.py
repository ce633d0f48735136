"""Autocast on the CPU with CUDA's rules, while a step is recorded for a CUDA device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from lightning_memopt.fitting.autocast import IN_FLOAT32, IN_WIDEST, TO_FLOAT32, cuda_autocast

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 13), reason="rms_norm is not in the list of an older torch")
@pytest.mark.parametrize(("macro", "ours"), [("FP32", IN_FLOAT32), ("FP32_SET_OPT_DTYPE", TO_FLOAT32), ("PROMOTE", IN_WIDEST)])
def test_the_lists_are_those_of_this_torch(macro: str, ours: str) -> None:
    """Every op of ours is in torch's list, and the other way round, apart from ops that this torch alone has."""
    found = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)
    assert found is not None
    theirs = {".".join(part.strip() for part in op.split(",")) for op in re.findall(r"_\(([\w, ]+)\)", found[1])}
    assert set(ours.split()) == theirs


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "layer norm": (lambda x: F.layer_norm(x, (8,)), torch.float32),
    "softmax": (lambda x: x.softmax(-1), torch.float32),
    "softmax that is asked for": (lambda x: F.softmax(x, -1, dtype=torch.bfloat16), torch.bfloat16),
    "sum": (lambda x: x.sum(), torch.float32),
    "sum of a dimension": (lambda x: x.sum(0), torch.float32),
    "sum of integers": (lambda x: x.int().sum(), torch.int64),
    "power": (lambda x: x**2, torch.float32),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)), torch.float32),
    "widest": (lambda x: torch.addcmul(x, x, torch.randn(4, 8)), torch.float32),
    "widest of half": (lambda x: torch.addcmul(x, x, x), torch.bfloat16),
    "gelu": (F.gelu, torch.bfloat16),
    "double": (lambda x: x.double().exp(), torch.float64),
}


@pytest.mark.parametrize("case", CASES)
def test_types_are_those_of_cuda(case: str) -> None:
    """As listed in the reference of torch.amp."""
    f, expected = CASES[case]
    layer = nn.Linear(8, 8)
    with cuda_autocast(), torch.autocast("cuda", torch.bfloat16):
        assert f(layer(torch.randn(4, 8))).dtype == expected


def test_gradients_go_through_and_the_types_of_the_cpu_return() -> None:
    norm, x = nn.LayerNorm(8), torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with cuda_autocast():
        with torch.autocast("cuda"):
            assert F.linear(x, torch.randn(8, 8)).dtype == torch.float16, "CUDA's default"
        with torch.autocast("cpu", torch.bfloat16):
            norm(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16 and norm.weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="CUDA is not available"):
        torch.autocast("cuda")
