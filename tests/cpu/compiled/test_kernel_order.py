"""The order of Inductor's kernels: read as its own estimate counts, executed, and with the bits of any other order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # what has been imported may compile
from torch import Tensor, nn
from torch._inductor import config

from lightning_memopt.compiled import Kernels, asked_to_order, kernels
from lightning_memopt.compiled.partitioner import Regions
from lightning_memopt.record import listening_to
from lightning_memopt.session.regions import kernel_order
from lightning_memopt.session.regions.kernel_order import KernelOrder, problem_of
from lightning_memopt.solvers.ordering import Order, Problem, faults
from lightning_memopt.torch_private import estimated_peak
from lightning_memopt.trace import metered_cpu
from tests.cpu.compiled.training import Residual, counted, train

pytestmark = pytest.mark.skipif(
    kernels.scheduler_pass_class() is None, reason="this torch has no pass over kernels whose code it caches"
)
_WIDTH = 64
_ROWS = 512


@pytest.fixture(autouse=True)
def _compiled_here() -> Any:
    """Code that is cached was not asked about."""
    with config.patch(fx_graph_cache=False):
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


def branches(x: Tensor, wide: Sequence[Tensor], narrow: Sequence[Tensor]) -> Tensor:
    """All wide products first, then what makes them narrow: in this order all of them are in memory at once."""
    products = [x @ w for w in wide]
    return sum((p @ w for p, w in zip(products, narrow, strict=True)), torch.zeros(()))


def branched() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    wide = [torch.randn(_WIDTH, 8 * _WIDTH) for _ in range(4)]
    return torch.randn(_ROWS, _WIDTH), wide, [torch.randn(8 * _WIDTH, 1) for _ in range(4)]


def peak_of(call: Callable[[], Tensor], ordering: Callable[[Kernels], Sequence[int] | None]) -> tuple[int, Tensor]:
    with listening_to(asked_to_order(ordering)):
        call()  # compiles
    with metered_cpu() as events:
        result = call()
    return events.peak_nbytes, result


def test_a_better_order_is_executed_and_has_the_same_bits() -> None:
    counted()
    inputs = branched()
    wide_nbytes = _ROWS * 8 * _WIDTH * 4
    with config.patch(reorder_for_peak_memory=False, reorder_for_locality=False), torch.no_grad():
        given, expected = peak_of(lambda: torch.compile(branches)(*inputs), lambda _: None)
        torch._dynamo.reset()
        ordering = KernelOrder()
        ours, result = peak_of(lambda: torch.compile(branches)(*inputs), ordering)
    (found,) = ordering.orders
    assert found.peak_nbytes == found.bound_nbytes < found.given_nbytes
    assert given >= 4 * wide_nbytes and ours < 3 * wide_nbytes, (given, ours, wide_nbytes)
    assert torch.equal(result, expected)


def test_inductors_own_order_stays_where_it_is_as_good() -> None:
    inputs = branched()
    ordering = KernelOrder()
    with torch.no_grad(), listening_to(asked_to_order(ordering)):
        torch.compile(branches)(*inputs)
    (found,) = ordering.orders
    assert found.given_nbytes == found.bound_nbytes and ordering.said == ""


def several_results(x: Tensor, w: Tensor) -> Tensor:
    values, indices = torch.topk(x @ w, 5)
    mean = torch.var_mean(x, dim=1)[1]
    chunks = torch.split(x.sin(), 16, dim=1)
    return (values.sum() + indices.sum() + mean.sum() + sum(c.amax() for c in chunks)) * nn.functional.max_pool2d(
        x[None], 4
    ).sum()


@pytest.mark.parametrize("function", [branches, several_results])
def test_the_problem_has_inductors_estimate(function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[tuple[int, int]] = []

    def read(nodes: list[Any], _: Any) -> list[Any]:
        picked = kernels.inductors_order(nodes)
        of_nodes = kernels.kernels_of(picked)
        assert of_nodes is not None
        problem = problem_of(of_nodes)
        peaks.append((problem.peak_nbytes(range(len(problem))), estimated_peak(picked)))
        assert not faults(problem, range(len(problem)), estimated_peak(picked))
        return nodes

    monkeypatch.setattr(kernels, "_ordered", read)
    x, wide, narrow = branched()
    inputs: Any = (x.requires_grad_(), wide, narrow) if function is branches else (x.requires_grad_(), wide[0])
    with listening_to(asked_to_order(lambda _: None)):
        torch.compile(function)(*inputs).sum().backward()
    assert len(peaks) == 2 and all(ours == theirs > 0 for ours, theirs in peaks)


def drawing(x: Tensor) -> Tensor:
    return torch.stack([torch.bernoulli(x.sigmoid()).sum(), torch.bernoulli((2 * x).sigmoid()).sum()])


def test_kernels_that_draw_from_a_generator_keep_their_order() -> None:
    read: list[Kernels] = []
    with config.patch(fallback_random=True), listening_to(asked_to_order(lambda k: read.append(k))):
        torch.manual_seed(3)
        result = torch.compile(drawing)(torch.ones(64))
    torch.manual_seed(3)
    assert torch.equal(result, drawing(torch.ones(64)))
    (of_nodes,) = read
    ancestors: list[set[int]] = []
    for before in of_nodes.before:
        ancestors.append(set(before).union(*(ancestors[o] for o in before)))
    draws = [i for i, node in enumerate(_names) if node]
    assert len(draws) == 2 and draws[0] in ancestors[draws[1]]


_names: list[bool] = []


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kernels.kernels_of
    _names.clear()

    def watched(nodes: Sequence[Any]) -> Kernels | None:
        _names[:] = [any(kernels._draws(part.node) for part in node.get_nodes()) for node in nodes]
        return original(nodes)

    monkeypatch.setattr(kernels, "kernels_of", watched)


def test_a_failure_to_read_the_kernels_leaves_them_as_they_are() -> None:
    def fails(_: Kernels) -> None:
        raise ValueError("unknown")

    inputs = branched()
    with torch.no_grad(), listening_to(asked_to_order(fails)):
        result = torch.compile(branches)(*inputs)
    assert torch.allclose(result, branches(*inputs), rtol=1e-3, atol=1e-2)


def test_a_users_own_pass_runs_and_is_back_afterwards() -> None:
    seen: list[int] = []

    class Users(kernels.scheduler_pass_class()):  # type: ignore[misc]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            seen.append(len(nodes))
            return nodes

        def uuid(self) -> str:
            return "users"

    users, ordering = Users(), KernelOrder()
    with config.patch(_post_fusion_custom_pass=users):
        with torch.no_grad(), listening_to(asked_to_order(ordering)):
            torch.compile(branches)(*branched())
        assert config._post_fusion_custom_pass is users
    assert len(seen) == len(ordering.orders) == 1


def test_a_pass_without_an_identity_stays_alone() -> None:
    def users(nodes: list[Any]) -> list[Any]:
        return nodes

    with config.patch(_post_fusion_custom_pass=users), listening_to(asked_to_order(lambda _: None)):
        assert config._post_fusion_custom_pass is users


def test_a_session_asks_for_the_order_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    counted()
    asked: list[int] = []
    original = KernelOrder.__call__

    def asking(self: KernelOrder, of_nodes: Kernels) -> Sequence[int] | None:
        asked.append(len(of_nodes.before))
        return original(self, of_nodes)

    monkeypatch.setattr(KernelOrder, "__call__", asking)

    def made() -> tuple[nn.Module, Any]:
        model = Residual()
        return model, torch.compile(model)

    train(made, "min", steps=4)
    assert len(asked) >= 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_is_asked_about_once_whenever_and_wherever_it_is_compiled(dynamic: bool) -> None:
    """torch compiles it when it first runs; where sizes are symbols, with the forward."""
    asked: list[Kernels] = []
    x, wide, narrow = branched()
    expected = torch.autograd.grad(branches(x.requires_grad_(), wide, narrow).sum(), x)[0]
    with Regions().listening(lambda of_nodes: asked.append(of_nodes)):
        loss = torch.compile(branches, dynamic=dynamic)(x, wide, narrow).sum()
    assert len(asked) == (2 if dynamic else 1)

    def backward() -> None:
        with config.patch(fx_graph_cache=False):  # settings are those of a thread
            loss.backward()

    running = threading.Thread(target=backward)
    running.start()
    running.join()
    assert len(asked) == 2
    assert x.grad is not None and torch.allclose(x.grad, expected, rtol=1e-3, atol=1e-2)
    assert config._post_fusion_custom_pass is None


@pytest.mark.parametrize("gap", [0.0005, 0.01])
def test_the_search_goes_on_where_much_could_be_saved(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def order(problem: Problem, seconds: float) -> Order:
        given.append(seconds)
        return Order((0,), 10_000, round(10_000 / (1 + gap)), 10_000, "the given order", seconds)

    monkeypatch.setattr(kernel_order, "order", order)
    assert KernelOrder(3.0)(Kernels(((),), (), (), (), frozenset())) is None
    assert given == ([0.5] if gap < 0.001 else [0.5, 3.0])


def test_code_with_convolutions_keeps_its_order() -> None:
    """What these take for themselves is in no estimate."""
    asked: list[Kernels] = []
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    with listening_to(asked_to_order(lambda of_nodes: asked.append(of_nodes))):
        torch.compile(lambda x: nn.functional.conv2d(x, weight).relu().sum())(torch.randn(2, 3, 8, 8)).backward()
        assert not asked
        torch.compile(branches)(*branched())
    assert len(asked) == 1
