"""Run a training script so that the objects that `Accelerator.prepare` returns train within a memory budget.

    accelerate launch -m lightning_memopt.launch --budget 8GiB train.py --epochs 3
    torchrun --nproc_per_node 2 -m lightning_memopt.launch --budget 8GiB train.py

The script finds `sys.argv`, `__main__`, `__file__` and `sys.path` as if Python had run it. Its exceptions and exit codes are
those of the process. The script itself imports torch and Accelerate, at the time at which it would do so without this launcher.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType

from lightning_memopt import logs
from lightning_memopt.after_import import after_import
from lightning_memopt.config import MemOptConfig, disabled
from lightning_memopt.errors import MemOptError
from lightning_memopt.integrations import wire

NOTHING = (
    "MemOpt: nothing was planned, because the script gave no model and optimizer to Accelerator.prepare. Put a loop without "
    "Accelerate into `with lightning_memopt.optimize(model, optimizer, budget=...):`."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script that the arguments name (default: those of the command line)."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_memopt.launch",
        description="Run a training script that uses Accelerate within a memory budget.",
        allow_abbrev=False,
    )
    wire.add_flags(parser, "")
    parser.add_argument("-m", "--module", action="store_true", help="The script is the name of a module, as for `python -m`.")
    parser.add_argument("script", help="The training script.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="The arguments of the script.")
    given = parser.parse_args(arguments)
    try:
        texts = wire.in_environment(os.environ) or {}
        texts |= wire.given_flags(given, "")
        config = MemOptConfig(**wire.options_of(texts))
    except MemOptError as error:
        parser.error(str(error))
    os.environ |= wire.for_environment(texts)  # for processes that the script starts, and for `prepare` in the script

    def watch() -> None:
        from lightning_memopt.integrations import accelerate

        accelerate.watch(config)

    if not disabled():
        after_import("accelerate.accelerator", watch)
    failed = True
    try:
        run(given.script, given.arguments, given.module)
        failed = False
    except SystemExit as error:
        failed = bool(error.code)
        raise
    except Exception as error:
        front = sys.modules.get("lightning_memopt.integrations.accelerate")
        cause = front.ended_by(error) if front is not None else None
        if cause is None:
            raise
        raise cause from error
    finally:
        front = sys.modules.get("lightning_memopt.integrations.accelerate")
        planned = front is not None and front.end()
        if config.verbose and not (planned or failed) and os.environ.get("LOCAL_RANK", "0") == "0":
            logs.say("MemOpt: off (MEMOPT_DISABLE); the run was the plain one." if disabled() else NOTHING)


def run(script: str, arguments: Sequence[str], module: bool) -> None:
    """Run a script as `python script arguments` does, or a module as `python -m` does. The process then ends."""
    if module:
        sys.argv = [script, *arguments]
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.argv = [script, *arguments]
    path = os.path.abspath(script)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main_module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__file__=path, __loader__=loader, __builtins__=__builtins__, __cached__=None)
    try:
        code = loader.source_to_code(loader.get_data(path), path)
    except FileNotFoundError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)
