"""Seconds that the engine's own work takes on this machine, measured once, for the engine that is in use.

An op of a planned forward takes longer than in eager mode; if the plan depends on it, it is recorded, which takes longer still.
To the Python engine, an op costs more the more arguments it has, because they pass through Python. An op that runs again costs
a fixed time on top of the op. All of this is the host's time. A CUDA device works meanwhile, so only the seconds by which the
host takes longer than the device are lost.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_memopt.clocks import perf_counter
from lightning_memopt.graph import Graph
from lightning_memopt.native.engine import loaded
from lightning_memopt.plan import Life, Rebuild
from lightning_memopt.record import Outside
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.session import times
from lightning_memopt.session.observation import Observation
from lightning_memopt.session.recording import PlannedRecording
from lightning_memopt.solvers.recompute.baselines import recompute_everything
from lightning_memopt.torch_private import schema_of

T = TypeVar("T")
_LINKS = 12
"""Links of the measured chain, or calls of a measured op."""
_ROUNDS = 15
"""How often each function is timed; the median counts."""


@dataclass(frozen=True)
class Costs:
    """Seconds on top of the op itself.

    call: for each op of a planned forward.
    argument: for each argument of such an op.
    recorded: for each op that is compared and recorded, its saves included.
    rebuilt: for each op that runs again.
    eager: the host's seconds for an op without all this, where a device works beside it; 0 where ops run on the host.
    forward: for each planned forward: to enter and leave it.
    """

    call: float
    argument: float
    recorded: float
    rebuilt: float
    eager: float = 0.0
    forward: float = 0.0

    def of(self, program: Program) -> float:
        """Seconds that a step of this program takes on top of its ops, those that run again included."""
        if program.empty:
            return 0.0
        quiet = {j for first, end in program.quiet.values() for j in range(first, end)}
        loud = [op for op in program.graph.forward if op.id not in quiet]
        dispatched = sum(self.call + self.argument * _arguments(op.name) for op in loud)
        recorded = sum(1 for op in loud if not program.passes(op.id))
        host = self.forward + dispatched + self.recorded * recorded + self.rebuilt * len(program.schedule.rebuilt)
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


class _Empty(Outside):
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
        with ExitStack() as stack:
            _Empty().enter_in(stack)
            run()

    return inside


class _Chain:
    """tanh(y * weight + y), then sin, of tiny tensors: each time that it takes is overhead.

    links: how often.
    """

    def __init__(self, links: int, device: torch.device) -> None:
        self.links, self.device = links, device
        self.holder = nn.Module()
        self.holder.w = self._weight = nn.Parameter(torch.ones(4, 4, device=device))
        self._x = torch.ones(4, 4, device=device)

    @property
    def ops(self) -> int:
        return 4 * self.links

    def forward(self) -> torch.Tensor:
        y = self._x
        for _ in range(self.links):
            y = torch.tanh(y * self._weight + y).sin()
        return y

    def graph(self) -> Graph:
        """Its observed step."""
        observation = Observation(self.holder, [], self.device, None, verify=False, meter=False)
        with observation.begin_round(()):
            loss = self.forward().sum()
        observation.forward_ended()
        loss.backward()
        graph = observation.finish()
        assert graph is not None
        return graph

    def planned(self, graph: Graph, lives: Iterable[Life]) -> Callable[[], torch.Tensor]:
        """The forward under a plan, with its templates learned."""
        learned = Learned(Program(graph, tuple(lives)))

        def forward() -> torch.Tensor:
            with PlannedRecording(PlannedEngine(learned), self.holder):
                return self.forward()

        forward().sum().backward()
        return forward


def measured(device_type: str = "cpu") -> Costs:
    """The costs on this machine, from a chain of tiny ops and a tiny convolution; takes about 0.3 s, once a process."""
    return times.current.of_our_work(lambda: _once(torch.device(device_type)))


def _once(device: torch.device) -> Costs:
    with _measuring:  # two sessions at once would measure each other
        key = str(device), loaded() is not None
        if key not in _known:
            _known[key] = in_own_thread(lambda: _measured(device))
        return _known[key]


_known: dict[tuple[str, bool], Costs] = {}
"""(device, whether the native engine is in use) -> the costs."""
_measuring = threading.Lock()


def in_own_thread(measure: Callable[[], T]) -> T:
    """The result of `measure` in a new thread: modes, hooks, autocast and grad mode belong to a thread, and a step may be
    running in this one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure).result()


def _measured(device: torch.device) -> Costs:
    with torch.enable_grad():
        chain, short = _Chain(_LINKS, device), _Chain(1, device)
        graph = chain.graph()
        passing, everything = chain.planned(graph, ()), chain.planned(graph, recompute_everything(graph))
        took = _medians(
            {
                "forward": chain.forward,
                "short": short.forward,
                "passing": passing,
                "short, passing": short.planned(short.graph(), ()),
                "everything": everything,
                "step": lambda: chain.forward().sum().backward(),
                "everything, step": lambda: everything().sum().backward(),
                "alone": torch.no_grad()(chain.forward),
            },
            device,
        )
        argument = _of_an_argument(device) if loaded() is None else 0.0
    passes, short_passes = took["passing"] - took["forward"], took["short, passing"] - took["short"]
    an_op = max(0.0, (passes - short_passes) / (chain.ops - short.ops))
    again = Program(graph, tuple(recompute_everything(graph))).schedule.rebuilt
    backward = took["everything, step"] - took["everything"] - (took["step"] - took["forward"])
    return Costs(
        call=max(0.0, an_op - argument * sum(_arguments(op.name) for op in graph.forward) / chain.ops),
        argument=argument,
        recorded=max(0.0, (took["everything"] - took["passing"]) / chain.ops),
        rebuilt=max(0.0, backward / len(again) - took["alone"] / chain.ops),
        eager=took["forward"] / chain.ops if device.type == "cuda" else 0.0,
        forward=max(0.0, short_passes - an_op * short.ops),
    )


def _of_an_argument(device: torch.device) -> float:
    """Seconds that an op takes longer in a dispatch mode for each argument more."""
    x, image = torch.ones(4, 4, device=device), torch.ones(1, 1, 3, 3, device=device)
    kernel = torch.ones(1, 1, 1, 1, device=device)

    def add() -> None:
        for _ in range(_LINKS):
            torch.add(x, x)

    def convolve() -> None:
        for _ in range(_LINKS):
            torch.conv2d(image, kernel)

    took = _medians(
        {"add": add, "add in mode": _in_mode(add), "convolution": convolve, "convolution in mode": _in_mode(convolve)}, device
    )
    few, many = took["add in mode"] - took["add"], took["convolution in mode"] - took["convolution"]
    return max(0.0, (many - few) / _LINKS / (_arguments("aten::convolution") - _arguments("aten::add.Tensor")))
