"""The emulated device itself, in both modes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.emulated import device

pytestmark = pytest.mark.skipif(not device.is_emulated(), reason="the emulated device: make emulated")

bits = pytest.mark.skipif(not device.is_bits(), reason="memory has no values in bytes mode")


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return device.run([sys.executable, "-c", code], **environment)


def test_memory_is_the_cards() -> None:
    left, total = torch.cuda.mem_get_info()
    assert total == 80 << 30
    x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] <= left
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 81\.00 GiB. GPU 0 has a total capacity of 80\.00 GiB"):
        torch.empty(81 << 30, dtype=torch.uint8, device="cuda")
    del x


def test_several_cards_have_memory_of_their_own() -> None:
    code = """
import torch
assert torch.cuda.device_count() == 8
x = [torch.empty(n << 20, dtype=torch.uint8, device=f"cuda:{i}") for i, n in enumerate(range(0, 320, 40))]
print([(torch.cuda.mem_get_info(i)[1] - torch.cuda.mem_get_info(i)[0]) >> 20 for i in range(8)])
"""
    done = _run(code, EMULATED_DEVICES="8", EMULATED_MEMORY=str(1 << 30))
    assert done.stdout == f"{list(range(0, 320, 40))}\n", done.stderr


def test_memory_takes_none_of_the_hosts_in_bytes_mode() -> None:
    code = """
import resource, torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = [torch.zeros(8 << 30, dtype=torch.uint8, device="cuda") for _ in range(9)]
y = x[0] + x[1]
assert y[:3].tolist() == [0, 0, 0] and torch.equal(y, x[0])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = _run(code, EMULATED_MODE="bytes")
    assert int(done.stdout) < 200, done.stderr


def test_what_nobody_wrote_names_itself() -> None:
    code = """
import ctypes
cudart = ctypes.CDLL("libcudart.so.13")
print(cudart.cudaIpcCloseMemHandle(None))
cudart.cudaGetErrorString.restype = ctypes.c_char_p
print(cudart.cudaGetErrorString(801).decode())
"""
    done = _run(code)
    assert done.stdout == "801\ncudaIpcCloseMemHandle is not emulated\n"
    assert done.stderr == "emulated CUDA: cudaIpcCloseMemHandle is not emulated (tests/emulated/README.md)\n"


def test_a_mode_that_does_not_exist() -> None:
    done = _run("import torch; torch.cuda.init()", EMULATED_MODE="fast")
    assert done.returncode == 2
    assert done.stderr.endswith('EMULATED_MODE is "bytes" or "bits", not "fast"\n')


@bits
def test_a_copy_is_late_until_somebody_waits() -> None:
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    host = torch.full((1000,), -1.0, pin_memory=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    assert host.tolist() == [-1.0] * 1000
    assert not event.query()
    event.synchronize()
    assert host.tolist() == list(range(1000))


@bits
def test_a_kernel_of_others_is_refused_by_name() -> None:
    code = """
import torch
torch.zeros(1, device="cuda")
from torch.cuda import jiterator
jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")(torch.zeros(2, device="cuda"))
"""
    done = _run(code)
    assert done.returncode != 0
    assert "not emulated" in done.stderr or "no kernel runs on the emulated device" in done.stderr
