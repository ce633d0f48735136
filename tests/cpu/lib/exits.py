"""Training runs that end in the middle, for tests that compare processes: `python -m tests.cpu.lib.exits FOLDER`.

Each run is a process of its own, forked before anything has run, so that all share the imports. HOW is `plain` or `planned`,
CASE a name of `CASES`, with "+open" where the run is left open. What a process prints is in FOLDER/HOW.CASE.out and
FOLDER/HOW.CASE.err, its exit code in FOLDER/HOW.CASE.code. `planned` prints to standard error if the run has no plan, or one
that rebuilds nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers would import it in each process
from torch import Tensor

from lightning_memopt import optimize
from lightning_memopt.session import times
from tests.cpu.lib.loops import Small, batches, loss_of, sgd, small, step
from tests.cpu.lib.times import OfMachine

DATA = batches(4)
live: list[Any] = []
"""What is still there when the interpreter ends."""


class Process:
    """A model in training. `at`: called with a name at moments of the next step: "forward", "backward"."""

    def __init__(self, planned: bool) -> None:
        self.model: Small = small()
        self.optimizer = sgd(self.model)
        self.at: Callable[[str], None] | None = None
        self.model.layers[1].register_forward_hook(self._in_forward)
        self.block: Any = contextlib.nullcontext()
        if planned:
            self.block = optimize(self.model, self.optimizer, budget="min", profile_steps=2, verbose=False)

    def _in_forward(self, *args: Any) -> None:
        if self.at is not None:
            self.at("forward")
            args[2].register_hook(lambda _: self.at and self.at("backward"))

    def trains(self, run: Any) -> None:
        """Four steps; the last two are under a plan."""
        torch.manual_seed(5)
        for batch in DATA:
            step(self.model, self.optimizer, batch)
        if run is not None and (run.plan is None or not run.plan.predicted.rebuilt_ops):
            print("nothing is rebuilt", file=sys.stderr)

    def says(self) -> None:
        print([t.double().sum().item() for t in self.model.state_dict().values()], torch.rand(1).item(), flush=True)

    def loss(self) -> Tensor:
        return loss_of(self.model, DATA[0])


def ends(where: str, how: Callable[[], Any]) -> Callable[[Process], None]:
    """A step that ends in the forward or in the backward: `how` raises, or ends the process."""

    def case(process: Process) -> None:
        process.at = lambda moment: how() if moment == where else None
        process.loss().backward()

    return case


def raising(error: BaseException) -> Callable[[], Any]:
    def raises() -> None:
        raise error

    return raises


def graph_in_a_global(process: Process) -> None:
    live.append(process.loss())


def graph_after_a_partial_backward(process: Process) -> None:
    loss = process.loss()
    torch.autograd.grad(loss, process.model.head.weight, retain_graph=True)
    live.append(loss)


def graph_in_a_cycle(process: Process) -> None:
    cycle: list[Any] = [process.loss()]
    cycle.append(cycle)


def backward_at_exit(process: Process) -> None:
    loss = process.loss()

    def ends() -> None:
        loss.backward()
        print(process.model.embed.weight.grad.double().sum().item(), flush=True)  # type: ignore[union-attr]

    atexit.register(ends)


def a_step_at_exit(process: Process) -> None:
    atexit.register(lambda: (step(process.model, process.optimizer, DATA[1]), process.says()))


def a_thread_in_forward(process: Process) -> None:
    """The run, and the interpreter, end while a daemon thread waits in the middle of a forward. (Where it runs code of
    torch at that moment, the plain process aborts.)
    """
    reached = threading.Event()

    def at(moment: str) -> None:
        reached.set()
        threading.Event().wait()

    process.at = at
    threading.Thread(target=process.loss, daemon=True).start()
    assert reached.wait(60)


WAYS: dict[str, Callable[[], Any]] = {
    "exit": raising(SystemExit(7)),
    "error": raising(ValueError("in the step")),
    "interrupt": raising(KeyboardInterrupt()),
    "hard_exit": lambda: os._exit(9),
}
CASES: dict[str, Callable[[Process], None]] = {
    f"{name}_in_{where}": ends(where, how) for name, how in WAYS.items() for where in ("forward", "backward")
} | {
    case.__name__: case
    for case in (
        graph_in_a_global, graph_after_a_partial_backward, graph_in_a_cycle,
        backward_at_exit, a_step_at_exit, a_thread_in_forward,
    )
}  # fmt: skip


def main(how: str, case: str) -> None:
    """The run is left open where the name of the case ends with "+open"."""
    name, _, leaves_open = case.partition("+")
    process = Process(how == "planned")
    if leaves_open:
        live.append(process)
        run = process.block.__enter__()
        process.trains(run)
        process.says()
        CASES[name](process)
        return
    with process.block as run:
        process.trains(run)
        process.says()
        CASES[name](process)


def in_turn(folder: Path) -> tuple[str, str] | None:
    """In each of the forked processes: what it is to run. None in the first one, when all have ended.

    They are not processes of `multiprocessing`, as in forked.py: those end without the end of the interpreter, which is tested.
    """
    gc.freeze()  # each session collects garbage: not of all that was imported
    for how, suffix in (("plain", ""), ("planned", ""), ("planned", "+open")):
        for name in CASES:
            stem = folder / f"{how}.{name}{suffix}"
            pid = os.fork()
            if pid == 0:
                signal.alarm(120)  # one that hangs is killed
                for stream, ending in ((1, "out"), (2, "err")):
                    os.dup2(os.open(f"{stem}.{ending}", os.O_CREAT | os.O_WRONLY), stream)
                return how, f"{name}{suffix}"
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            Path(f"{stem}.code").write_text(str(code))
    return None


if __name__ == "__main__":
    times.current = OfMachine()  # to measure this machine takes a second in each process
    run = in_turn(Path(sys.argv[1]))
    if run is not None:
        main(*run)
