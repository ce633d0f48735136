"""Run a case plainly and under its plan, and say where the two differ."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.robustness.fuzzing.case import Case, Step
from benchmarks.robustness.fuzzing.plans import random_lives
from benchmarks.robustness.fuzzing.programs import Data, Model, before, between
from benchmarks.robustness.fuzzing.trips import random_trips
from lightning_memopt import optimize
from lightning_memopt.errors import MemOptError
from lightning_memopt.graph import Graph
from lightning_memopt.integrations.plain import Run
from lightning_memopt.plan import simulate
from lightning_memopt.session.at_rest import AtRest
from lightning_memopt.session.solve import solving
from lightning_memopt.solvers.offload.trips import send_away
from lightning_memopt.solvers.planner import UNSEEN_NBYTES, Candidate, Frontier

ROOM_NBYTES = 4096
"""What a step may take above its plan: what the planner leaves free in every budget."""

_HALFWAY = "had been updated in it"
"""Words of the warning that a backward raised after it had updated parameters (docs/hazards.md, F7)."""


@dataclass
class Outcome:
    """What a run left.

    steps: of every step its loss, or the name of the error that ended it.
    end: weights, buffers, state of the optimizer, the average, and the generator.
    refused: the step that this package refused by an error of its own.
    halfway: the step whose backward raised an error after it had updated parameters, which a warning says.
    error: the last error that ended a step.
    planned: whether a plan that rebuilds was in force.
    over_nbytes: by how much a step was measured above its plan.
    """

    steps: list[Tensor | str] = field(default_factory=list)
    end: dict[str, Tensor] = field(default_factory=dict)
    refused: int | None = None
    halfway: int | None = None
    error: BaseException | None = None
    planned: bool = False
    over_nbytes: int = 0


@dataclass(frozen=True)
class Finding:
    """What is wrong with a case: `kind` is "bits", "error", "missing error", "budget"; `text` says where."""

    kind: str
    text: str


def random_frontier(case: Case, graph: Graph) -> Frontier:
    """One random plan of the graph: the smallest there is."""
    rng = random.Random(case.plan)
    lives = random_lives(graph, rng, held=case.held)
    if case.away:
        lives = send_away(lives, random_trips(graph, lives, rng))
    predicted = simulate(graph, lives).predicted
    return Frontier(
        graph=graph,
        candidates=(Candidate(lives, predicted, "random"),),
        smallest_nbytes=predicted.needed_nbytes + UNSEEN_NBYTES,
        unmodified_peak_nbytes=predicted.needed_nbytes,
        moments=(),
        seconds=0.0,
    )


def optimizer_of(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a name in `OPTIMIZERS`."""
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9 * (name == "momentum"))
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adadelta": torch.optim.Adadelta}
    return kinds[name](parameters, lr=0.01)


def _backward(model: Model, loss: Tensor, how: str, run: Run | None) -> None:
    """`run`: where an update follows, for which parameters may be updated in this backward."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if how == "once":
        with run.last_backward() if run is not None else contextlib.nullcontext():
            loss.backward()
    elif how == "retained":
        loss.backward(retain_graph=True)
        loss.backward()
    elif how == "parts":
        loss.backward(inputs=parameters[:2], retain_graph=True)
        loss.backward()
    elif how == "double":
        grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        (loss + sum(g.square().sum() for g in grads if g is not None)).backward()
    elif how == "thread":
        errors: list[BaseException] = []
        thread = threading.Thread(target=_caught, args=(loss, errors))
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
    elif how == "grad":
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad


def _caught(loss: Tensor, errors: list[BaseException]) -> None:
    try:
        loss.backward()
    except BaseException as error:
        errors.append(error)


def _loop(case: Case, model: Model, optimizer: torch.optim.Optimizer, run: Run | None, outcome: Outcome) -> None:
    data = Data(case.seed)
    average = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(case.seed + 1)
    for i, step in enumerate(case.steps):
        x = data.batch(step.rows)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                _step(case, model, optimizer, run, step, x, data, average, outcome)
        except MemOptError as error:
            outcome.refused, outcome.error = i, error
            return
        except Exception as error:
            outcome.steps.append(type(error).__name__)
            outcome.error = error
            optimizer.zero_grad()
            if any(_HALFWAY in str(warning.message) for warning in warned):
                outcome.halfway = i
                return
        finally:
            model.kept.clear()
        if run is not None:
            _notice(run, outcome)
    outcome.end = _state(model, optimizer, average)


def _step(
    case: Case,
    model: Model,
    optimizer: torch.optim.Optimizer,
    run: Run | None,
    step: Step,
    x: Tensor,
    data: Data,
    average: list[Tensor],
    outcome: Outcome,
) -> None:
    updates = "accumulate" not in step.before
    for what in step.before:
        before(model, what, optimizer, average, x)
    model.departures = {departure.node: departure for departure in step.during}
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = model(x)
    finally:
        model.departures = {}
    for what in step.after:
        between(model, what, x, data)
    if step.backward != "none":
        _backward(model, loss, step.backward, run if updates else None)
    outcome.steps.append(loss.detach().clone())
    if step.backward != "none" and updates:
        optimizer.step()
        optimizer.zero_grad()


def _notice(run: Run, outcome: Outcome) -> None:
    """Whether a plan is in force, and what was measured of it."""
    status = run.status()
    if status.plan is not None:
        outcome.planned = outcome.planned or status.plan.predicted.rebuilt_ops > 0
        if status.measured_peak_nbytes is not None:
            outcome.over_nbytes = max(outcome.over_nbytes, status.measured_peak_nbytes - status.plan.predicted.needed_nbytes)


def _state(model: Model, optimizer: torch.optim.Optimizer, average: list[Tensor]) -> dict[str, Tensor]:
    state = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for i, values in enumerate(optimizer.state.values()):
        state |= {f"{name} of parameter {i}": t.clone() for name, t in values.items() if isinstance(t, Tensor)}
    state |= {f"average {i}": t for i, t in enumerate(average)}
    return state | {"generator": torch.get_rng_state()}


def ran(case: Case, planned: bool) -> Outcome:
    """Train the case's model through its steps."""
    outcome = Outcome()
    model = Model(case)
    optimizer = optimizer_of(case.optimizer, model.parameters())
    if not planned:
        _loop(case, model, optimizer, None, outcome)
        return outcome
    options: dict[str, Any] = {"budget": "min", "profile_steps": case.observed, "verbose": False, "on_exceed": "warn"}
    if case.away:
        options["offload"] = "disk"
    if case.early:
        options["optimizer_in_backward"] = "auto"
    with _random_plans(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with optimize(model, optimizer, **options) as run:
            _loop(case, model, optimizer, run, outcome)
    return outcome


@contextlib.contextmanager
def _random_plans(case: Case) -> Iterator[None]:
    """Every solve gives the case's random plan. Nothing rests in a tier between updates: a random plan knows no such step."""
    with (
        mock.patch.object(solving, "frontier_of", lambda graph, *_: random_frontier(case, graph)),
        mock.patch.object(AtRest, "solved", lambda at_rest, solve, limit_nbytes, graph: solve(graph)),
    ):
        yield


def _same(a: Tensor | str, b: Tensor | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a == b
    bits = lambda t: t.contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def may_be_refused(case: Case, index: int) -> bool:
    """Whether a step does what no observed step showed and what a plan cannot foresee: another backward of a forward that left
    the plan, or a first write between forward and backward into what rebuilds start from.
    """
    step = case.steps[index]
    again = step.backward in ("retained", "parts", "double") and bool(step.during or step.rows != case.steps[0].rows)
    writes = {"input", "buffer", "buffer data", "refill", "weight"} & set(step.after)
    return again or bool(writes) or any(departure.what in ("data", "in place", "resize") for departure in step.during)


def judge(case: Case) -> Finding | None:
    """What is wrong with the case under its plan; None where all is as it should be.

    A step may be refused by an error of this package where it is one of those that are documented (`may_be_refused`): that is
    loud, and nothing is wrong. Steps before it must be those of the plain run all the same. The same holds where an error of
    user code ends a backward that has updated parameters.
    """
    plain = ran(case, planned=False)
    ours = ran(case, planned=True)
    if ours.refused is not None and not may_be_refused(case, ours.refused):
        return Finding("error", f"step {ours.refused}: {type(ours.error).__name__}: {ours.error}")
    for i, (a, b) in enumerate(zip(plain.steps, ours.steps, strict=False)):
        if _same(a, b):
            continue
        if isinstance(b, str):
            return Finding("error", f"step {i}: {type(ours.error).__name__}: {ours.error}")
        return Finding("missing error" if isinstance(a, str) else "bits", f"step {i}: {a} plain, {b} under the plan")
    if ours.refused is not None or ours.halfway is not None:
        return None
    for name, value in plain.end.items():
        if not _same(value, ours.end[name]):
            return Finding("bits", f"at the end: {name}")
    routed = any(node.op == "routed" for node in case.nodes)  # sizes follow the data, and those of the next batch differ
    if not case.departs and not routed and ours.over_nbytes > ROOM_NBYTES:
        return Finding("budget", f"{ours.over_nbytes} bytes above what the plan predicts")
    return None
