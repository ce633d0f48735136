"""The CUDA kernels of `block` and `gated`, run by Triton's interpreter: the bits of `block.py`. Skipped without Triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import math, torch
from lightning_memopt.runtime.codecs import block_triton, codec
from tests.cpu.lib.harness import same_bits
ODD, STRIPS, EMPTY = ((3, 5, 7), (0, 1, 2)), ((2, 8, 12), (0, 2, 1)), ((0, 4), (0, 1))
CASES = [(name, ODD, torch.float32, 0) for name in ("block4", "block10", "block16")]
CASES += [("block8", ODD, torch.bfloat16, 0), ("block4", STRIPS, torch.float16, 0), ("block4", EMPTY, torch.float32, 0)]
CASES += [("block6", STRIPS, torch.float32, 100), ("block4", STRIPS, torch.bfloat16, -110)]
CASES += [("gated4", ODD, torch.float32, 0), ("gated6", STRIPS, torch.float32, 0), ("gated16", ODD, torch.bfloat16, 0)]
CASES += [("gated6", STRIPS, torch.float16, 0), ("gated4", STRIPS, torch.float32, -124), ("gated8", EMPTY, torch.float32, 0)]
for name, (size, order), dtype, exponent in CASES:
    c = codec(name)
    t = torch.randn([size[d] for d in order], generator=torch.Generator().manual_seed(exponent + 200))
    t = ((t.relu() if c.gated else t) * 2.0**exponent).to(dtype).permute(order)
    assert t.shape == size
    if t.numel() > 20 and exponent == 0:
        t[0, 0], t[-1, -1], t[1, 1], t[0, 1] = math.nan, -math.inf, math.inf, torch.finfo(dtype).max
    encoded, theirs = torch.zeros(2, c.encoded_nbytes(size, dtype), dtype=torch.uint8)
    # the interpreter cuts bits off where a device rounds to bfloat16
    whole = torch.float32 if dtype == torch.bfloat16 else dtype
    out, back = torch.empty_like(t, dtype=whole), torch.empty_like(t, dtype=whole)
    c.encode(t, encoded)
    c.decode(encoded, out)
    block_triton.encode(c, t, theirs)
    block_triton.decode(c, theirs, back)
    assert torch.equal(encoded, theirs), (name, size, dtype, exponent)
    assert same_bits(out.isnan(), back.isnan()), (name, size, dtype, exponent)
    assert same_bits(out.nan_to_num(7), back.nan_to_num(7)), (name, size, dtype, exponent)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_give_the_same_bits() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
