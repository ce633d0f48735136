"""The thread in which tests run backwards where they are asked to (`--device-thread`): as autograd's thread of a device."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu.lib.device_thread import backward_in_its_own_thread, in_both_threads, is_on
from tests.cpu.lib.engines import needs_fork


@pytest.fixture
def apart() -> Iterator[None]:
    with backward_in_its_own_thread():
        yield


def backward(hook: Callable[[Tensor], Any]) -> None:
    """A backward in which `hook` is called."""
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()


def test_each_test_runs_under_it_if_asked(request: pytest.FixtureRequest) -> None:
    seen: list[int] = []
    backward(lambda _: seen.append(threading.get_ident()))
    assert is_on() is (seen != [threading.get_ident()]) is request.config.getoption("device_thread")


def test_one_thread_that_python_did_not_start(apart: None) -> None:
    """Of all backwards, those inside of others included. What it has of `threading.local` stays."""
    seen, local = [], threading.local()

    def hook(_: Tensor) -> None:
        local.calls = getattr(local, "calls", 0) + 1
        seen.append((threading.get_ident(), local.calls))

    def nested(_: Tensor) -> None:
        with torch.enable_grad():
            backward(hook)

    for each in (hook, nested, hook):
        backward(each)
    assert [thread for thread, _ in seen] == [seen[0][0]] * 3 and [calls for _, calls in seen] == [1, 2, 3]
    assert seen[0][0] not in [thread.ident for thread in threading.enumerate()]
    where: list[int] = []
    in_both_threads(lambda: where.append(threading.get_ident()))
    assert where == [seen[0][0], threading.get_ident()]


def test_it_has_the_state_of_its_caller(apart: None) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    autocast: list[bool] = []
    with Names(), torch.autocast("cpu"):
        backward(lambda _: autocast.append(torch.is_autocast_enabled("cpu")))
    backward(lambda _: autocast.append(torch.is_autocast_enabled("cpu")))
    assert autocast == [True, False] and names.count("aten.mul.Tensor") == 2, "forward and backward"


def test_an_error_comes_to_the_caller(apart: None) -> None:
    error = KeyError("told")

    def raises(_: Tensor) -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        backward(raises)
    assert raised.value is error and raised.traceback[-1].name == "raises"


def test_a_signal_waits_for_the_end_of_backward(apart: None) -> None:
    """Python handles it in the main thread, which waits outside of Python."""
    events: list[str] = []

    def hook(_: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.05)
        events.append("backward")

    before = signal.signal(signal.SIGALRM, lambda *_: events.append("signal"))
    try:
        backward(hook)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert events == ["backward", "signal"]


@needs_fork
def test_a_forked_process_has_one_of_its_own(apart: None) -> None:
    seen: list[int] = []
    backward(lambda _: seen.append(threading.get_ident()))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            backward(lambda _: seen.append(threading.get_ident()))
            code = 0 if len(seen) == 2 and threading.get_ident() not in seen else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
