"""Build the native libraries with an installed C++ compiler against torch's headers, once for each torch, compiler and source.

`cxx` says where libraries are stored, and how several processes build them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_memopt import cxx
from lightning_memopt.cxx import BuildError
from lightning_memopt.torch_private import CXX11_ABI

TORCH = Path(torch.__file__).parent
"""The folder of torch, with its headers and libraries."""
_HERE = Path(__file__).parent
_COUNTER = [_HERE / name for name in ("counter.cpp", "pool.cpp", "pool.h", "lane.cpp", "lane.h", "spin.h")]
_CUDA = [
    _HERE / name for name in ("cuda.cpp", "streams.cpp", "streams.h", "fences.cpp", "fences.h", "lane.cpp", "lane.h", "spin.h")
]


def library(say: Callable[[str], None]) -> Path:
    """The path of the library for the CPU, which is built first if it is missing or damaged. Raises BuildError."""
    return cxx.library("counter", "the memory meter", parts(_COUNTER), _compile, say)


def cuda_library(say: Callable[[str], None], linked: Path | None = None) -> Path:
    """The path of the library for CUDA, which is built first if it is missing or damaged. Raises BuildError.

    linked: the folder of `libc10_cuda.so`; by default torch's.
    """
    folder = linked or TORCH / "lib"
    if not (folder / "libc10_cuda.so").is_file():
        raise BuildError(f"this torch is built without CUDA: {folder} has no libc10_cuda.so")

    def compiled(compiler: str, target: Path) -> None:
        given = ["-lc10_cuda", "-lc10", f"-L{folder}", f"-Wl,-rpath,{folder}"]
        options = [f"-I{cuda_headers()}", *(() if _has_cuda_macros() else ("-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",))]
        cxx.run(command(compiler, _CUDA, given, target, options))

    own = () if linked is None else (str(linked),)
    return cxx.library("cuda", "the planned pool for CUDA", (*parts(_CUDA), *own), compiled, say)


def cuda_headers() -> Path:
    """The folder of CUDA's headers: `$CUDA_HOME`, NVIDIA's Python packages, or an installed toolkit. Raises BuildError."""
    packages = TORCH.parent / "nvidia"
    compiler = shutil.which("nvcc")
    places = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    major = (torch.version.cuda or "").partition(".")[0]
    places += [packages / name / "include" for name in (f"cu{major}", "cuda_runtime")]
    places += [Path(compiler).resolve().parent.parent / "include"] if compiler is not None else []
    places += [Path("/usr/local/cuda/include")]
    for place in places:  # NVIDIA's Python packages of the runtime lack what the compiler's package has
        if all((place / name).is_file() for name in ("cuda_runtime_api.h", "cuda.h", "crt/host_config.h")):
            return place
    raise BuildError("CUDA's headers, with those in crt/, are not installed (set CUDA_HOME, or install a CUDA toolkit)")


def _has_cuda_macros() -> bool:
    return (TORCH / "include/c10/cuda/impl/cuda_cmake_macros.h").is_file()


def parts(sources: Sequence[Path]) -> tuple[str, ...]:
    """Everything that a library depends on, except the compiler."""
    return (
        str(torch.__version__),
        str(torch.version.git_version),
        str(CXX11_ABI),
        str(torch.version.cuda or torch.version.hip),
        sys.platform,
        platform.machine(),
        hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest(),
    )


def _compile(compiler: str, target: Path) -> None:
    cxx.run(command(compiler, _COUNTER, ["-lc10"], target))


def command(
    compiler: str, sources: Sequence[Path], linked: Sequence[str], target: Path, options: Sequence[str] = ()
) -> list[str]:
    """The command that compiles sources against torch's headers. `linked`: options for libraries other than torch's."""
    return [
        compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(CXX11_ABI)}",
        f"-I{TORCH / 'include'}",
        *options,
        *(str(source) for source in sources if source.suffix == ".cpp"),
        *("-o", str(target)),
        f"-L{TORCH / 'lib'}",
        *linked,
        f"-Wl,-rpath,{TORCH / 'lib'}",
    ]
