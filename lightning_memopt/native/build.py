"""Build the native library with an installed C++ compiler against torch's headers, once for each torch, compiler and source.

`library()` returns its path, in a folder of the user's cache that nobody else may write to. A checksum beside the library is
compared before it is loaded, because loading an incomplete library would crash the process. Several processes may build at the
same time: each builds in its own folder and renames it, and the first one stays.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_memopt.errors import MemOptError
from lightning_memopt.torch_private import CXX11_ABI

_SOURCE = Path(__file__).with_name("counter.cpp")
_LIBRARY, _CHECKSUM = "counter.so", "counter.sha256"
_LIMIT_SECONDS = 120
"""Time limit of a build, which takes 2 seconds of CPU time, and longer on a busy machine."""


class BuildError(MemOptError):
    """The library cannot be built on this machine; the message says why. `install` catches it."""


def library(say: Callable[[str], None]) -> Path:
    """The path of the library, which is built first if it is missing or damaged. Raises BuildError."""
    compiler = _compiler()
    key = _key(compiler)
    cache = _cache()
    folder = cache / key
    if not _complete(folder):
        say("MemOpt: building the memory meter (once for this torch and compiler)")
        _build(compiler, folder)
    return folder / _LIBRARY


def _compiler() -> str:
    """The path of the C++ compiler: `$CXX`, or a common one. Raises BuildError if there is none."""
    named = os.environ.get("CXX", "").split()
    for name in (*named[:1], "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError("there is no C++ compiler (set CXX, or install g++ or clang++)")


def _key(compiler: str) -> str:
    """A digest of everything that the library depends on; the name of its folder."""
    parts = (
        str(torch.__version__),
        str(torch.version.git_version),
        str(CXX11_ABI),
        str(Path(torch.__file__).parent),
        compiler,
        sys.platform,
        platform.machine(),
        hashlib.sha256(_SOURCE.read_bytes()).hexdigest(),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _cache() -> Path:
    """A folder that only this user can write to, because the library in it is executed."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "lightning_memopt"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if private and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass  # the user's home is not writable
    return Path(tempfile.mkdtemp(prefix="lightning_memopt-"))


def _complete(folder: Path) -> bool:
    """Whether the folder has a library with the right checksum."""
    try:
        expected = (folder / _CHECKSUM).read_text()
        return hashlib.sha256((folder / _LIBRARY).read_bytes()).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def _build(compiler: str, folder: Path) -> None:
    """Build in a temporary folder and rename it to `folder`. Raises BuildError."""
    try:
        temporary = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    except OSError as error:
        raise BuildError(f"nothing can be written to {folder.parent} ({error})") from None
    try:
        _compile(compiler, temporary / _LIBRARY)
        (temporary / _CHECKSUM).write_text(hashlib.sha256((temporary / _LIBRARY).read_bytes()).hexdigest())
        _move(temporary, folder)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written ({error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _compile(compiler: str, target: Path) -> None:
    home = Path(torch.__file__).parent
    command = [
        compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(CXX11_ABI)}",
        f"-I{home / 'include'}",
        str(_SOURCE),
        *("-o", str(target)),
        *(f"-L{home / 'lib'}", "-lc10", f"-Wl,-rpath,{home / 'lib'}"),
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} took more than {_LIMIT_SECONDS} seconds") from None
    if result.returncode:
        error_lines = (line for line in result.stderr.splitlines() if "error" in line.lower())
        reason = next(error_lines, result.stderr.strip()[:200])
        raise BuildError(f"{compiler} failed: {reason}")


def _move(temporary: Path, folder: Path) -> None:
    """Rename the built folder to its final name. The complete folder of a faster process stays; a damaged one is removed."""
    for _ in range(3):
        try:
            os.rename(temporary, folder)
            return
        except OSError:
            if _complete(folder):
                return
            trash = Path(tempfile.mkdtemp(prefix="broken-", dir=folder.parent))
            try:
                os.rename(folder, trash / "was")
            except FileNotFoundError:
                pass  # another process has just moved it
            finally:
                shutil.rmtree(trash, ignore_errors=True)
    raise BuildError(f"{folder} is broken and cannot be replaced")
