"""One step of a model under plans that send tensors away: plain, observed, planned."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_memopt.graph import Graph, resident_nbytes
from lightning_memopt.plan import Life, lower, validate
from lightning_memopt.plan.forms import codec_of
from lightning_memopt.runtime import Program
from lightning_memopt.runtime.codecs import codec
from lightning_memopt.runtime.parked import Depot
from lightning_memopt.runtime.tiers import DiskTier
from lightning_memopt.runtime.tiers.worker import Copy
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.solvers.offload.trips import Form, TripPlanner, send_away
from lightning_memopt.solvers.rollout import Rollout, keep_all, unrepeatable
from lightning_memopt.trace import metered_cpu
from tests.cpu.lib.harness import draws, same_bits
from tests.cpu.lib.observed_graph import CPU, graph_of
from tests.cpu.lib.planned_engine import engine_of


class Free:
    """A link that takes no time: trips are as large as gaps."""

    def out_seconds(self, tier: str, nbytes: int) -> float:
        return 0.0

    in_seconds = encode_seconds = decode_seconds = out_seconds


class Masked(nn.Module):
    """Layers whose masks are saved as bools."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.x, self.dropout = torch.randn(32, 64), dropout

    def forward(self) -> Tensor:
        h = self.x
        for layer in self.layers:
            h = torch.tanh(layer(h))
            h = torch.where(h > 0.1, h.sin(), h * 2)
        return nn.functional.dropout(h, self.dropout).square().mean()


class Stepped:
    """A model, one batch, and its step: plain, observed, or under a program."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], room: int = 1 << 24, device: torch.device = CPU) -> None:
        self.model, self.loss, self.device = model, loss, device
        self.depot = Depot({"disk": DiskTier(room, device=device)})
        self.buffers = {n: b.clone() for n, b in model.named_buffers()}
        self.graph = self.observed()
        self.resident = resident_nbytes(self.graph)

    def _begin(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for n, b in self.model.named_buffers():
                b.copy_(self.buffers[n])
        torch.manual_seed(3)

    def observed(self) -> Graph:
        for _ in range(2):
            self._begin()
            graph = graph_of(self.model, (), self.loss, self.device, verify=False, meter=self.device == CPU)
        return graph

    def forward(self, program: Program | None, verify: bool = True, sized: bool = True) -> Tensor:
        self._begin()
        if program is None:
            return self.loss()
        engine = engine_of(program, sized, verify=verify, depot=self.depot)
        self.engine = weakref.ref(engine)  # it is freed with the handles
        self.deviation, self.rebuilt = engine.cursor.deviation, engine.rebuilt_ops
        with PlannedRecording(engine, self.model):
            return self.loss()

    def outcome(self, loss: Tensor) -> list[Tensor]:
        grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        return [loss.detach(), *grads, *(b.clone() for b in self.model.buffers()), draws()]

    def step(self, program: Program | None = None, sized: bool = True) -> list[Tensor]:
        loss = self.forward(program, sized=sized)
        loss.backward()
        return self.outcome(loss)

    def agrees(self, program: Program, times: int = 2) -> None:
        """Steps under the program are the plain one, to the bit, and leave nothing in the tier."""
        expected = self.step()
        for _ in range(times):
            assert same(expected, self.step(program))
            assert self.used_nbytes() == 0

    def peak_nbytes(self, program: Program) -> int:
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        with metered_cpu() as events:
            loss = self.forward(program, verify=False)
            loss.backward()
            del loss
        return events.peak_nbytes + self.resident

    def away(
        self,
        base: tuple[Life, ...] | None = None,
        form: str = "disk",
        least: int = 1024,
        only: Callable[[int], bool] = lambda t: True,
    ) -> Program:
        """The lives of a plan (of the unmodified step) with everything away for as long as it can be."""
        lives = keep_all(self.graph) if base is None else base
        planner = TripPlanner(self.graph, lives, Free())
        found = (t for t in planner.gaps if self.graph.tensors[t].nbytes >= least and only(t))
        forms: dict[int, Form] = {t: (form, self.parked_nbytes(t, form)) for t in found if self.accepts(t, form)}
        assert forms, "nothing goes away: the test tests nothing"
        sent = send_away(lives, planner.plan(forms))
        report = validate(self.graph, sent, lower(self.graph, sent))
        assert report.ok, report.problems[:3]
        return Program(self.graph, sent)

    def accepts(self, tensor: int, form: str) -> bool:
        t = self.graph.tensors[tensor]
        return not codec_of(form) or codec(codec_of(form)).accepts(t.size, getattr(torch, t.dtype or "int64"))

    def parked_nbytes(self, tensor: int, form: str) -> int:
        t = self.graph.tensors[tensor]
        return codec(codec_of(form)).encoded_nbytes(t.size, getattr(torch, t.dtype)) if codec_of(form) else t.nbytes

    def made_by(self, name: str) -> Callable[[int], bool]:
        """Whether an op of this name made a tensor."""
        return lambda t: t in self.graph.producers and self.graph.producers[t].name.startswith(f"aten::{name}")

    def used_nbytes(self) -> int:
        """Bytes in the tier, once the copies that were under way when they were let go have ended."""
        tier = self.depot.tiers["disk"]
        for worker in (tier._writer, tier._reader):  # type: ignore[attr-defined]
            last = Copy(lambda: None)
            worker.submit(last)
            last.wait()
        return tier.used_nbytes  # type: ignore[attr-defined]


@contextlib.contextmanager
def stepped(model: nn.Module) -> Iterator[Stepped]:
    """A model that is called without a batch and returns its loss."""
    one = Stepped(model, model)
    try:
        yield one
    finally:
        one.depot.close()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def held(graph: Graph, every: int) -> tuple[Life, ...]:
    """A plan that rebuilds most tensors, and holds every n-th of those that it may hold."""
    requests = sorted((p, s.tensor) for s in graph.saves for p in s.unpacked_at)
    made = [t for _, t in requests if t in graph.producers and t not in graph.overwritten]
    roll = Rollout(graph)
    roll.serve(requests, {*made[::every], *unrepeatable(graph)})
    return roll.lives()
