"""Operators with a graph or a function of their own in compiled regions: they never run again, and their results count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_memopt.compiled import partitioner
from lightning_memopt.compiled.joint import Joint
from lightning_memopt.compiled.rewriting import rewrite
from lightning_memopt.compiled.sizes import UnreadableError
from lightning_memopt.plan import lower, validate
from lightning_memopt.solvers import planner
from lightning_memopt.torch_private import HigherOrderOperator, unique_nodes
from tests.cpu.compiled.test_joint import splitting
from tests.cpu.compiled.training import Forward, keeping_all, train

WIDTH = 48


@torch.library.custom_op("memopt_tests::add_mean", mutates_args={"into"})
def add_mean(x: torch.Tensor, into: torch.Tensor) -> None:
    """Adds the mean of the rows of `x` to `into`."""
    into.add_(x.mean(0))


@add_mean.register_fake
def _(x: torch.Tensor, into: torch.Tensor) -> None:
    return None


@torch.compiler.nested_compile_region
def region(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
    for weight in (first, second, third):
        x = x + torch.sin(functional.gelu(x @ weight))
    return x


class Layers(nn.Module):
    """Layers with dropout around something special."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def layer(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return x + functional.dropout(functional.gelu(self.layers[i](x)), 0.1, self.training)


class Branches(Layers):
    """`cond`: both branches have weights and save tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.layer(x, 0), 1)
        x = torch.cond(
            x[0, 0] > 0,
            lambda x: x + functional.gelu(self.layers[3](x)),
            lambda x: torch.tanh(self.layers[4](x)) * x,
            (x,),
        )
        return self.layer(x, 5)


class Writes(Layers):
    """A custom op writes to a buffer, and another one to a new tensor that is read in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.layer(x, 0), 1)
        torch.ops.memopt_tests.add_mean(x.detach(), self.seen)
        mean = torch.zeros(WIDTH)
        torch.ops.memopt_tests.add_mean(x.detach(), mean)
        return self.layer(self.layer(x * mean, 3), 5)


class Nested(Layers):
    """`nested_compile_region`: one graph, called twice. (Dynamo inlines a graph that is called once.)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = (layer.weight for layer in self.layers)
        return region(region(self.layer(x, 0), a, b, c), d, e, f)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "cond": (Branches, "cond"),
    "writes": (Writes, "auto_functionalized_v2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_operator_runs_once_and_gradients_are_those_of_eager_code(name: str) -> None:
    """Unfused code under the smallest plan, without dropout."""
    build, operator = MODELS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build().eval()
    counts: list[tuple[int, int, int]] = []

    def plan(module: Any) -> None:
        joint = Joint(module)
        at = [i for i, node in enumerate(joint.ops) if str(node.target) == operator]
        assert at
        assert not any(joint.graph.ops[i].recomputable for i in at)
        best = planner.solve(joint.graph, objective="flops", limit_seconds=5).candidates[0]
        assert not validate(joint.graph, best.lives, lower(joint.graph, best.lives)).problems
        rewritten = rewrite(joint, best.lives)
        after = sum(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes)
        counts.append((rewritten, len(at), after))

    compiled: Any = torch.compile(model, backend=splitting(plan), fullgraph=True)
    for sign in (1, -1):  # both branches of `cond`
        x = sign * torch.rand(64, WIDTH)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        results = []
        for call in (model, compiled):
            model.load_state_dict(state)
            model.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            results.append([loss.detach(), *gradients, *(b.clone() for b in model.buffers())])
        plain, planned = results
        for a, b in zip([g for g in plain if g.any()], [g for g in planned if g.any()], strict=True):
            torch.testing.assert_close(b, a)
    assert len(counts) == 1
    ((rebuilt, operators, after),) = counts
    assert rebuilt > 0
    assert operators == after


def made(build: Callable[[], nn.Module]) -> tuple[nn.Module, Forward]:
    model = build()
    compiled = torch.compile(model, fullgraph=True)
    return model, lambda x: compiled(x).square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_is_kept_with_the_bits_of_keeping_all(name: str) -> None:
    build, _ = MODELS[name]
    keeps = keeping_all(lambda: made(build))
    smallest = train(lambda: made(build), "min")
    assert smallest.nbytes < keeps.nbytes
    assert smallest.has_bits_of(keeps)
    assert smallest.text.startswith("1 of 1 compiled regions run ops again")
    assert abs(smallest.predicted_nbytes - smallest.nbytes) <= 0.01 * smallest.nbytes


def test_a_nested_region_is_planned_by_itself() -> None:
    """The region around it has no plan. The row of the table says why."""
    why = "it calls nested regions (nested_compile_region), which are planned separately"
    keeps = keeping_all(lambda: made(Nested))
    smallest = train(lambda: made(Nested), "min")
    assert smallest.nbytes < keeps.nbytes
    assert smallest.has_bits_of(keeps)
    assert smallest.text.startswith("1 of 1 compiled regions run ops again")
    assert smallest.text.endswith(f"not planned: {why}")


def test_a_region_that_cannot_be_split_by_its_plan_runs_as_its_user_compiled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(lambda: made(Branches), 10**9)
    assert plain.text.startswith("0 of 1")

    def fails(*args: Any, **options: Any) -> Any:
        raise AssertionError("cannot be split")

    monkeypatch.setattr(partitioner, "as_written", fails)
    why = "(this model: AssertionError: cannot be split)"
    trained = train(lambda: made(Branches), "min", warned=why)
    assert trained.text.startswith(f"nothing can be rebuilt inside of compiled code {why}")
    assert trained.has_bits_of(plain)


def reason(call: Forward) -> str:
    """Why the joint graph of this function cannot be read."""
    torch._dynamo.reset()
    reasons: list[str] = []

    def read(module: Any) -> None:
        with pytest.raises(UnreadableError) as raised:
            Joint(module)
        reasons.append(str(raised.value))

    torch.compile(call, backend=splitting(read), fullgraph=True)(torch.ones(4, 4, requires_grad=True)).sum().backward()
    (text,) = reasons
    return text


def test_operators_with_effects_and_loops_of_unknown_length_are_refused_by_name() -> None:
    def prints(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._print("")
        return x.sin()

    def loops(x: torch.Tensor) -> torch.Tensor:
        _, x = torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x.sin()))
        return x

    assert reason(prints) == "it has an operator with effects (with_effects). Call it outside of compiled code"
    assert reason(loops) == "its sizes depend on values (nonzero, masks as indices, while_loop)"


def test_a_result_that_is_a_view_of_what_the_operator_reads_is_refused() -> None:
    """No operator of torch gives one, but nothing forbids it: seen by changing what the graph says of a result."""

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x.exp(),))

    reasons: list[str] = []

    def read(module: Any) -> None:
        unique_nodes(module)
        (node, *_) = [n for n in module.graph.nodes if str(n.target) == "cond"]
        kept = {n: n.meta["val"] for n in (node, *node.users)}
        shared = next(n for n in node.all_input_nodes if str(n.target) == "aten.exp.default").meta["val"]
        node.meta["val"] = (shared.view_as(shared),)
        with pytest.raises(UnreadableError) as raised:
            Joint(module)
        reasons.append(str(raised.value))
        for n, value in kept.items():
            n.meta["val"] = value

    torch._dynamo.reset()
    torch.compile(call, backend=splitting(read), fullgraph=True)(torch.ones(4, 4, requires_grad=True)).sum().backward()
    assert reasons == ["a result of cond is a view of what it reads. Let it return a copy (clone)"]
