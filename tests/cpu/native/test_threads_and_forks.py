"""Other threads, and forked processes, in the middle of a planned step: everybody gets the bits of a plain run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_memopt import optimize
from lightning_memopt.native import engine
from tests.cpu.lib.device_thread import is_on
from tests.cpu.lib.engines import needs_fork, needs_native
from tests.cpu.lib.loops import installed, leaves_nothing
from tests.cpu.native.test_both_engines import Mixed

pytestmark = needs_native
STEPS = 8
X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Told(nn.Module):
    """Calls `at` with the moment: "forward" in the middle of its forward, "backward" where the gradient of that comes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = Mixed(), Mixed()
        for part in (self.first, self.last):
            part.eval()  # no dropout: the threads have one generator
        self.at: Callable[[str], None] = lambda moment: None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.at("forward")
        x = x * h.sigmoid()
        x.register_hook(lambda _: self.at("backward"))
        return self.last(x) + h


_drawing = threading.Lock()
Trained = tuple[list[Tensor], dict[str, Tensor]]


Gate = Callable[[], Any]


def trained(
    seed: int,
    planned: bool,
    at: Callable[[int, str], None] = lambda step, moment: None,
    n: int = STEPS,
    gate: Gate = lambda: None,
) -> Trained:
    """Steps of a model in this thread: losses and weights.

    at: called with the number of the step and the moment. gate: called when the run is open, and before it is closed.
    """
    with _drawing:
        model = Told(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = dict(budget="min", profile_steps=1, verbose=False)
    losses = []
    ran = engine.loaded().counts()[0]
    with optimize(model, optimizer, **options) if planned else contextlib.nullcontext() as run:
        gate()
        for i in range(n):
            model.at = lambda moment, i=i: at(i, moment)
            loss = model(X)
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            at(i, "between")
        if planned:
            assert run is not None and run.plan is not None and run.plan.predicted.rebuilt_ops > 0
            assert engine.loaded().counts()[0] > ran
        gate()
    return losses, model.state_dict()


def same(one: Trained, other: Trained) -> bool:
    return all(map(torch.equal, one[0], other[0])) and all(map(torch.equal, one[1].values(), other[1].values()))


def may_wait(moment: str) -> bool:
    """Whether a step may wait for the other thread's then. Where all backwards run in one thread, a hook that waits for another
    backward waits for ever, on CUDA as here.
    """
    return moment != "backward" or not is_on()


class Other:
    """A thread that trains, one step whenever it is told to, or as it likes."""

    def __init__(self, planned: bool, stepwise: bool, gate: Gate = lambda: None) -> None:
        self.result: Any = None
        self._goes, self._done, self._stepwise = threading.Semaphore(0), threading.Semaphore(0), stepwise
        self._thread = threading.Thread(target=self._train, args=(planned, gate))
        self._thread.start()

    def _train(self, planned: bool, gate: Gate) -> None:
        try:
            self.result = trained(2, planned, self._wait, gate=gate)
        except BaseException as error:
            self.result = error
        finally:
            self._done.release(1000)

    def _wait(self, step: int, moment: str) -> None:
        """At each moment: it goes on with the next part of its step when it is told to."""
        if self._stepwise and may_wait(moment):
            self._done.release()
            assert self._goes.acquire(timeout=60)

    def goes(self) -> None:
        """It goes to its next moment."""
        self._goes.release()
        assert self._done.acquire(timeout=60)

    def ends(self) -> Any:
        self._goes.release(1000)
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


@pytest.mark.parametrize("planned", [False, True], ids=["plain", "planned"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_thread_that_trains_in_the_middle_of_a_step(parts: int, planned: bool) -> None:
    """At each moment of each step, the other thread goes on by some parts of its own step: all orders of both come."""
    expected, others = trained(1, False), trained(2, False)
    before = installed()
    other = Other(planned, stepwise=True)

    def at(step: int, moment: str) -> None:
        for _ in range(parts if may_wait(moment) else 0):
            other.goes()

    try:
        mine = trained(1, True, at)
    finally:
        result = other.ends()
    assert not isinstance(result, BaseException), result
    assert same(mine, expected) and same(result, others)
    assert installed() == before


@pytest.mark.parametrize("planned", [False, True], ids=["plain", "planned"])
def test_a_thread_that_trains_meanwhile(planned: bool) -> None:
    """Runs open and close while no thread updates: torch's hooks for all optimizers must not change in an optimizer's step."""
    expected, others = trained(1, False), trained(2, False)
    before = installed()
    for _ in range(3):
        gate = threading.Barrier(2, timeout=60).wait
        other = Other(planned, False, gate)
        mine, result = trained(1, True, gate=gate), other.ends()
        assert not isinstance(result, BaseException), result
        assert same(mine, expected) and same(result, others)
    assert installed() == before


def test_the_ops_of_a_plain_thread_are_not_seen() -> None:
    """Torch's table of functions is exchanged for the whole process while a planned forward runs."""
    seen: list[int] = []

    def plain_ops() -> None:
        before = engine.loaded().counts()
        t = X * 2
        for _ in range(20):
            t = (t.sin() + 1).mul_(0.5)
        seen.append(sum(engine.loaded().counts()) - sum(before))

    def at(step: int, moment: str) -> None:
        if step == STEPS - 1 and moment == "forward":
            thread = threading.Thread(target=plain_ops)
            thread.start()
            thread.join()

    trained(1, True, at)
    assert seen == [0]


ALONE = "a process that is forked there has no other thread, and nobody gets what its backward returns"
IN_BACKWARD = pytest.param("backward", marks=pytest.mark.calling_thread(ALONE))


def in_a_fork(do: Callable[[], bool]) -> int:
    """The exit code of a forked process: 0 where `do` returns true, 1 where it does not, 2 where it raises."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            with torch.enable_grad():  # it is off in hooks of backward
                code = 0 if do() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@needs_fork
@pytest.mark.parametrize("moment", ["forward", "backward", "between"])
def test_a_process_forked_in_the_middle_of_a_step(moment: str) -> None:
    """The child trains another model, plainly and planned; the parent goes on."""
    expected, others = trained(1, False), trained(2, False)
    codes = []

    def at(step: int, now: str) -> None:
        if step >= STEPS - 2 and now == moment:
            codes.append(in_a_fork(lambda: same(trained(2, False), others)))
            codes.append(in_a_fork(lambda: same(trained(2, True), others)))

    assert same(trained(1, True, at), expected)
    assert codes == [0] * 4


@needs_fork
@pytest.mark.parametrize("moment", ["forward", IN_BACKWARD, "between"])
def test_a_forked_process_goes_on_with_the_step(moment: str) -> None:
    """Both processes end the same training."""
    expected = trained(1, False)
    pid = None

    def at(step: int, now: str) -> None:
        nonlocal pid
        if step == STEPS - 2 and now == moment:
            pid = os.fork()

    code = 2
    try:
        code = 0 if same(trained(1, True, at), expected) else 1
    finally:
        if pid == 0:
            os._exit(code)
    assert pid is not None and code == 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Squares(Dataset):
    """What a worker computes: a gradient."""

    def __getitem__(self, i: int) -> Tensor:
        w = torch.full((3,), float(i), requires_grad=True)
        with torch.enable_grad():  # it is off in hooks of backward
            (w.sin() * w).sum().backward()
        assert w.grad is not None
        return w.grad

    def __len__(self) -> int:
        return 6


@needs_fork
@pytest.mark.parametrize("moment", ["forward", "backward", "between"])
def test_workers_that_start_in_the_middle_of_a_step(moment: str) -> None:
    expected = trained(1, False)
    given = torch.stack([Squares()[i] for i in range(6)])
    seen = []

    def at(step: int, now: str) -> None:
        if step == STEPS - 1 and now == moment:
            loader = DataLoader(Squares(), 2, num_workers=2, multiprocessing_context="fork", timeout=60)
            seen.append(torch.cat(list(loader)))

    with leaves_nothing():
        assert same(trained(1, True, at), expected)
    assert len(seen) == 1 and torch.equal(seen[0], given)
