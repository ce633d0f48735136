"""One model, one batch, and what can be measured of its step: outcome, peak, FLOPs, bytes made, time."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt.bench.methods import checkpointed
from lightning_memopt.graph import Graph
from lightning_memopt.native import counter
from lightning_memopt.runtime import Learned, PlannedEngine, Program, install_native
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.session.observe.graphs import smoothed
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.trace import metered_cpu
from lightning_memopt.trace.living import count_all, count_living

MIB = 2**20
Forward = Callable[[], torch.Tensor]
Outcome = tuple[list[torch.Tensor | None], torch.Tensor]


class _Bytes(TorchDispatchMode):
    """Bytes of all new storages that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inside = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in inside:
                self.nbytes += t.untyped_storage().nbytes()
        return out


class Bench:
    """One model, one batch, and what is run on it, by the engine of a run: the native one where it can be built. `forward` is a
    way to run the forward pass; None is the plain one. `sizes`: of the model, where they are to be others than those of the
    benchmarks.
    """

    device = torch.device("cpu")

    def __init__(self, name: str, **sizes: int) -> None:
        install_native(print)
        torch.manual_seed(0)
        self.name = name
        from benchmarks.models.registry import MODELS  # needs transformers, which benchmarks with models of their own do not

        self.model, self.batch, self.blocks = MODELS[name](**sizes)
        self.title = (MODELS[name].__doc__ or name).partition(":")[0]
        self.buffers = {n: b.clone() for n, b in self.model.named_buffers()}

    def step(self, forward: Forward | None = None, seed: int = 3) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for n, b in self.model.named_buffers():
                b.copy_(self.buffers[n])
        torch.manual_seed(seed)
        loss = (forward or self.forward)()
        loss.backward()
        return loss.detach()

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(**self.batch).loss
        return loss

    def planned(self, program: Program, depot: Depot | None = None) -> Forward:
        """The forward pass under a plan. `depot`: where it puts what goes away."""

        learned = Learned(program)

        def forward() -> torch.Tensor:
            engine = PlannedEngine(learned, depot=depot)
            with PlannedRecording(engine, self.model):
                return self.forward()

        return forward

    @contextlib.contextmanager
    def per_block(self) -> Iterator[None]:
        """Every block of the model under torch's own checkpointing."""
        with checkpointed(self.blocks(self.model)):
            yield

    def observe(self, steps: int = 3) -> Graph:
        """The graph of the step, with times made robust over `steps` observed ones."""
        graphs = []
        for i in range(steps):
            self.model.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            observation = Observation(self.model, [], self.device, None, verify=i == 0, meter=i == steps - 1)
            with observation.begin_round(self.batch):
                loss = self.forward()
            observation.forward_ended()
            loss.backward()
            del loss
            graph = observation.finish()
            assert graph is not None
            graphs.append(graph)
        if observation.opaque_ops:
            print("  opaque:", observation.opaque_ops)
        return smoothed(graphs)

    # -- what is measured of a step --------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """Gradients and buffers as the last step left them, and the generator's state."""
        values = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return values + [b.clone() for b in self.model.buffers()], torch.get_rng_state()

    def peak(self, forward: Forward | None = None, seed: int = 3) -> float:
        """MiB above what is resident, by the allocator."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        with metered_cpu() as events:
            self.step(forward, seed)
        return float(events.peak_nbytes / MIB)

    def flops(self) -> int:
        with FlopCounterMode(display=False) as counted:
            self.step()
        return counted.get_total_flops()

    def made_nbytes(self) -> int:
        with _Bytes() as made:
            self.step()
        return made.nbytes

    def times(
        self, forwards: dict[str, Forward | None], rounds: int, contexts: dict[str, Callable[[], Any]]
    ) -> dict[str, dict[str, float]]:
        """Medians over rounds of the ratios to the unmodified step of the same round: wall clock, and CPU time of the process.

        On a machine with neighbours the second is the steadier one.
        """
        ratios: dict[str, list[tuple[float, float]]] = {label: [] for label in forwards}
        for _ in range(rounds):
            took = {}
            for label, forward in forwards.items():
                with contexts.get(label, contextlib.nullcontext)():
                    wall, cpu = time.perf_counter(), time.process_time()
                    self.step(forward)
                    took[label] = time.perf_counter() - wall, time.process_time() - cpu
            for label, (wall, cpu) in took.items():
                ratios[label].append((wall / took["unmodified"][0], cpu / took["unmodified"][1]))
        return {
            label: {"time_ratio": statistics.median(w for w, _ in values), "cpu_ratio": statistics.median(c for _, c in values)}
            for label, values in ratios.items()
            if values
        }


def held_nbytes() -> int:
    """Bytes that this process holds before a run, of what its peaks count; none where no counter is, for then they do not."""
    count_all(print)
    count = counter()
    if count is None:
        return 0
    count_living(count)
    return count.live_nbytes


def equal(a: Outcome, b: Outcome) -> bool:
    """Whether two steps ended with the same gradients, buffers and generator state, bit by bit."""
    pairs = zip(a[0], b[0], strict=True)
    same = all(torch.equal(x, y) if x is not None and y is not None else x is y for x, y in pairs)
    return same and torch.equal(a[1], b[1])
