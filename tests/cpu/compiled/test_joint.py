"""Joint graphs of torch.compile as data, and plans written into them. The code runs unfused, so each byte and bit is known."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import default_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.nn import functional

from lightning_memopt.compiled.joint import Joint
from lightning_memopt.compiled.partitioner import key_of
from lightning_memopt.compiled.rewriting import rewrite
from lightning_memopt.compiled.sizes import UnreadableError
from lightning_memopt.graph import graph_from_json, graph_to_json, resident_nbytes, unmodified_levels
from lightning_memopt.plan import lower, validate
from lightning_memopt.solvers import planner
from lightning_memopt.torch_private import unique_nodes
from lightning_memopt.trace import metered_cpu


class Block(nn.Module):
    """Attention by hand, several results of an op (split), views, an op that is written in place."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.inner(self.norm(x)).split(x.shape[2], 2))
        x = x + self.outer(((q @ k.transpose(2, 3)).softmax(3) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x).relu_()


class Pictures(nn.Module):
    """Convolutions and batch norm: running statistics are written in the region."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def blocks() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block() for _ in range(3))), torch.randn(8, 32, 32)


def pictures() -> tuple[nn.Module, torch.Tensor]:
    return Pictures(), torch.randn(8, 8, 16, 16)


def shared() -> tuple[nn.Module, torch.Tensor]:
    """A module that is called twice, and weights that are tied."""
    block = Block()
    model = nn.Sequential(block, Block(), block)
    model[1].outer.weight = block.outer.weight
    return model, torch.randn(8, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"blocks": blocks, "pictures": pictures, "shared": shared}


def splitting(answer: Callable[..., Any]) -> Any:
    """A backend that runs each op of a graph as it is, and asks `answer(module)` to change the joint graph before."""

    def split(module: Any, inputs: Any, **options: Any) -> Any:
        unique_nodes(module)
        answer(module)
        options.pop("compiler", None)
        return default_partition(module, inputs, **options)

    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=split)


def step(model: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = functional.mse_loss(call(x), torch.zeros_like(x))
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


def peak_nbytes(model: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> int:
    """Bytes of the region at its peak, above what is there before."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    out = torch.zeros_like(x)
    with metered_cpu() as events:
        call(x).backward(out)
    return events.peak_nbytes


@pytest.mark.parametrize("share", [0.4, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_in_a_joint_graph_gives_the_same_bits_within_its_peak(name: str, share: float) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = MODELS[name]()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    plain = step(model, model, x)
    seen: dict[str, Any] = {}

    def plan(module: Any) -> None:
        joint = Joint(module)
        frontier = planner.solve(joint.graph, objective="flops", limit_seconds=5)
        least, most = frontier.smallest_nbytes, max(unmodified_levels(joint.graph))
        best = frontier.within(int(least + share * (most - least)))
        assert not validate(joint.graph, best.lives, lower(joint.graph, best.lives)).problems
        assert graph_to_json(graph_from_json(graph_to_json(joint.graph))) == graph_to_json(joint.graph)
        resident = resident_nbytes(joint.graph)
        seen.update(most=most - resident, predicted=best.predicted.peak_nbytes - resident, ops=rewrite(joint, best.lives))

    compiled = torch.compile(model, backend=splitting(plan), fullgraph=True)
    model.load_state_dict(state)
    planned = step(model, compiled, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert seen["ops"] > 0
    assert seen["predicted"] < seen["most"]
    measured = peak_nbytes(model, compiled, x)
    if name != "pictures":  # convolutions take workspaces, which a joint graph does not show
        assert abs(measured - seen["predicted"]) <= 0.002 * measured, (measured, seen)


def test_a_plan_of_a_region_whose_sizes_change_serves_all_sizes() -> None:
    """Planned for the sizes of its first batch. No guard is added: one compilation serves both sizes."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, _ = blocks()
    batches = [torch.randn(8, 40, 32), torch.randn(12, 60, 32), torch.randn(3, 5, 32)]
    plain = [step(model, model, batch) for batch in batches]
    seen: list[tuple[int, int]] = []

    def plan(module: Any) -> None:
        joint = Joint(module)
        assert joint.dynamic
        frontier = planner.solve(joint.graph, objective="flops", limit_seconds=5)
        best = frontier.candidates[0]
        assert not validate(joint.graph, best.lives, lower(joint.graph, best.lives)).problems
        seen.append((rewrite(joint, best.lives), best.predicted.peak_nbytes - resident_nbytes(joint.graph)))

    compiled = torch.compile(model, backend=splitting(plan), fullgraph=True, dynamic=True)
    measured = [peak_nbytes(model, compiled, batch) for batch in batches]
    for batch, expected in zip(batches, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, step(model, compiled, batch), strict=True))
    ((ops, predicted),) = seen
    assert ops > 0
    assert abs(measured[0] - predicted) <= 0.01 * measured[0], (measured, predicted)
    assert 2 * measured[0] < measured[1]


def test_a_region_whose_sizes_depend_on_values_is_refused_by_name() -> None:
    torch._dynamo.reset()
    reasons: list[str] = []

    def read(module: Any) -> None:
        try:
            Joint(module)
        except UnreadableError as error:
            reasons.append(str(error))

    def call(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].square()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(call, backend=splitting(read), fullgraph=True)(torch.randn(64, requires_grad=True)).sum().backward()
    assert reasons == ["its sizes depend on values (nonzero, masks as indices, while_loop)"]


def test_a_region_is_recognised_when_its_symbols_have_other_names() -> None:
    keys: list[str] = []

    def read(module: Any) -> None:
        keys.append(key_of(Joint(module)))

    for batch, length in ((8, 40), (6, 20)):
        torch._dynamo.reset()
        model = Block()
        torch.compile(model, backend=splitting(read), dynamic=True)(torch.randn(batch, length, 32)).sum().backward()
    torch._dynamo.reset()
    torch.compile(model, backend=splitting(read))(torch.randn(6, 20, 32)).sum().backward()
    assert keys[0] == keys[1] != keys[2]
