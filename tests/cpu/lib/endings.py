"""A program that trains in one front, writes a report, and ends in one way:
`python -m tests.cpu.lib.endings FRONT WAY PAGE`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.cpu.lib.pages import Blocks

OPTIONS: dict[str, Any] = dict(budget="min", profile_steps=2, solver_seconds=0.5, verbose=False)
STEPS = 6
Step = Callable[[], None]
Close = Callable[[], None]


def fabric(page: str) -> tuple[Step, Close]:
    """(one training step, what ends the training)."""
    from lightning_memopt import MemOptFabricStrategy
    from tests.cpu.lib.fabrics import fabric_of

    owner = fabric_of(MemOptFabricStrategy(report=page, **OPTIONS))
    module = Blocks()
    model, optimizer = owner.setup(module, torch.optim.Adam(module.parameters()))

    def step() -> None:
        owner.backward(model(torch.randn(64, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step, owner.strategy.teardown


def accelerate(page: str) -> tuple[Step, Close]:
    from lightning_memopt.accelerate import prepare
    from tests.cpu.lib.prepared import fresh

    owner = fresh()
    module = Blocks()
    model, optimizer = prepare(owner, module, torch.optim.Adam(module.parameters()), report=page, **OPTIONS)

    def step() -> None:
        owner.backward(model(torch.randn(64, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step, owner.end_training


FRONTS = {"fabric": fabric, "accelerate": accelerate}


def raises(begin: Callable[[], tuple[Step, Close]]) -> None:
    step, _ = begin()
    for _ in range(STEPS):
        step()
    raise ValueError("of the loop")


def interrupted(begin: Callable[[], tuple[Step, Close]]) -> None:
    """Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
    step, _ = begin()
    for _ in range(STEPS):
        step()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def closes(begin: Callable[[], tuple[Step, Close]]) -> None:
    """The loop ends the training in a `finally`, and the program goes on."""
    step, close = begin()
    try:
        try:
            for _ in range(STEPS):
                step()
            raise ValueError("of the loop")
        finally:
            close()
    except ValueError:
        pass


def handles_another(begin: Callable[[], tuple[Step, Close]]) -> None:
    """All of the training is in the handler of an error that has nothing to do with it."""
    try:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        step, close = begin()
        for _ in range(STEPS):
            step()
        close()


def recovers(begin: Callable[[], tuple[Step, Close]]) -> None:
    """An error comes, and the training goes on after it."""
    step, close = begin()
    for _ in range(STEPS):
        step()
    try:
        raise ValueError("of a batch")
    except ValueError:
        step()
        close()


def collected(begin: Callable[[], tuple[Step, Close]]) -> None:
    """The training ended well, and its model is collected while an unrelated error is handled."""
    state = [begin()]
    for _ in range(STEPS):
        state[0][0]()
    try:
        raise ValueError("of another part of the program")
    except ValueError:
        state.clear()
        gc.collect()


def exits(begin: Callable[[], tuple[Step, Close]]) -> None:
    """Ends with exit code 0, which is not an error."""
    step, close = begin()
    try:
        for _ in range(STEPS):
            step()
        sys.exit(0)
    finally:
        close()


def in_a_process(begin: Callable[[], tuple[Step, Close]]) -> None:
    """Trains in a process of multiprocessing's, as launchers that spawn processes do; the error is of that process."""
    torch.multiprocessing.start_processes(_child, (begin,), nprocs=1, start_method="fork")


def _child(index: int, begin: Callable[[], tuple[Step, Close]]) -> None:
    raises(begin)


WAYS = {way.__name__: way for way in (raises, interrupted, closes, handles_another, recovers, collected, exits, in_a_process)}

if __name__ == "__main__":
    front, way, page = sys.argv[1:]
    WAYS[way](lambda: FRONTS[front](page))
