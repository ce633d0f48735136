"""`memopt build`: the parts in C++, built before a run needs them."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lightning_memopt.cxx import BuildError
from lightning_memopt.errors import ConfigError

Library = Callable[[Callable[[str], None]], Path]
"""Builds a library if it is missing, says so through the function that it is given, and returns the library's path."""


def run(args: argparse.Namespace) -> int:
    """Build every library that this torch can use, and copy them to `args.output` if it is given."""
    built, failed = [], []
    for name, library in _libraries().items():
        try:
            path = library(print)
        except BuildError as error:
            failed.append(f"{name}: {error}")
            continue
        built.append(path)
        print(f"{name}: {path.stat().st_size / 1e6:.1f} MB, {path}", flush=True)
    if args.output is not None:
        for path in built:
            _copy(path.parent, Path(args.output) / path.parent.name)
        print(f"Set MEMOPT_LIBRARIES={Path(args.output).resolve()} for runs with this torch and Python. They need no compiler.")
    if failed:
        raise BuildError("not built: " + "; ".join(failed))
    return 0


def _libraries() -> dict[str, Library]:
    """Name -> what builds it. The pool for CUDA is left out where torch has no CUDA."""
    import torch

    from lightning_memopt.native import build, engine
    from lightning_memopt.solvers.placement import search

    libraries: dict[str, Library] = {
        "native engine": engine.library,
        "memory meter": build.library,
        "search for addresses": search.library,
    }
    if torch.version.cuda is not None:
        libraries["planned pool for CUDA"] = build.cuda_library
    return libraries


def _copy(folder: Path, target: Path) -> None:
    """Copy a built library. A run never sees half of it: the copy gets its name when it is complete."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="copying-", dir=target.parent) as temporary:
            whole = Path(shutil.copytree(folder, Path(temporary) / folder.name))
            shutil.rmtree(target, ignore_errors=True)
            whole.rename(target)
        target.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error}): give -o another folder") from None
