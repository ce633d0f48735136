"""The machine of a run, as text and numbers. Parts are processes of their own, so asking for the device is one, too."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.lib.paths import ROOT

PACKAGES = ("numpy", "ortools", "rich", "pytest", "hypothesis", "transformers", "triton", "nvidia-ml-py")
SECONDS = 90.0
"""For the first process that starts torch and CUDA on a machine."""


def described() -> dict[str, Any] | None:
    """The machine, by a process that asks torch; None where it has no CUDA device, or does not answer."""
    command = [sys.executable, "-c", "from benchmarks.gpu.machine import describe; describe()"]
    done = _output(command, SECONDS)
    found = json.loads(done.splitlines()[-1]) if done else None
    return found and {**found, "versions": _versions(), "commit": _output(["git", "rev-parse", "HEAD"], 5.0)}


def _output(command: list[str], seconds: float) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if not done.returncode else None


def _versions() -> dict[str, str | None]:
    def found(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: found(name) for name in PACKAGES}


def describe() -> None:
    """Print it, in the process that asks torch; fail where there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(1)
    from lightning_memopt.native.build import cuda_headers

    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Callable[[], Any]] = {
        "device": lambda: properties.name,
        "devices": torch.cuda.device_count,
        "capability": lambda: f"{properties.major}.{properties.minor}",
        "memory_nbytes": lambda: properties.total_memory,
        "driver": _driver,
        "torch": lambda: torch.__version__,
        "cuda": lambda: torch.version.cuda,
        "cudnn": torch.backends.cudnn.version,
        "python": platform.python_version,
        "system": platform.platform,
        "cpus": os.cpu_count,
        "compiler": lambda: shutil.which(os.environ.get("CXX", "c++")),
        "cuda_headers": lambda: str(cuda_headers()),
    }
    print(json.dumps({name: _told(fact) for name, fact in facts.items()}))


def _driver() -> str:
    asked = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 10.0)
    return asked or Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]


def _told(fact: Callable[[], Any]) -> Any:
    """What is not known stops nothing."""
    try:
        return fact()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def build() -> None:
    """The part that compiles what is native, so that no other one takes the time, or fails, for it."""
    import argparse

    import torch

    from benchmarks.gpu import lines
    from lightning_memopt.cxx import BuildError
    from lightning_memopt.native import cuda_allocator, engine
    from lightning_memopt.runtime import install_native

    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--part", required=True)
    args = parser.parse_args()
    said: list[str] = []

    def engine_is_there() -> None:
        install_native(said.append)
        if engine.loaded() is None:
            raise BuildError(said[-1] if said else "MEMOPT_NATIVE=0")

    steps: dict[str, Callable[[], Any]] = {
        "the engine": engine_is_there,
        "the planned pool": lambda: cuda_allocator(torch.device("cuda", 0), said.append),
    }
    for name, step in steps.items():
        failed = ""
        try:
            step()
        except BuildError as error:
            failed = str(error)
        outcome = "failed" if failed else "passed"
        lines.append(args.lines, kind="test", part=args.part, test=name, outcome=outcome, message=failed)
