"""Models of tiny ops, and contexts to run them in: what is measured on them is overhead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.native import engine as native_engine
from lightning_memopt.plan import Rebuild
from lightning_memopt.record import keep_seams
from lightning_memopt.runtime import Learned, PlannedEngine, Program, install_native
from lightning_memopt.session.forward.recording import PlannedRecording
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.solvers import planner

LINKS = 50


class Chain(nn.Module):
    """tanh(x * w + x), then sin: four ops a link."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(LINKS):
            x = torch.tanh(x * self.w + x).sin()
        return x


class TinyGPT2(nn.Module):
    """GPT-2 of two layers of width 16, with dropout: its loss on eight words."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 16, "n_positions": 8}
        config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
        self.inner: Any = transformers.GPT2LMHeadModel(config).train()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=words, labels=words).loss
        return loss


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "chain": lambda: (Chain(), torch.randn(4, 4)),
    "tiny GPT-2": lambda: (TinyGPT2(), torch.randint(0, 16, (1, 8))),
}
"""Name -> (model, its input)."""


class Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def empty_and_hooks() -> Iterator[None]:
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t), Empty():
        yield


class TinyOps:
    """A model, and contexts for its forward.

    ops: how many ops it has.
    contexts: name -> context manager, for one forward.
    again: name -> how many ops run again in its backward.
    """

    def __init__(self, name: str = "chain") -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        install_native(print)
        keep_seams(self)  # as an open run does
        self.model, self.x = MODELS[name]()
        self.contexts: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
            "eager": contextlib.nullcontext,
            "empty mode": Empty,
            "empty mode + detaching hooks": empty_and_hooks,
        }
        self.again: dict[str, int] = {}
        graph = self._observed()
        self.ops = len(graph.forward)
        candidates = planner.solve(graph).candidates
        for who in ("Python", "native"):
            for what, candidate in (("nothing", candidates[-1]), ("all", candidates[0])):
                program = Program(graph, candidate.lives)
                name = f"{who} engine, {what} dropped"
                self.again[name] = sum(isinstance(s, Rebuild) for steps in program.schedule.segments.values() for s in steps)
                with contextlib.nullcontext() if who == "native" else native_engine.without():
                    learned = Learned(program)
                self.contexts[name] = self._planned(learned, who == "native")

    def forward(self, name: str) -> torch.Tensor:
        with self.contexts[name]():
            return self.model(self.x)

    def _observed(self) -> Any:
        observation = Observation(self.model, [], torch.device("cpu"), None, verify=True, meter=False)
        with observation.begin_round((self.x,)):
            y = self.model(self.x)
        observation.forward_ended()
        y.sum().backward()
        graph = observation.finish()
        assert graph is not None
        return graph

    def _planned(self, learned: Learned, native: bool) -> Callable[[], contextlib.AbstractContextManager]:
        @contextlib.contextmanager
        def context() -> Iterator[Any]:
            with contextlib.ExitStack() as stack:
                if not native:
                    stack.enter_context(native_engine.without())
                yield stack.enter_context(PlannedRecording(PlannedEngine(learned), self.model))

        return context

    def packing(self, context: str, calls: int = 1000) -> float:
        """Seconds of `calls` times to pack a tensor and to unpack it, by the hooks of this context."""
        t = torch.ones(4, 4, requires_grad=True)
        with self.contexts[context]() as recording:
            pack, unpack = recording._hooks.pack, recording._hooks._unpack
            began = time.thread_time()
            for _ in range(calls):
                unpack(pack(t))
            return time.thread_time() - began
