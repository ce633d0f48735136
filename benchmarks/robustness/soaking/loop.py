"""The loop of a soak: plain PyTorch. With a run, its steps are planned; what it does is the same."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.digests import hashed
from benchmarks.robustness.soaking.draws import SHAPES, Fault, Step
from benchmarks.robustness.soaking.subject import Broken, Subject
from lightning_memopt.integrations.plain import Run
from lightning_memopt.record.interrupts import raise_deferred

PARTS = ("losses", "gradients", "parameters", "buffers", "optimizer", "generator")
"""What is compared after each step, a digest for each."""
RATE = 0.003


class Loop:
    """Steps of one model.

    early: parameters may be updated in backward: then nobody reads gradients.
    head: there is a loss head, whose logits are read now and then.
    run: the run that plans the steps; None for the plain loop.
    heard: called after each forward of training.
    digests: of the step that is over, in the order of PARTS.
    outcome: how it ended: "done", or the place of its fault.
    """

    def __init__(self, seed: int, early: bool, folder: Path, head: bool = False) -> None:
        self.seed, self.early, self.path = seed, early, folder / "checkpoint.pt"
        self.head = head
        self.run: Run | None = None
        self.heard: Callable[[], None] = lambda: None
        self.modes_left = 0
        self.landed = 0
        self._armed = False
        self._losses: list[Tensor] = []
        self._gradients = ""
        torch.manual_seed(seed)
        self._make()
        self._copy = copy.deepcopy(self._state())
        self._save(None)

    def _make(self) -> None:
        self.model = Subject(self.head)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.optimizer.register_step_post_hook(lambda *_: self.model.trap.at("updated"))

    def renewed(self) -> None:
        """New objects go on from the checkpoint."""
        self._make()
        self._load(torch.load(self.path))
        self._copy = copy.deepcopy(self._state())

    def step(self, number: int, step: Step) -> None:
        """One step, whatever happens in it. Then `digests` and `outcome` say what it left."""
        trap, fault = self.model.trap, step.fault
        self.outcome, self._losses, self._gradients = "done", [], ""
        if step.resumes:
            self._load(torch.load(self.path) if step.resumes == "file" else self._copy)
        trap.set(fault, step.reads)
        if fault is not None and fault.place == "timer":
            self._timed(number, step, fault)
        else:
            try:
                self._trains(number, step)
            except (Broken, KeyboardInterrupt) as error:
                assert trap.sprung and isinstance(error, KeyboardInterrupt) == fault.interrupts, repr(error)  # type: ignore[union-attr]
                self.outcome = fault.place  # type: ignore[union-attr]
        trap.set(None)
        if self.outcome != "done":
            self.model.train()
            if fault is not None and fault.restores:
                self._load(torch.load(self.path))
            self.optimizer.zero_grad()  # after early updates, and without the step that they belong to, only then
        self._digest()

    def _trains(self, number: int, step: Step) -> None:
        self._update(number, step)
        if step.validates == "after":
            self._validate(number)
        if step.saves:
            self._save(step.fault)
            self._copy = copy.deepcopy(self._state())

    def _update(self, number: int, step: Step) -> None:
        model, trap, last = self.model, self.model.trap, len(step.shapes) - 1
        for micro, (shape, autocast) in enumerate(zip(step.shapes, step.autocast, strict=True)):
            trap.micro = micro
            words = self._batch(number, micro, shape)
            if autocast:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(words)
            else:
                loss = model(words)
            self.heard()
            with self.run.last_backward() if self.run is not None and micro == last else contextlib.nullcontext():
                loss.backward()
            self._losses.append(loss.detach())
            if step.validates == "within" and micro < last:
                self._validate(number)
        if not self.early:
            self._gradients = hashed(p.grad for p in model.parameters() if p.grad is not None)
            trap.at("before update")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._losses += (read.clone() for read in trap.read)

    def _timed(self, number: int, step: Step, fault: Fault) -> None:
        """A signal comes at a moment that differs from run to run. Whatever it left, the loop then restores the checkpoint."""

        def comes(*_: Any) -> None:
            if self._armed:
                self._armed = False
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, comes)
        try:
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, fault.delay)
                self._update(number, step)
                raise_deferred()  # it came in a destructor
            finally:
                self.landed += not self._armed
                self._armed = False
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        self.outcome, self._losses, self._gradients = "timer", [], ""
        if not torch.is_grad_enabled():  # torch's own functions leave it so, where the signal comes at certain lines of theirs
            self.modes_left += 1
            torch.set_grad_enabled(True)

    def _validate(self, number: int) -> None:
        self.model.eval()
        with torch.no_grad() if number % 2 else torch.inference_mode():
            for shape in range(len(SHAPES)):
                loss = self.model(self._batch(number, 100 + shape, shape))
                self._losses.append(loss.detach().clone())
                self.model.trap.at("validation")
        self.model.train()

    def _batch(self, number: int, micro: int, shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number * 128 + micro)
        return torch.randint(0, self.model.embed.num_embeddings, SHAPES[shape], generator=generator)

    def _state(self) -> dict[str, Any]:
        """All that a checkpoint has: the tensors themselves, but for the generator's."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state | {"generator": torch.get_rng_state()}

    def _save(self, fault: Fault | None) -> None:
        """Write a checkpoint, and replace the previous one with it when it is complete."""
        partial = self.path.with_suffix(".part")
        torch.save(self._state(), partial)
        if fault is not None:
            self.model.trap.at("save")
        os.replace(partial, self.path)

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        torch.set_rng_state(state["generator"])

    def _digest(self) -> None:
        model, states = self.model, self.optimizer.state
        ordered = [states[p] for group in self.optimizer.param_groups for p in group["params"] if p in states]
        self.digests = [
            hashed(self._losses),
            self._gradients,
            hashed(model.parameters()),
            hashed(model.buffers()),
            hashed(t for state in ordered for t in state.values()),
            hashed([torch.get_rng_state()]),
        ]
        self._losses = []


@contextlib.contextmanager
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this block, whatever it did before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
