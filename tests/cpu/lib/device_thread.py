"""Backward in a thread of its own, as on CUDA: autograd has one thread for each device, and it lives as long as the process.

`pytest --device-thread` runs every test under it. Processes that tests start are not: only what is forked from this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.variable import Variable

from lightning_memopt import cxx
from lightning_memopt.native import build

_SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def _library() -> Any:
    python = f"-I{sysconfig.get_paths()['include']}"
    path = cxx.library(
        "device_thread",
        "a device thread of the tests",
        build.parts([_SOURCE]),
        lambda compiler, target: cxx.run(build.command(compiler, [_SOURCE], ["-ltorch_cpu", "-lc10"], target, [python, "-O0"])),
        lambda line: None,
    )
    library = ctypes.PyDLL(str(path))
    library.memopt_call_in_device_thread.argtypes = [ctypes.py_object] * 3
    library.memopt_call_in_device_thread.restype = ctypes.py_object
    return library


class _Engine:
    """Autograd's engine, of which each backward that is not inside of another one runs in one other thread."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.call = engine, _library().memopt_call_in_device_thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return self._engine.run_backward(*args, **kwargs)
        return self.call(self._engine.run_backward, args, kwargs)


def is_on() -> bool:
    """Whether backwards run in a thread of their own."""
    return isinstance(Variable._execution_engine, _Engine)


def in_both_threads(do: Callable[[], Any]) -> None:
    """Call it in the thread of backwards, if they have one of their own, and in this one."""
    if is_on():
        Variable._execution_engine.call(do, (), {})
    do()


@contextlib.contextmanager
def backward_in_its_own_thread() -> Iterator[None]:
    """Within, each backward that is not inside of another one runs in one other thread, with the state of its caller."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_on():
            patch.setattr(Variable, "_execution_engine", _Engine(Variable._execution_engine))
        yield
