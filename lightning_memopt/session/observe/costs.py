"""Seconds that the engine's own work takes on this machine, measured once, for the engine that is in use.

An op of a planned forward takes longer than in eager mode; if the plan depends on it, it is recorded, which takes longer still.
To the Python engine, an op costs more the more arguments it has, because they pass through Python. An op that runs again costs
a fixed time on top of the op, and so does each segment of such ops. All of this is the host's time. A CUDA device works
meanwhile, so only the seconds by which the host takes longer than the device are lost.

On the CPU, the tensors of an op push the engine out of the caches, and its own work then takes up to three times as long.
So it is measured for each magnitude of tensors, while as many bytes as these have are copied between the ops.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.nn import functional

from lightning_memopt.device.backends import backend_of
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.device.places import current, indexed, on_host
from lightning_memopt.graph import Graph, unpacks_of
from lightning_memopt.native.engine import loaded
from lightning_memopt.plan import Life, Overhead
from lightning_memopt.record import Outside, double_of
from lightning_memopt.runtime import Learned, PlannedEngine, Program
from lightning_memopt.runtime.early_updates import step_without_hooks
from lightning_memopt.session import times
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.solvers.rollout import Rollout
from lightning_memopt.torch_private import schema_of

T = TypeVar("T")
_LINKS = 12
"""Links of the measured chain, or calls of a measured op."""
_OPS_OF_A_SEGMENT = 4
"""About how many ops run again at one unpack: two in a loop over cells, seven in a transformer."""
_FEWEST_TOUCHED, _MOST_TOUCHED = 2**16, 2**20
"""Bytes of an op's tensors: fewer leave the engine in the caches, more hardly slow it down further and take long to measure."""
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
    segment: for each segment, which is everything that runs again at one unpack.
    """

    call: float
    argument: float
    recorded: float
    rebuilt: float
    eager: float = 0.0
    forward: float = 0.0
    segment: float = 0.0

    def of(self, program: Program) -> float:
        """Seconds that a step of this program takes on top of its ops, those that run again included."""
        if program.empty:
            return 0.0
        quiet = {j for first, end in program.quiet.values() for j in range(first, end)}
        loud = [op for op in program.graph.forward if op.id not in quiet]
        dispatched = sum(self.call + self.argument * _arguments(op.name) for op in loud)
        recorded = sum(op.id in program.recorded for op in loud)
        runs, segments = program.schedule.runs, len(program.schedule.segments)
        host = self.forward + dispatched + self.recorded * recorded + self.rebuilt * len(runs) + self.segment * segments
        if not self.eager:
            return host
        ops = program.graph.ops
        device = sum(op.seconds for op in ops) + sum(ops[o].seconds for o in runs)
        return max(0.0, host + self.eager * (len(ops) + len(runs)) - device)

    def of_rebuilt_op(self, graph: Graph) -> float:
        """About how many of these seconds are due to each op that runs again; 0 where a device takes longer than the host."""
        if self.eager and self.eager * len(graph.ops) < sum(op.seconds for op in graph.ops):
            return 0.0
        return self.recorded + self.rebuilt + self.segment / _OPS_OF_A_SEGMENT


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
    """Median seconds of each function. Their runs take turns. On the CPU it is this thread's time: others may be busy, too."""
    backend = backend_of(device)
    synchronize, clock = backend.synchronize, backend.clock
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            synchronize()
            began = clock()
            run()
            synchronize()
            seconds[name].append(clock() - began)
    return {name: statistics.median(s) for name, s in seconds.items()}


def _in_mode(run: Callable[[], Any]) -> Callable[[], Any]:
    def inside() -> None:
        with ExitStack() as stack:
            _Empty().enter_in(stack)
            run()

    return inside


class _Chain:
    """relu(batch_norm(convolution(y))) + y of tiny tensors: each time that it takes is overhead.

    Its ops have the number of arguments, results and saved tensors of the ops that take most of a step.

    links: how often.
    nbytes: bytes that are touched behind each op.
    """

    def __init__(self, links: int, device: torch.device, nbytes: int = 0) -> None:
        self.links, self.device = links, device
        self._here, self._there = bytearray(nbytes // 2), bytearray(nbytes // 2)
        self.holder = nn.Module()
        self.holder.kernel = self._kernel = nn.Parameter(torch.ones(1, 1, 1, 1, device=device))
        self.holder.scale = self._scale = nn.Parameter(torch.ones(1, device=device))
        self._mean, self._variance = torch.zeros(1, device=device), torch.ones(1, device=device)
        self._x = torch.ones(1, 1, 4, 4, device=device)

    @property
    def ops(self) -> int:
        return 4 * self.links

    def forward(self) -> torch.Tensor:
        y = self._x
        for _ in range(self.links):
            z = self._touching(torch.conv2d(y, self._kernel))
            z = self._touching(functional.batch_norm(z, self._mean, self._variance, self._scale, training=True))
            y = self._touching(self._touching(z.relu()) + y)
        return y

    def _touching(self, y: torch.Tensor) -> torch.Tensor:
        """The tensor. Other memory is touched now, and again when its gradient is there."""
        if self._here:
            self.touch()
            if y.requires_grad:
                y.register_hook(self.touch)
        return y

    def touch(self, _: object = None) -> None:
        self._there[:] = self._here

    def touch_for_each_op(self) -> None:
        for _ in range(self.ops):
            self.touch()

    def graph(self) -> Graph:
        """Its observed step. All its ops may run again, even if cuDNN chooses by time, because their results are not used."""
        observation = Observation(self.holder, [], self.device, None, verify=False, meter=False)
        with observation.begin_round(()):
            loss = self.forward().sum()
        observation.forward_ended()
        loss.backward()
        graph = observation.finish()
        assert graph is not None
        return replace(graph, ops=tuple(replace(op, recomputable=op.phase == "forward") for op in graph.ops))

    def planned(self, graph: Graph, lives: Iterable[Life]) -> Callable[[], torch.Tensor]:
        """The forward under a plan, with its templates learned."""
        learned = Learned(Program(graph, tuple(lives)))

        def forward() -> torch.Tensor:
            with PlannedRecording(PlannedEngine(learned), self.holder):
                return self.forward()

        forward().sum().backward()
        return forward


def _checkpointed(graph: Graph, links: int = 1) -> tuple[Life, ...]:
    """A plan of a chain: the result of every few links is held, and the other ops between two run again when backward comes
    to them.
    """
    ends = [op.outputs[0] for op in graph.forward if op.name == "aten::add.Tensor"]
    held = set(ends[links - 1 :: links])
    roll = Rollout(graph)
    roll.serve([(point, save.tensor) for point, save in unpacks_of(graph.saves)], held)
    return roll.lives()


def overhead(graph: Graph, device: torch.device | None = None) -> Overhead:
    """The engine's own work in a step under a plan of this graph. It may measure, on `device`; see `measured`."""
    on_this_machine = measured(graph, device)
    return Overhead(lambda lives: on_this_machine.of(Program(graph, lives)), on_this_machine.of_rebuilt_op(graph))


def measured(graph: Graph, device: torch.device | None = None) -> Costs:
    """The costs on this machine beside ops of such sizes, from a chain of tiny ops and a tiny convolution.

    It takes 0.1 to 0.5 s, once a process for each magnitude of sizes. device: where it is measured; None: on the current device
    of the graph's type.
    """
    return times.current.of_our_work(lambda: _once(indexed(device or torch.device(graph.device)), _touched(graph)))


def _touched(graph: Graph) -> int:
    """Bytes that an op of the forward reads and writes in the mean, a power of four; 0 if few, or not in the host's memory."""
    if not kind_of(graph.device).is_host or not graph.forward:
        return 0
    nbytes = sum(graph.tensors[t].nbytes for op in graph.forward for t in {*op.inputs, *op.outputs}) / len(graph.forward)
    if nbytes < _FEWEST_TOUCHED:
        return 0
    return min(4 ** round(math.log(nbytes, 4)), _MOST_TOUCHED)


def _once(device: torch.device, nbytes: int) -> Costs:
    with _measuring:  # else two sessions would measure each other's work
        key = str(device), loaded() is not None, nbytes
        if key not in _known:
            _known[key] = in_own_thread(lambda: _measured(device, nbytes), device)
        return _known[key]


_known: dict[tuple[str, bool, int], Costs] = {}
"""(device, whether the native engine is in use, bytes touched behind each op) -> the costs."""
_measuring = threading.Lock()


def of_early_update(optimizer: optim.Optimizer, device: torch.device) -> float:
    """Seconds that an update of one parameter in backward takes longer than its share of an update of all; from a throw-away
    optimizer of this class with tiny parameters.
    """
    return times.current.of_early_update(lambda: in_own_thread(lambda: _of_early_update(optimizer, device), device))


def _of_early_update(optimizer: optim.Optimizer, device: torch.device) -> float:
    parameters = [nn.Parameter(torch.ones(4, 4, device=device)) for _ in range(_LINKS)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    whole = {**optimizer.param_groups[0], "params": parameters}
    double = double_of(optimizer, whole)
    raw = step_without_hooks(type(optimizer)) or type(optimizer).step  # hooks for all optimizers are the user's

    def step(*groups: dict[str, Any]) -> None:
        for group in groups:
            double.param_groups = [group]
            raw(double)

    alone = [{**whole, "params": [p]} for p in parameters]
    took = _medians({"together": partial(step, whole), "one by one": partial(step, *alone)}, device)
    return max(0.0, took["one by one"] - took["together"]) / _LINKS


def in_own_thread(measure: Callable[[], T], device: torch.device) -> T:
    """The result of `measure` in a new thread, where `device` is the current one: modes, hooks, autocast and grad mode belong
    to a thread, and a step may be running in this one.
    """

    def on_device() -> T:
        with current(device):
            return measure()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_device).result()


def _measured(device: torch.device, nbytes: int = 0) -> Costs:
    """`nbytes`: bytes that are touched after each op."""
    with torch.enable_grad():
        chain, short = _Chain(_LINKS, device, nbytes), _Chain(1, device, nbytes)
        graph = chain.graph()
        lives, lives_of_few = _checkpointed(graph), _checkpointed(graph, _LINKS // 2)
        passing, rebuilding, in_few = (chain.planned(graph, of_plan) for of_plan in ((), lives, lives_of_few))
        took = _medians(
            {
                "forward": chain.forward,
                "short": short.forward,
                "passing": passing,
                "short, passing": short.planned(short.graph(), ()),
                "rebuilding": rebuilding,
                "step": lambda: chain.forward().sum().backward(),
                "rebuilding, step": lambda: rebuilding().sum().backward(),
                "few segments": in_few,
                "few segments, step": lambda: in_few().sum().backward(),
                "alone": torch.no_grad()(chain.forward),
                "touching": chain.touch_for_each_op,
            },
            device,
        )
        argument = _of_an_argument(device) if loaded() is None else 0.0
    passes, short_passes = took["passing"] - took["forward"], took["short, passing"] - took["short"]
    an_op = max(0.0, (passes - short_passes) / (chain.ops - short.ops))
    alone = (took["alone"] - took["touching"]) / chain.ops

    def in_backward(name: str, lives: tuple[Life, ...]) -> tuple[float, int, int]:
        """(seconds of a plan beside its ops, how many run again, in how many segments)"""
        schedule = Program(graph, lives).schedule
        runs = len(schedule.runs)
        seconds = took[f"{name}, step"] - took[name] - (took["step"] - took["forward"]) - runs * alone
        return max(0.0, seconds), runs, len(schedule.segments)

    many, runs, segments = in_backward("rebuilding", lives)
    few, runs_in_few, few_segments = in_backward("few segments", lives_of_few)
    segment = (many * runs_in_few - few * runs) / (segments * runs_in_few - few_segments * runs)
    segment = min(max(0.0, segment), many / segments)
    return Costs(
        call=max(0.0, an_op - argument * sum(_arguments(op.name) for op in graph.forward) / chain.ops),
        argument=argument,
        recorded=max(0.0, (took["rebuilding"] - took["passing"]) / chain.ops),
        rebuilt=(many - segment * segments) / runs,
        eager=took["forward"] / chain.ops if not on_host(device) else 0.0,
        forward=max(0.0, short_passes - an_op * short.ops),
        segment=segment,
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
