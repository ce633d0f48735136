"""A step at any batch size, from two recorded ones: against a third that was recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memopt.batching.choose import Chooser
from lightning_memopt.batching.fit import FitError, StepFit, fit, itemsize
from lightning_memopt.batching.plans import Plans, largest
from lightning_memopt.batching.profile import sharpened
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.session.observe.observation import Observation
from lightning_memopt.session.solve.foresight import unmodified_peak
from lightning_memopt.solvers import planner
from tests.cpu.lib.loops import CLASSES, LENGTH, WORDS, loss_of, small

pytestmark = pytest.mark.profiled  # the steps that are recorded are those of a process that holds nothing else

Loss = Callable[[nn.Module, int], Tensor]


def _words(model: nn.Module, size: int) -> Tensor:
    return loss_of(model, (torch.randint(0, WORDS, (size, LENGTH)), torch.randint(0, CLASSES, (size, LENGTH))))


def _image(model: nn.Module, size: int) -> Tensor:
    return F.cross_entropy(model(torch.randn(size, 3, 8, 8)), torch.randint(0, 4, (size,)))


def _contrast(model: nn.Module, size: int) -> Tensor:
    """Logits of every sample against every other one: bytes grow with the square."""
    z = F.normalize(model(torch.randn(size, 12)))
    return F.cross_entropy(z @ z.T * 5, torch.arange(size))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "words": (small, _words),
    "images": (_convolutions, _image),
    "contrast": (lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6)), _contrast),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), lambda m, n: m(torch.randn(n, 6, 16)).sum()),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, size: int) -> Graph:
    observation = Observation(model, [optimizer], torch.device("cpu"), None, verify=False, meter=True)
    with observation.begin_round(()):
        value = loss(model, size)
    observation.forward_ended()
    value.backward()
    del value
    observation.update_begins()
    optimizer.step()
    graph = observation.finish()
    optimizer.zero_grad()
    assert graph is not None
    return graph


@cache
def recorded(name: str) -> dict[int, Graph]:
    """A case's step at three sizes, in the steady state."""
    build, loss = CASES[name]
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, loss, 4)
    return {size: _step(model, optimizer, loss, size) for size in (6, 12, 40)}


def fitted(name: str) -> StepFit:
    graphs = recorded(name)
    return fit(graphs[6], graphs[12], (6, 12))


@pytest.mark.parametrize("name", CASES)
def test_bytes_at_a_third_size_are_those_that_were_recorded(name: str) -> None:
    predicted, real = fitted(name).at(40), recorded(name)[40]
    assert [t.nbytes for t in predicted.tensors] == [t.nbytes for t in real.tensors]
    assert [t.size for t in predicted.tensors] == [t.size for t in real.tensors]
    base = [replace(op, workspace_nbytes=0) for op in predicted.ops]
    assert unmodified_levels(replace(predicted, ops=tuple(base))) == unmodified_levels(
        replace(real, ops=tuple(replace(op, workspace_nbytes=0) for op in real.ops))
    )
    assert unmodified_peak(predicted) == pytest.approx(unmodified_peak(real), rel=0.005)  # workspaces are the libraries'
    assert predicted.saves == real.saves and predicted.points == real.points


def test_what_was_recorded_is_given_back() -> None:
    for name in CASES:
        found, graphs = fitted(name), recorded(name)
        for size in (6, 12):
            assert [t.nbytes for t in found.at(size).tensors] == [t.nbytes for t in graphs[size].tensors]
            assert [op.workspace_nbytes for op in found.at(size).ops] == [op.workspace_nbytes for op in graphs[size].ops]


def test_the_square_of_the_batch_is_no_line() -> None:
    """The test above would pass with lines through bytes, were there no tensor that grows with the square."""
    graphs = recorded("contrast")
    straight = [
        a.nbytes + (b.nbytes - a.nbytes) * (40 - 6) // 6 for a, b in zip(graphs[6].tensors, graphs[12].tensors, strict=True)
    ]
    assert straight != [t.nbytes for t in graphs[40].tensors]


def test_a_plan_of_one_size_is_a_plan_of_another() -> None:
    """Lives are points, and points are the same: priced at the third size as if solved for the graph recorded there."""
    found, real = fitted("words"), recorded("words")[40]
    plan = planner.smallest(found.at(12))
    assert planner.simulate(found.at(40), plan.lives).predicted.peak_nbytes == pytest.approx(
        planner.simulate(real, plan.lives).predicted.peak_nbytes, rel=0.001
    )


def test_the_smallest_plan_is_that_of_the_frontier() -> None:
    graph = recorded("words")[12]
    frontier = planner.solve(graph)
    assert planner.smallest(graph).predicted.needed_nbytes + planner.UNSEEN_NBYTES == frontier.smallest_nbytes


def test_times_rise_with_the_size_and_are_never_below_0() -> None:
    found = fitted("words")
    assert all(op.seconds >= 0 for op in found.at(1).ops)
    assert found.at(400).step_seconds > found.at(12).step_seconds > 0


def test_steps_that_differ_are_refused_by_their_first_difference() -> None:
    graphs = recorded("images")
    ops = list(graphs[12].ops)
    ops[3] = replace(ops[3], name="aten::gelu")
    with pytest.raises(FitError, match=r"op 3 .*aten::gelu"):
        fit(graphs[6], replace(graphs[12], ops=tuple(ops)), (6, 12))
    with pytest.raises(FitError, match="ops and"):
        fit(graphs[6], replace(graphs[12], ops=graphs[12].ops[:-1]), (6, 12))
    with pytest.raises(FitError, match="shrinks"):
        fit(graphs[12], graphs[6], (6, 12))
    with pytest.raises(FitError, match="smaller one first"):
        fit(graphs[6], graphs[12], (12, 6))
    with pytest.raises(FitError, match="saves"):
        fit(graphs[6], replace(graphs[12], saves=graphs[12].saves[:-1]), (6, 12))


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float32", 4), ("bfloat16", 2), ("bool", 1), ("int64", 8), ("complex128", 16), ("float8_e4m3fn", 1), ("", None)],
)
def test_sizes_of_elements(dtype: str, nbytes: int | None) -> None:
    assert itemsize(dtype) == nbytes


CURVES = {
    "line": lambda n: 100 + 7 * n,
    "steps": lambda n: 100 + 7 * (n // 5),
    "square": lambda n: 5 + n * n,
    "cube": lambda n: n**3,
    "fits or not": lambda n: 1234 * (n > 37),
}


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_the_largest_that_fits(curve: Callable[[int], int]) -> None:
    asked: set[int] = set()

    def peak(size: int) -> int:
        asked.add(size)
        return curve(size)

    for budget in (0, 1, 99, 107, 1000, 12345, 1 << 40):
        asked.clear()
        assert largest(peak, budget, 1, 500) == max((n for n in range(1, 501) if curve(n) <= budget), default=0)
        assert len(asked) <= 2 + 3 * 9
    assert largest(curve, 1 << 40, 5, 4) == 0


def test_the_largest_planned_size_is_that_of_all_sizes_tried() -> None:
    """Every size solved for itself: within 2 %, and never above."""
    found = fitted("images")
    budget = int(1.3 * unmodified_peak(found.at(12)))
    unmodified = Chooser(found, budget).largest_unmodified(1 << 20)
    fits = [size for size in range(10, 41) if planner.solve(found.at(size)).smallest_nbytes <= budget]
    got = Plans(found, planner.solve).largest(unmodified, 1 << 20, budget)
    assert got > unmodified
    assert fits[-1] < 40
    assert fits[-1] / 1.02 <= got <= fits[-1]


def rate(chooser: Chooser, size: int) -> float:
    choice = chooser.predicted(size)
    assert choice is not None
    return choice.samples_per_second


@pytest.mark.parametrize(("plain", "asked"), [(80, [40]), (72, [])])
def test_a_step_is_recorded_again_where_two_sizes_are_far_from_what_fits(plain: int, asked: list[int]) -> None:
    """At half of what fits; another step there, or one that does not fit, leaves what there was."""
    sizes: list[int] = []
    small = replace(fitted("words"), sizes=(6, 9))  # 40 is far from 9, 36 is not
    again = lambda size: (sizes.append(size), recorded("words")[size])[1]  # noqa: E731
    found = sharpened(again, small, plain)
    assert sizes == asked and found.sizes == ((6, 40) if asked else (6, 9))
    if asked:
        assert [op.workspace_nbytes for op in found.at(40).ops] == [op.workspace_nbytes for op in recorded("words")[40].ops]
        assert sharpened(lambda size: None, small, plain) is small
        assert sharpened(lambda size: recorded("images")[40], small, plain) is small


def test_modes_choose_by_what_they_say() -> None:
    """An op that is slow per sample beyond 24 samples a batch makes larger batches the slower ones."""
    found = fitted("words")
    everything = lambda limit: range(1, limit + 1)  # noqa: E731
    chooser = Chooser(found, unmodified_peak(found.at(30)))
    largest_one = chooser.choose("largest", everything, 1 << 20)
    assert largest_one is not None and largest_one.size == 30 and not largest_one.planned
    assert largest_one.peak_nbytes == unmodified_peak(found.at(30))
    fastest = chooser.choose("throughput", everything, 1 << 20)
    assert fastest is not None
    assert fastest.samples_per_second == max(rate(chooser, size) for size in (1, 2, 8, 30, fastest.size))
    assert chooser.choose("largest", lambda limit: [s for s in (64, 128) if s <= limit], 1 << 20) is None
    divisors = lambda limit: [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= limit]  # noqa: E731
    kept = Chooser(found, unmodified_peak(found.at(30)), effective=64).choose("largest", divisors, 1 << 20)
    assert kept is not None and kept.size == 16
    one, kept_one = rate(chooser, 16), kept.samples_per_second
    assert kept_one > one, "an update is shared by the batches that it is accumulated over"


def test_a_whole_update_in_one_batch_has_no_gradients_of_others() -> None:
    found = fitted("words")
    below = unmodified_peak(found.at(32)) - 1000
    plain = Chooser(found, below, effective=32)
    assert plain.largest_unmodified(64) < 32
    assert replace(plain, spare_nbytes=1000).largest_unmodified(64) == 32
    assert replace(plain, spare_nbytes=999).largest_unmodified(64) < 32
