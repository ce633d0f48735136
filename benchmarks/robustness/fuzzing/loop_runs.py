"""Train a loop of the fuzzer plainly and within its budget, each in a process of its own, and say what is wrong with it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.lib.digests import digest
from benchmarks.robustness.fuzzing.case import Node
from benchmarks.robustness.fuzzing.loop import Loop
from benchmarks.robustness.fuzzing.ops import OPS, WIDTH, Parts
from benchmarks.robustness.fuzzing.programs import evaluating
from benchmarks.robustness.fuzzing.runs import Finding, optimizer_of
from benchmarks.robustness.loops_judge import Outcome, sizes, within
from benchmarks.robustness.loops_run import MOVING, forked
from benchmarks.robustness.scripts import Log, Script, Watch
from lightning_memopt.runtime import state_copies
from lightning_memopt.runtime.tiers.room import taken_nbytes
from lightning_memopt.session import parked_states as session_parked
from lightning_memopt.session import parked_weights

_LEAST_NBYTES = 512
"""Layers are so small that their optimizer state would not be parked otherwise."""
CLASSES = 2048
"""Classes of a loss head."""
LOSSES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    F.cross_entropy,
    lambda x, y: F.cross_entropy(x.float(), y),
    lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    lambda x, y: F.cross_entropy(x, y, reduction="none").square().mean(),
    lambda x, y: F.cross_entropy(x, y) + 1e-4 * x.logsumexp(-1).square().mean(),
    lambda x, y: F.cross_entropy(x, y) + (x.detach().argmax(-1) == y).float().mean(),
    lambda x, y: -x.log_softmax(-1).gather(-1, y[:, None]).mean(),
    lambda x, y: F.cross_entropy(torch.tanh(x / 5) * 5, y) + x.mean(),
)
"""What a loop may make of the scores of a head, and the classes."""
NAMED_NBYTES = 1 << 12
"""A refusal names no number that is by more above the plain peak: what the planner leaves free in every budget."""


class Part(nn.Module):
    """A program of nodes on layers of its own: (rows, WIDTH) to (rows, WIDTH)."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        super().__init__()
        self.nodes = nodes
        self.parts = Parts(shared=False)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.parts.linear[0](x)]
        for node in self.nodes:
            a, b = (values[-1 - i % len(values)] for i in (node.a, node.b))
            values.append(OPS[node.op](self.parts, a, b, node.k))
        return sum(value.float() for value in values[-3:])  # type: ignore[return-value]


class Network(nn.Module):
    """The model of a loop: (rows, WIDTH) to (rows, WIDTH); with a head, to (rows, CLASSES)."""

    def __init__(self, nodes: tuple[Node, ...], head: bool = False) -> None:
        super().__init__()
        half = len(nodes) // 2
        self.encoder, self.decoder = Part(nodes[:half]), Part(nodes[half:])
        if head:
            self.decoder = nn.Sequential(self.decoder, nn.Linear(WIDTH, CLASSES, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def score(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class _More:
    """Work that takes memory in some steps only; `due` says whether in this one."""

    def __init__(self, rows: int) -> None:
        self.rows, self.due = rows, False

    def __call__(self, *_: Any) -> None:
        if self.due:
            torch.ones(8 * self.rows, WIDTH).sum()


def train(loop: Loop, watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    """The loop as a script of `benchmarks loops`."""
    torch.manual_seed(loop.seed)
    has = loop.features.__contains__
    for module in (state_copies, session_parked, parked_weights) if has("parked") else ():
        module.LEAST_NBYTES = _LEAST_NBYTES
    model = Network(loop.nodes, has("head"))
    loss_of = LOSSES[loop.seed % len(LOSSES)] if has("head") else F.mse_loss
    teacher = copy.deepcopy(model).eval().requires_grad_(False) if has("teacher") else None
    average = copy.deepcopy(model).requires_grad_(False) if has("average") else None
    kept: dict[str, Tensor] = {}
    more = _More(loop.rows)
    if has("forward now and then"):
        model.decoder.register_forward_pre_hook(more)
    if has("backward now and then"):
        model.decoder.register_full_backward_hook(more)
    _freeze(loop, model)
    optimizers = _optimizers(loop, model)
    zero = partial(model.zero_grad, set_to_none=not has("zero in place"))
    held: list[Tensor] = []
    source = torch.Generator().manual_seed(loop.seed)
    outputs: list[tuple[Tensor, Tensor]] = []
    with watch(model, optimizers[0] if len(optimizers) == 1 else optimizers) as run:
        for step in range(steps):
            more.due = (step + 1) % loop.every == 0
            for part in range(2 if has("accumulate") else 1):
                # a batch is the loop's until the next one is there: the package takes it for resident
                batches = [torch.randn(loop.rows, WIDTH, generator=source) for _ in range(3 if has("forwards") else 1)]
                if not has("held"):
                    outputs = []
                before, outputs = outputs, _outputs(loop, model, teacher, batches)
                loss = torch.stack([loss_of(out, target) for out, target in outputs]).sum()
                if has("zero first") and part == 0:
                    zero()
                before.clear()
                is_marked = has("marked") and run is not None and part == has("accumulate")
                with run.last_backward() if is_marked else contextlib.nullcontext():
                    loss.backward()
            held.clear()
            gradients = None if has("marked") else _gradients_read(loop, model)
            if has("gradients written") and more.due:
                _write_gradients(model)
            if has("gradients held"):
                held += [p.grad for p in model.parameters() if p.grad is not None]
            if has("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if has("update now and then"):
                more()
            if not has("hooks"):
                optimizers[0].step()
                if not has("zero first"):
                    zero()
            log(loss, gradients, _state_read(optimizers) if has("state read") and more.due else None)
            if has("restored") and more.due:
                for optimizer in optimizers:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            _after(loop, model, average, kept, more.due)
            if step == steps // 2:
                _change_frozen(loop, model)
            if has("parked") and has("disk budget") and taken_nbytes("disk") > _disk_nbytes(loop):
                raise AssertionError(f"{taken_nbytes('disk')} bytes are on the disk, and {_disk_nbytes(loop)} may be")
    return {"model": model, "average": average, "kept": kept, "optimizers": optimizers}


def _freeze(loop: Loop, model: Network) -> None:
    """Before anything runs. A matrix of each part learns in any case."""
    if "frozen" in loop.features:
        for i, module in enumerate(model.modules()):
            if not list(module.children()) and (loop.seed + i) % 3:
                module.requires_grad_(False)
    if "adapters" in loop.features:
        for p in model.parameters():
            p.requires_grad_(p.dim() < 2)
    for part in model.modules():
        if isinstance(part, Part):
            part.parts.linear[0].weight.requires_grad_(True)


def _change_frozen(loop: Loop, model: Network) -> None:
    """In the middle of the run."""
    if "unfreezes" in loop.features:
        model.requires_grad_(True)
    if "freezes" in loop.features:
        model.encoder.requires_grad_(False)
        for p in model.encoder.parameters():
            p.grad = None


def _gradients_read(loop: Loop, model: Network) -> Any:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if "parked" in loop.features and "gradients viewed" not in loop.features:  # what NumPy has seen is parked no more
        return {name: digest(grad.clone()) for name, grad in grads.items()}
    return digest(grads)


def _write_gradients(model: Network) -> None:
    for i, p in enumerate(model.parameters()):
        if p.grad is not None:
            (p.grad.data if i % 2 else p.grad).mul_(0.5)


def _disk_nbytes(loop: Loop) -> int:
    """The budget of the disk."""
    return (1 << 15) << loop.seed % 4


def _optimizers(loop: Loop, model: Network) -> list[torch.optim.Optimizer]:
    if "hooks" not in loop.features:
        return [optimizer_of(loop.optimizer, model.parameters())]
    of = {p: optimizer_of(loop.optimizer, [p]) for p in model.parameters()}

    def steps(p: Tensor) -> None:
        of[p].step()
        of[p].zero_grad()

    for p in of:
        p.register_post_accumulate_grad_hook(steps)
    return list(of.values())


def _state_read(optimizers: list[torch.optim.Optimizer]) -> Any:
    return digest([state for optimizer in optimizers for state in optimizer.state.values()])


def _outputs(loop: Loop, model: Network, teacher: Network | None, batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What the model makes of each batch, and what it is to make."""
    outputs = []
    for x in batches:
        target = torch.zeros_like(x)
        if teacher is not None:
            with torch.no_grad():
                target = teacher(x)
        if "head" in loop.features:
            target = target[:, 0].abs().long() % CLASSES
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in loop.features):
            out = _entered(loop, model, x)
        outputs.append((out, target))
    return outputs


def _entered(loop: Loop, model: Network, x: Tensor) -> Tensor:
    if "method" in loop.features:
        return model.score(x)
    if "parts" in loop.features:
        return model.decoder(model.encoder(x))  # type: ignore[no-any-return]
    return model(x)  # type: ignore[no-any-return]


def _after(loop: Loop, model: Network, average: Network | None, kept: dict[str, Tensor], due: bool) -> None:
    """What the loop does after an update."""
    with torch.no_grad():
        if average is not None:
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        if "copy" in loop.features:
            kept.update({name: p.clone() for name, p in model.named_parameters()})
        if "evaluate" in loop.features and due:
            with evaluating(model):
                model(torch.ones(loop.rows, WIDTH))


def judge_loop(loop: Loop) -> Finding | None:
    """What is wrong with the loop within its budget; None where all is as it should be, or where nothing counts its bytes."""
    plain = _run(loop, None)
    if plain["status"] != "trained":
        return Finding("the fuzzer's own", plain["traceback"][-600:])
    counted = sizes(plain)
    if counted is None:
        return None
    peak, resident = counted
    budget = resident + int(loop.share * (peak - resident if loop.share > 0 else _state_nbytes(loop)))
    row = within(partial(_run, loop), plain, budget if loop.share else "min")
    faults = row["faults"]
    if "forwards" in loop.features:
        # Near a budget, the step of the last of several forwards counts what only recorders of the others hold, and a refusal
        # names more than the plain step takes, or too little. To know better takes one plan for all of them.
        faults = [fault for fault in faults if not fault.endswith("times")]
        row["budgets"] = row["budgets"][-1:]
    if "disk budget" in loop.features:  # the line of the plan in force says what the disk has room for
        faults = [fault for fault in faults if not fault.endswith("not parked, silent")]
    if faults:
        told = {name: row[name] for name in _TOLD if name in row}
        return Finding(faults[0], f"plain peak {peak}, resident {resident}: {told}")
    return _named(loop, peak, row["budgets"][1:])


def _state_nbytes(loop: Loop) -> int:
    """Bytes of the optimizer state of this loop."""
    model = Network(loop.nodes, "head" in loop.features)
    model(torch.ones(loop.rows, WIDTH)).sum().backward()
    copies = {"sgd": 0, "momentum": 1}.get(loop.optimizer, 2)
    return copies * sum(p.nbytes for p in model.parameters() if p.grad is not None)


_TOLD = ("budgets", "error", "traceback", "different", "over", "steps_over", "peaks", "said")


def _run(loop: Loop, budget: int | str | None) -> Outcome:
    options: dict[str, Any] = {"profile_steps": loop.observed}
    if "head" in loop.features:
        options["tile"] = "exact"
    if "parked" in loop.features:
        options |= MOVING
        options |= {"disk_budget": _disk_nbytes(loop)} if "disk budget" in loop.features else {}
    return forked(Script("fuzzed", "", partial(train, loop), steps=loop.steps, options=options), budget)


def _named(loop: Loop, peak: int, named: list[int]) -> Finding | None:
    """A refusal comes before it is known what the loop holds of a step until the next one. So the number that it names is at
    most the plain peak of this loop, or else of the loop that holds what can be held: outputs and gradients. Outputs of an
    earlier backward of the same step count beside those: they may be another thing.
    """
    if all(number <= peak + NAMED_NBYTES for number in named):
        return None
    holds = dataclasses.replace(loop, features=tuple({*loop.features, "held", "zero first"}))
    counted = sizes(_run(holds, None))
    assert counted is not None
    outputs_nbytes = 4 * loop.rows * WIDTH if "accumulate" in loop.features else 0
    most = max(peak, counted[0]) + outputs_nbytes + NAMED_NBYTES
    return next((Finding("named", f"{n} is named where the plain peak is at most {most}") for n in named if n > most), None)
