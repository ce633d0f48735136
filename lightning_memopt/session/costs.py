"""Seconds that the engine's own work takes on this machine, measured once. A plan of many small ops costs more because of it.

An op in a dispatch mode takes longer the more arguments it has, because they pass through Python. Recording an op, and running
one again, take a fixed time on top. All of this is the host's time. A CUDA device works meanwhile, so only the seconds by which
the host takes longer than the device are lost.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_memopt.clocks import perf_counter
from lightning_memopt.plan import Rebuild
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.session import times
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.recording import PlannedRecording
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from lightning_memopt.torch_private import TorchDispatchMode, schema_of

T = TypeVar("T")
_LINKS = 12
"""Links of the measured chain, or calls of a measured op."""
_ROUNDS = 15
"""How often each function is timed; the median counts."""


@dataclass(frozen=True)
class Costs:
    """Seconds on top of the op itself.

    call: for each op that runs in the dispatch mode.
    argument: for each argument of such an op.
    recorded: for each op that is compared and recorded, its saves included.
    rebuilt: for each op that runs again.
    eager: the host's seconds for an op without all this, where a device works beside it; 0 where ops run on the host.
    """

    call: float
    argument: float
    recorded: float
    rebuilt: float
    eager: float = 0.0

    def of(self, program: Program) -> float:
        """Seconds that a step of this program takes on top of its ops, those that run again included."""
        if program.empty:
            return 0.0
        quiet = {j for first, end in program.quiet.values() for j in range(first, end)}
        loud = [op for op in program.graph.forward if op.id not in quiet]
        dispatched = sum(self.call + self.argument * _arguments(op.name) for op in loud)
        recorded = sum(1 for op in loud if not program.passes(op.id))
        host = dispatched + self.recorded * recorded + self.rebuilt * len(program.schedule.rebuilt)
        if not self.eager:
            return host
        ops = program.graph.ops
        rebuilding = [ops[s.op] for steps in program.schedule.segments.values() for s in steps if isinstance(s, Rebuild)]
        device = sum(op.seconds for op in ops) + sum(op.seconds for op in rebuilding)
        return max(0.0, host + self.eager * (len(ops) + len(rebuilding)) - device)


@cache
def _arguments(name: str) -> int:
    """The number of values in the arguments of an op, by its schema: a list counts as three."""
    try:
        schema = schema_of(*name.partition(".")[::2])
    except RuntimeError:
        return 3
    return sum(3 if "[]" in str(a.real_type) else 1 for a in schema.arguments)


class _Empty(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func._op(*args, **(kwargs or {}))


def _medians(runs: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Median seconds of each function. Their runs take turns."""
    synchronize: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            synchronize()
            began = perf_counter()
            run()
            synchronize()
            seconds[name].append(perf_counter() - began)
    return {name: statistics.median(s) for name, s in seconds.items()}


def _in_mode(run: Callable[[], Any]) -> Callable[[], Any]:
    def inside() -> None:
        with _Empty():
            run()

    return inside


def _planned(
    holder: nn.Module, forward: Callable[[], torch.Tensor], device: torch.device
) -> tuple[Program, Callable[[], None]]:
    """Observe the chain. Returns a program that runs every op again, and the chain's step under it."""
    observation = Observation(holder, [], device, None, verify=False, meter=False)
    with observation.begin_round(()):
        loss = forward()
    observation.forward_ended()
    loss.backward()
    graph = observation.finish()
    assert graph is not None
    program = Program(graph, recompute_everything(graph))
    learned = Learned(program)

    def step() -> None:
        with PlannedRecording(PlannedEngine(learned), holder):
            loss = forward()
        loss.backward()

    return program, step


def measured(device_type: str = "cpu") -> Costs:
    """The costs on this machine, from a chain of tiny ops and a tiny convolution; takes about 0.3 s, once a process."""
    return times.current.of_our_work(lambda: _once(torch.device(device_type)))


@cache
def _once(device: torch.device) -> Costs:
    return in_own_thread(lambda: _measured(device))


def in_own_thread(measure: Callable[[], T]) -> T:
    """The result of `measure` in a new thread: modes, hooks, autocast and grad mode belong to a thread, and a step may be
    running in this one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure).result()


def _measured(device: torch.device) -> Costs:
    with torch.enable_grad():
        holder = nn.Module()
        holder.w = weight = nn.Parameter(torch.ones(4, 4, device=device))
        x = torch.ones(4, 4, device=device)

        def forward() -> torch.Tensor:
            y = x
            for _ in range(_LINKS):
                y = torch.tanh(y * weight + y).sin()
            return y.sum()

        image, kernel = torch.ones(1, 1, 3, 3, device=device), torch.ones(1, 1, 1, 1, device=device)

        def add() -> None:
            for _ in range(_LINKS):
                torch.add(x, x)

        def convolve() -> None:
            for _ in range(_LINKS):
                torch.conv2d(image, kernel)

        program, planned = _planned(holder, forward, device)
        planned()  # learns its templates
        took = _medians(
            {
                "add": add,
                "add in mode": _in_mode(add),
                "convolution": convolve,
                "convolution in mode": _in_mode(convolve),
                "forward": forward,
                "step": lambda: forward().backward(),
                "planned": planned,
            },
            device,
        )
    few, many = _arguments("aten::add.Tensor"), _arguments("aten::convolution")
    low = (took["add in mode"] - took["add"]) / _LINKS
    high = (took["convolution in mode"] - took["convolution"]) / _LINKS
    argument = max(0.0, (high - low) / (many - few))
    call = max(0.0, low - few * argument)
    dispatched = Costs(call, argument, 0.0, 0.0).of(program)
    ops = len(program.graph.forward) + len(program.schedule.rebuilt)
    rest = took["planned"] - took["step"] - took["forward"] - dispatched  # ops that run again take as long as in forward
    seconds_an_op = max(0.0, rest) / ops  # recording an op and running it again take about the same
    eager = took["forward"] / len(program.graph.forward) if device.type == "cuda" else 0.0
    return Costs(call, argument, seconds_an_op, seconds_an_op, eager)
