"""The training step that is measured: its results, its peak, its FLOPs and its time.

Input: a function that returns (model, optimizer, step), as for `memopt plan`. Where bits or peaks are compared, each step
begins from the same state and seed: before it, parameters, buffers and optimizer state are restored in place.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt.clocks import perf_counter, process_time
from lightning_memopt.device.backends import backend_of
from lightning_memopt.errors import ConfigError
from lightning_memopt.integrations.plain import Optimizers, unwrapped
from lightning_memopt.native import counter
from lightning_memopt.session.observe.resident import foreign_nbytes, resident_tensors
from lightning_memopt.session.regions.compiling import repeated_blocks
from lightning_memopt.trace import metered_cpu
from lightning_memopt.trace.living import count_all

SEED = 3
Pair = tuple[torch.Tensor | None, torch.Tensor | None]
Blocks = Callable[[nn.Module], list[nn.Module]]


@dataclass(frozen=True)
class Training:
    """What is measured.

    Args:
        model: the model whose calls are forwards.
        optimizer: its optimizer, or several.
        step: runs one whole training step. If it returns a tensor, that is the loss.
        blocks: model -> the modules that checkpointing of blocks wraps; None: `repeated_blocks`.
    """

    model: nn.Module
    optimizer: Optimizers
    step: Callable[[], Any]
    blocks: Blocks | None = None

    @classmethod
    def of(cls, built: Any, spec: str) -> Training:
        """What a user's function returned. Raises ConfigError if it is not (model, optimizer, step)."""
        if isinstance(built, Training):
            return built
        if isinstance(built, tuple) and len(built) == 3:
            model, optimizer, step = built
            several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
            optimizes = bool(several) and all(isinstance(o, torch.optim.Optimizer) for o in several)
            if isinstance(model, nn.Module) and optimizes and callable(step):
                return cls(model, optimizer, step)
        kind = type(built).__name__
        if isinstance(built, tuple):
            kind = f"({', '.join(type(part).__name__ for part in built)})"
        raise ConfigError(
            f"{spec} returned {kind}; make it return (model, optimizer, step): a module, its optimizer or a list of them, and "
            "a function that runs one whole training step."
        )


class Outcome(NamedTuple):
    """The results of a step: the loss (None if `step` returns none), gradients before the update, and buffers."""

    loss: torch.Tensor | None
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]

    def differs(self, other: Outcome) -> str:
        """The parts of this outcome whose bits differ from the other one's, with the largest difference; "" if none do."""
        parts: dict[str, list[Pair]] = {
            "loss": [(self.loss, other.loss)],
            "gradients": list(zip(self.gradients, other.gradients, strict=True)),
            "buffers": list(zip(self.buffers, other.buffers, strict=True)),
        }
        most = {name: max(starmap(_distance, pairs)) for name, pairs in parts.items() if not all(starmap(_same, pairs))}
        return ", ".join(f"{name} by {distance:.1g}" for name, distance in most.items())


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest difference, as a share of the largest value of `b`; infinite if they cannot be compared."""
    if a is None or b is None or a.shape != b.shape:
        return 0.0 if a is b else float("inf")
    if not b.numel():
        return 0.0
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


class Seconds(NamedTuple):
    """The time of one step. `cpu`: CPU time of all threads of this process."""

    wall: float
    cpu: float


class Subject:
    """A training that was built, and the measurements of its step.

    Args:
        build: returns a `Training`.
        device: "cpu" or "cuda": the device whose memory is measured.
    """

    def __init__(self, build: Callable[[], Training], device: torch.device) -> None:
        count_all(lambda _: None)
        self.device, self._backend = device, backend_of(device)
        self._seed()
        self.training = build()
        self.model = self.training.model
        self.optimizers = unwrapped(self.training.optimizer)
        self.loss: torch.Tensor | None = None
        for _ in range(2):  # the optimizer makes its state
            self.step()
        self._state = [(t, t.detach().cpu().clone()) for t in self._tensors()]

    def blocks(self) -> list[nn.Module]:
        """The modules that checkpointing of blocks wraps; empty if none are known."""
        return (self.training.blocks or repeated_blocks)(self.model)

    def step(self) -> None:
        """Run one whole step from the current state."""
        loss = self.training.step()
        self.loss = loss.detach() if isinstance(loss, torch.Tensor) else None

    def restore(self) -> None:
        """Restore, in place, the state after the first two steps, and the seeds."""
        with torch.no_grad():
            for t, value in self._state:
                t.copy_(value)
        self._seed()

    def _seed(self) -> None:
        torch.manual_seed(SEED)
        random.seed(SEED)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    # -- what is measured ------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """The results of a step from the same state. Gradients are those that the first update sees."""
        gradients: list[torch.Tensor | None] = []

        def before_update(*_: Any) -> None:
            if not gradients:
                gradients.extend(None if p.grad is None else p.grad.detach().cpu().clone() for p in self.model.parameters())

        self.restore()
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.callback(optimizer.register_step_pre_hook(before_update).remove)
            self.step()
        loss = None if self.loss is None else self.loss.cpu().clone()
        return Outcome(loss, gradients, [b.detach().cpu().clone() for b in self.model.buffers()])

    def held_nbytes(self) -> int:
        """Bytes in memory between steps, as a budget counts them."""
        if self._backend.keeps_statistics:
            return self._backend.allocated().now
        count = counter()
        foreign = foreign_nbytes(resident_tensors(self.model, self.optimizers, ()), count)
        return (count.live_nbytes if count is not None else 0) + foreign

    def peak_nbytes(self) -> int:
        """Maximum bytes of a step above those in memory before it, by the allocator."""
        self.restore()
        self.loss = None
        gc.collect()
        if self._backend.keeps_statistics:
            self._backend.synchronize()
            self._backend.reset_peaks()
            before = self._backend.allocated().now
            self.step()
            self._backend.synchronize()
            return self._backend.allocated().peak - before
        with metered_cpu() as events:
            self.step()
        if not events.available:
            raise RuntimeError("another profiler is running, so the peak was not measured")
        return events.peak_nbytes

    def flops(self) -> int:
        """FLOPs of those ops of a step that torch's counter knows (matrix products, convolutions, attention)."""
        with FlopCounterMode(display=False) as counted:
            self.step()
        return int(counted.get_total_flops())

    def seconds(self) -> Seconds:
        """Time of a step; on a GPU, until the device has finished."""
        self._synchronize()
        wall, cpu = perf_counter(), process_time()
        self.step()
        self._synchronize()
        return Seconds(perf_counter() - wall, process_time() - cpu)

    def _synchronize(self) -> None:
        self._backend.synchronize()
