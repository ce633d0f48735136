"""Build the library with the C++ compiler that there is, against torch's headers, once per torch, compiler and source.

`library()` gives its path. It lies in a folder of the user's cache that nobody else may write to, beside a checksum, because
loading half a library would end the process. A folder appears as a whole: several processes may build at once, one stays.
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
"""A build takes 2 seconds of a CPU; on a busy machine more."""


class BuildError(MemOptError):
    """The library cannot be built here; the message says why. Never leaves this package."""


def library(say: Callable[[str], None]) -> Path:
    """The path of the library, built where it is not there yet, or broken. Raises BuildError."""
    compiler = _compiler()
    key = _key(compiler)
    cache = _cache()
    folder = cache / key
    if not _whole(folder):
        say("MemOpt: building the memory meter (once for this torch and compiler)")
        _build(compiler, folder)
    return folder / _LIBRARY


def _compiler() -> str:
    named = os.environ.get("CXX", "").split()
    for name in (*named[:1], "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError("there is no C++ compiler (set CXX, or install g++ or clang++)")


def _key(compiler: str) -> str:
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
    """A folder that only this user can write to: what is in it is run."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "lightning_memopt"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = folder.stat()
        if there.st_uid == os.getuid() and not there.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass  # a home that cannot be written to
    return Path(tempfile.mkdtemp(prefix="lightning_memopt-"))


def _whole(folder: Path) -> bool:
    try:
        expected = (folder / _CHECKSUM).read_text()
        return hashlib.sha256((folder / _LIBRARY).read_bytes()).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def _build(compiler: str, folder: Path) -> None:
    try:
        made = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    except OSError as error:
        raise BuildError(f"nothing can be written to {folder.parent} ({error})") from None
    try:
        _compile(compiler, made / _LIBRARY)
        (made / _CHECKSUM).write_text(hashlib.sha256((made / _LIBRARY).read_bytes()).hexdigest())
        _move(made, folder)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written ({error})") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


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
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} took more than {_LIMIT_SECONDS} seconds") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line.lower()), done.stderr.strip()[:200])
        raise BuildError(f"{compiler} failed: {first}")


def _move(made: Path, folder: Path) -> None:
    """Put the folder in its place, at once. Where another process was faster, its folder stays; a broken one goes."""
    for _ in range(3):
        try:
            os.rename(made, folder)
            return
        except OSError:
            if _whole(folder):
                return
            away = Path(tempfile.mkdtemp(prefix="broken-", dir=folder.parent))
            try:
                os.rename(folder, away / "was")
            except FileNotFoundError:
                pass  # another process has just moved it
            finally:
                shutil.rmtree(away, ignore_errors=True)
    raise BuildError(f"{folder} is broken and cannot be replaced")
