"""Whether this process's CUDA device is the emulated one, and what it saw."""

from __future__ import annotations

import ctypes
import os
import subprocess

import torch

NAME = "emulated CUDA device"


def is_emulated() -> bool:
    """Whether CUDA's first device is the emulated one: LD_LIBRARY_PATH named its libraries when the process began."""
    return torch.cuda.is_available() and torch.cuda.get_device_name(0) == NAME


def mode() -> str:
    """The mode it is in: "bytes" or "bits"."""
    return os.environ.get("EMULATED_MODE", "bytes")


def is_bits() -> bool:
    """Whether its memory holds values."""
    return mode() == "bits"


def races() -> int:
    """Number of accesses that nothing ordered, since the process began (EMULATED_RACES=1)."""
    count = ctypes.CDLL("libcudart.so.13").emulated_races
    count.restype = ctypes.c_uint64
    return int(count())


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Another process on an emulated device with this environment; its warnings are off."""
    own = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)
