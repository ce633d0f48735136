"""Build the native library with an installed C++ compiler against torch's headers, once for each torch, compiler and source.

`cxx` says where the library lies, and how several processes may build it.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_memopt import cxx
from lightning_memopt.torch_private import CXX11_ABI

_SOURCES = [Path(__file__).with_name(name) for name in ("counter.cpp", "pool.cpp", "pool.h", "lane.cpp", "lane.h", "spin.h")]


def library(say: Callable[[str], None]) -> Path:
    """The path of the library, which is built first if it is missing or damaged. Raises BuildError."""
    return cxx.library(
        "counter", _parts(), _compile, lambda: say("MemOpt: building the memory meter (once for this torch and compiler)")
    )


def _parts() -> tuple[str, ...]:
    """Everything that the library depends on, besides the compiler."""
    return (
        str(torch.__version__),
        str(torch.version.git_version),
        str(CXX11_ABI),
        str(Path(torch.__file__).parent),
        sys.platform,
        platform.machine(),
        hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest(),
    )


def _compile(compiler: str, target: Path) -> None:
    home = Path(torch.__file__).parent
    command = [
        compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(CXX11_ABI)}",
        f"-I{home / 'include'}",
        *(str(source) for source in _SOURCES if source.suffix == ".cpp"),
        *("-o", str(target)),
        *(f"-L{home / 'lib'}", "-lc10", f"-Wl,-rpath,{home / 'lib'}"),
    ]
    cxx.run(command)
