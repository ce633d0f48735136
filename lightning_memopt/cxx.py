"""Build C++ sources of this package as shared libraries, with an installed compiler, on first use, and cache them.

A library is looked for in the folder `$MEMOPT_LIBRARIES`, where `memopt build` has put it, and then in a folder of the user's
cache that nobody else may write to. A machine without a compiler may use what another one has built. Before a library is
loaded, its checksum is compared with the one stored next to it, because loading an incomplete library would crash the process.
Several processes may build at the same time: each builds in its own folder and renames it, and the first one stays.
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

from lightning_memopt import clocks
from lightning_memopt.errors import MemOptError

_LIMIT_SECONDS = 600
"""Time limit of a build, which takes up to 30 seconds of CPU time, and longer on a busy machine."""


class BuildError(MemOptError):
    """The library cannot be built on this machine; the message says why. Callers catch this error and use Python instead.

    Remedy: install a C++ compiler (and CUDA's headers for its pool), or build on another machine (`memopt build`), or do
    nothing: Python runs instead.
    """


def library(
    name: str, what: str, parts: Iterable[str], compile_to: Callable[[str, Path], None], say: Callable[[str], None]
) -> Path:
    """The path of the library `name`, which is built first if it is missing or damaged. Raises BuildError.

    what: the library in words, for the two lines that say that it is built, how long that took, and how large it is.
    parts: texts of everything that the library depends on: another text, another library.
    compile_to: compiles with the compiler at a given path to a given file. Raises BuildError.
    """
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    given = given_folder()
    for folder in (given / key if given is not None else None, cache() / key):
        if folder is not None and _complete(folder, name):
            return folder / f"{name}.so"
    compiler = compiler_path()
    folder = cache() / key
    say(f"MemOpt: building {what} (up to half a minute, once for this torch and Python)")
    began = clocks.perf_counter()
    _build(name, compiler, folder, compile_to)
    path = folder / f"{name}.so"
    say(f"MemOpt: {what} was built in {clocks.perf_counter() - began:.0f} s: {path.stat().st_size / 1e6:.1f} MB in {folder}")
    return path


def given_folder() -> Path | None:
    """The folder of libraries that were built ahead; None where `$MEMOPT_LIBRARIES` is not set. Raises BuildError if somebody
    else than this user or root may write to it, because a library in it is executed.
    """
    name = os.environ.get("MEMOPT_LIBRARIES")
    if not name:
        return None
    folder = Path(name)
    try:
        status = folder.stat()
    except OSError as error:
        raise BuildError(f"MEMOPT_LIBRARIES={name} cannot be read ({error}): give the folder of `memopt build -o`") from None
    if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"MEMOPT_LIBRARIES={name} may be written by others: it must belong to this user or to root (chmod go-w)"
        )
    return folder


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
    raise BuildError(
        "there is no C++ compiler (set CXX, install g++ or clang++, or set MEMOPT_LIBRARIES to a folder that `memopt build -o` "
        "made on a machine with the same torch and Python)"
    )


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
