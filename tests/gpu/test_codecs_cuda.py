"""Codecs on CUDA: the kernels give the bits that the CPU gives, and take no more memory than they say."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from lightning_memopt.plan.readers import need
from lightning_memopt.runtime.codecs import NAMES, block, codec
from tests.cpu.lib.harness import same_bits
from tests.cpu.parking.test_codecs_readers import RUNS, Swapping, decoded, garbage, gradient

SIZES = [(), (1,), (3, 5), (2, 3, 8, 8), (2, 3, 7, 7), (64, 1000), (1, 4, 1 << 16), (5, 12, 4)]
KERNELS = [name for name in NAMES if name.startswith(("block", "gated"))]


def values(size: tuple[int, ...], dtype: torch.dtype, last: bool) -> torch.Tensor:
    """On the CPU; `last`: channels last where there are four dimensions."""
    t = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 3
    if t.numel() > 3:
        t.view(-1)[0], t.view(-1)[-1], t.view(-1)[-2] = math.nan, -math.inf, 1e-40
    t = t.to(dtype)
    return t.contiguous(memory_format=torch.channels_last) if last and t.dim() == 4 else t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_the_cpu(name: str, kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(block, "_kernels", lambda encoded: None)
    elif name in KERNELS and block._imported() is None:
        pytest.skip("Triton is not installed")
    c = codec(name)
    for size in SIZES:
        for last in (False, True):
            t = values(size, dtype, last)
            t = t > 0 if name == "bools" else t
            encoded = torch.empty(c.encoded_nbytes(size, t.dtype), dtype=torch.uint8)
            out = torch.empty_like(t)
            c.encode(t, encoded)
            c.decode(encoded, out)
            there = torch.empty_like(encoded, device="cuda")
            back = torch.empty_like(t, device="cuda")
            c.encode(t.cuda(), there)
            c.decode(there, back)
            if not name.startswith("int"):  # a division may round otherwise on the device
                assert torch.equal(there.cpu(), encoded), (size, last)
                assert same_bits(back.cpu().isnan(), out.isnan()) and torch.equal(back.cpu().nan_to_num(), out.nan_to_num())
            assert back.stride() == out.stride()


@pytest.mark.parametrize("name", NAMES)
def test_the_workspace_is_no_more_than_it_says(name: str) -> None:
    c, t = codec(name), torch.randn(1 << 22, device="cuda")
    t = t > 0 if name == "bools" else t
    encoded = torch.empty(c.encoded_nbytes((1 << 22,), t.dtype), dtype=torch.uint8, device="cuda")
    c.encode(t, encoded)  # compiles, and makes the tables
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    c.encode(t, encoded)
    c.decode(encoded, t)
    assert torch.cuda.max_memory_allocated() - before <= c.workspace_nbytes((1 << 22,), t.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("key", RUNS, ids="-".join)
def test_what_is_not_needed_changes_nothing(key: tuple[str, str], dtype: torch.dtype) -> None:
    x, f = RUNS[key]
    if key[0].startswith("replication_pad"):
        pytest.skip("under deterministic algorithms, torch pads by indexing on CUDA: this op does not run")
    x = x.to("cuda", dtype)
    try:
        plain = gradient(x, f)
    except (NotImplementedError, RuntimeError) as error:
        assert "not implemented for" in str(error) or "deterministic" in str(error)
        pytest.skip(f"torch: {error}")
    swap = decoded if need(*key) == "sign" else garbage
    assert same_bits(plain, gradient(x, f, Swapping(*key, swap)))
