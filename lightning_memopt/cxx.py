"""Build C++ sources of this package as shared libraries, with an installed compiler, on first use, and cache them.

A library is in a folder of the user's cache that nobody else may write to. Before a library is loaded, its checksum is compared
with the one stored next to it, because loading an incomplete library would crash the process. Several processes may build at
the same time: each builds in its own folder and renames it, and the first one stays.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lightning_memopt.errors import MemOptError

_LIMIT_SECONDS = 600
"""Time limit of a build, which takes up to 30 seconds of CPU time, and longer on a busy machine."""


class BuildError(MemOptError):
    """The library cannot be built on this machine; the message says why. Callers catch this error and use Python instead.

    Remedy: install a C++ compiler (and CUDA's headers for its pool), or do nothing: Python runs instead.
    """


def library(name: str, parts: Iterable[str], compile_to: Callable[[str, Path], None], announce: Callable[[], None]) -> Path:
    """The path of the library `name`, which is built first if it is missing or damaged. Raises BuildError.

    parts: texts of everything that the library depends on, except the compiler.
    compile_to: compiles with the compiler at a given path to a given file. Raises BuildError.
    announce: called before a build.
    """
    compiler = compiler_path()
    folder = cache() / hashlib.sha256("\n".join([*parts, compiler]).encode()).hexdigest()[:32]
    if not _complete(folder, name):
        announce()
        _build(name, compiler, folder, compile_to)
    return folder / f"{name}.so"


def run(command: Sequence[str]) -> None:
    """Run a compiler. Raises BuildError if it fails or takes too long."""
    compiler = command[0]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} took more than {_LIMIT_SECONDS} seconds") from None
    if result.returncode:
        error_lines = (line for line in result.stderr.splitlines() if "error" in line.lower())
        reason = next(error_lines, result.stderr.strip()[:200])
        raise BuildError(f"{compiler} failed: {reason}")


def compiler_path() -> str:
    """The path of the C++ compiler: `$CXX`, or a common one. Raises BuildError if there is none."""
    named = os.environ.get("CXX", "").split()
    for name in (*named[:1], "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError("there is no C++ compiler (set CXX, or install g++ or clang++)")


def cache() -> Path:
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


def _complete(folder: Path, name: str) -> bool:
    """Whether the folder has a library with the right checksum."""
    try:
        expected = (folder / f"{name}.sha256").read_text()
        return hashlib.sha256((folder / f"{name}.so").read_bytes()).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def _build(name: str, compiler: str, folder: Path, compile_to: Callable[[str, Path], None]) -> None:
    """Build in a temporary folder and rename it to `folder`. Raises BuildError."""
    try:
        temporary = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    except OSError as error:
        raise BuildError(f"nothing can be written to {folder.parent} ({error})") from None
    try:
        compile_to(compiler, temporary / f"{name}.so")
        (temporary / f"{name}.sha256").write_text(hashlib.sha256((temporary / f"{name}.so").read_bytes()).hexdigest())
        _move(name, temporary, folder)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written ({error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(name: str, temporary: Path, folder: Path) -> None:
    """Rename the built folder to its final name. The complete folder of a faster process stays; a damaged one is removed."""
    for _ in range(3):
        try:
            os.rename(temporary, folder)
            return
        except OSError:
            if _complete(folder, name):
                return
            trash = Path(tempfile.mkdtemp(prefix="broken-", dir=folder.parent))
            try:
                os.rename(folder, trash / "was")
            except FileNotFoundError:
                pass  # another process has just moved it
            finally:
                shutil.rmtree(trash, ignore_errors=True)
    raise BuildError(f"{folder} is broken and cannot be replaced")
