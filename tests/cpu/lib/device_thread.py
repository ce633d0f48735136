"""Backward in a thread of its own, as on CUDA: autograd has one thread for each device, and it lives as long as the process."""

from __future__ import annotations

import contextlib
import ctypes
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt import cxx
from lightning_memopt.native import build

_SOURCE = Path(__file__).with_suffix(".cpp")
_run_backward = torch.autograd.graph._engine_run_backward


@cache
def _library() -> Any:
    python = f"-I{sysconfig.get_paths()['include']}"
    path = cxx.library(
        "device_thread",
        build.parts([_SOURCE]),
        lambda compiler, target: cxx.run(build.command(compiler, [_SOURCE], ["-ltorch_cpu", "-lc10"], target, [python, "-O0"])),
        lambda: None,
    )
    library = ctypes.PyDLL(str(path))
    library.memopt_state_of_thread.restype = ctypes.c_void_p
    library.memopt_forget_state.argtypes = [ctypes.c_void_p]
    library.memopt_call_under.argtypes = [ctypes.c_void_p, ctypes.py_object]
    library.memopt_call_under.restype = ctypes.py_object
    return library


def _under(state: int, function: Callable[[], Any]) -> Any:
    """The result of `function`, or its error as a value: a traceback would hold what the thread's frames hold."""
    try:
        return True, _library().memopt_call_under(state, function)
    except BaseException as error:
        return False, error.with_traceback(None)


@contextlib.contextmanager
def backward_in_its_own_thread() -> Iterator[None]:
    """Within, each backward that is not inside of another one runs in one other thread, with the state of its caller."""
    library = _library()
    ready = torch.get_num_threads  # as autograd's threads, it begins with the number of threads that was set
    with ThreadPoolExecutor(1, initializer=ready) as thread, pytest.MonkeyPatch.context() as patch:

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:
                return _run_backward(*args, **kwargs)
            state = library.memopt_state_of_thread()
            try:
                done, result = thread.submit(_under, state, partial(_run_backward, *args, **kwargs)).result()
            finally:
                library.memopt_forget_state(state)
            if done:
                return result
            raise result

        for module in (torch.autograd, torch.autograd.graph):
            patch.setattr(module, "_engine_run_backward", run)
        yield
