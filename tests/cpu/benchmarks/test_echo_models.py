"""The models of Echo's evaluation, small: what is predicted is measured, and gradients are those of the unmodified step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.lib.baselines import all_light
from benchmarks.lib.bench import MIB, Bench
from benchmarks.lib.bench import equal as same_bits
from benchmarks.models import recurrent
from benchmarks.models.registry import MODELS
from lightning_memopt.graph import Graph, resident_nbytes, unmodified_levels
from lightning_memopt.plan import Life, lower, simulate, validate
from lightning_memopt.report.breakdown import at_peak
from lightning_memopt.runtime import Program
from lightning_memopt.solvers import planner
from lightning_memopt.solvers.recompute.baselines import mirror
from lightning_memopt.solvers.recompute.echo import echo

pytestmark = pytest.mark.usefixtures("deterministic")

SMALL: dict[str, Callable[[], recurrent.Built]] = {
    "nmt": lambda: recurrent.nmt(time=4, batch=8, width=16),
    "deepspeech2": lambda: recurrent.deepspeech2(frames=32, batch=4, width=16, layers=1),
    "transformer": lambda: recurrent.transformer(layers=1, batch=4, time=16, width=48),
}


@pytest.fixture(scope="module", params=SMALL)
def observed(request: pytest.FixtureRequest) -> tuple[Bench, Graph]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "small", SMALL[request.param])
        bench = Bench("small")
    bench.step()
    bench.step()
    return bench, bench.observe(steps=1)


def assert_kept(bench: Bench, graph: Graph, lives: tuple[Life, ...]) -> None:
    """The plan is valid, its peak is measured to the byte, and its step gives the bits of the unmodified one."""
    loss, reference = bench.step(), bench.outcome()
    predicted = simulate(graph, lives).predicted.peak_nbytes
    report = validate(graph, lives, lower(graph, lives))
    assert report.ok, report.problems[:3]
    assert report.peak_nbytes == predicted
    forward = bench.planned(Program(graph, lives))
    assert torch.equal(bench.step(forward), loss) and same_bits(reference, bench.outcome())
    assert bench.peak(forward) * MIB + resident_nbytes(graph) == predicted


def test_frontier_is_predicted_to_the_byte(observed: tuple[Bench, Graph]) -> None:
    """The gates of a cell are pieces of one storage, written in place one after the other: they are its bytes once."""
    bench, graph = observed
    assert bench.peak() * MIB + resident_nbytes(graph) == max(unmodified_levels(graph))
    assert not graph.overwritten.intersection(graph.saves_of), "autograd reads what is there now"
    frontier = planner.solve(graph)
    smallest = frontier.plan(frontier.smallest_nbytes)
    assert smallest.predicted_peak_nbytes < frontier.unmodified_peak_nbytes
    middle = frontier.candidates[len(frontier.candidates) // 2]
    for lives in {smallest.lives, middle.lives}:
        assert_kept(bench, graph, lives)


@pytest.mark.parametrize("policy", [mirror, all_light, echo])
def test_policies_are_exact_and_their_parts_add_up(
    observed: tuple[Bench, Graph], policy: Callable[[Graph], tuple[Life, ...]]
) -> None:
    bench, graph = observed
    lives = policy(graph)
    assert_kept(bench, graph, lives)
    peak = simulate(graph, lives).predicted.peak_nbytes
    assert at_peak(graph, lives).total == peak
    assert policy is not echo or peak <= max(unmodified_levels(graph))
