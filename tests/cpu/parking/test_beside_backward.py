"""Copies of gradients, and of the state of early updates, that run while backward goes on: their prices, what is on the device
meanwhile, and the bits. The CPU is told that it can do both. (On a device: tests/emulated/test_beside_backward.py.)
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_memopt import optimize
from lightning_memopt.graph import BEFORE, Copy, EarlyUpdate, Graph, Op, Point, Tensor
from lightning_memopt.graph.model import Kind, Phase
from lightning_memopt.native.engine import loaded
from lightning_memopt.plan import Plan, Prediction, Rebuild, Schedule, StateParking, updated
from lightning_memopt.plan.clocks import stall_seconds, waits
from lightning_memopt.plan.model import Read
from lightning_memopt.plan.resting import Rests, with_rest
from lightning_memopt.plan.states import Chunk, StateOf, in_plan, priced
from lightning_memopt.runtime import install_native, parked_weights
from lightning_memopt.runtime.tiers.shelf import is_away
from lightning_memopt.session import at_rest
from tests.cpu.lib.engines import elements
from tests.cpu.lib.times import Known, given

WIDTH, DEPTH = 192, 6
WEIGHT_NBYTES = 4 * WIDTH * WIDTH
FREE = Prediction(peak_nbytes=0, extra_seconds=0.0, extra_flops=0, rebuilt_nbytes=0, rebuilt_ops=0)
PLAN = Plan(fingerprint="", lives=(), solver="", budget_nbytes=0, predicted=FREE, unmodified_peak_nbytes=0)
"""It changes nothing."""


@pytest.fixture(autouse=True)
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Known())
    install_native(lambda line: None)
    if loaded() is None:
        pytest.skip("no C++ compiler: gradients are not parked")
    for module in (parked_weights, at_rest):
        monkeypatch.setattr(module, "copies_overlap", lambda device: True)


def train(early: bool, budget: Any) -> tuple[Any, Any, list[tuple[int, int]]]:
    """The bits of weights and state after some steps, and the run's status. And before each gradient of the last step is
    accumulated: how many matrices have a gradient, and how many have state, on the device.
    """
    gc.collect()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    weights = [p for p in model.parameters() if p.dim() == 2]
    there: list[tuple[int, int]] = []

    def look(_: Tensor) -> None:
        states = [dict.get(dict.__getitem__(optimizer.state, p), "exp_avg") for p in weights if p in optimizer.state]
        with_state = sum(t is not None and t.untyped_storage().nbytes() > 0 for t in states)
        there.append((sum(p.grad is not None and not is_away(p.grad) for p in weights), with_state))

    status = None
    updates: Any = "always" if early else "never"
    with contextlib.ExitStack() as stack:
        run: Any = None
        if budget is not None:
            run = stack.enter_context(
                optimize(model, optimizer, budget=budget, offload="disk", max_slowdown=1e6, optimizer_in_backward=updates)
            )
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(8, WIDTH)).square().mean()
            hooks = [p.register_hook(look) for p in weights] if step == 5 else []
            with run.last_backward() if run is not None and early else contextlib.nullcontext():
                loss.backward()
            if not early:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            for hook in hooks:
                hook.remove()
        if run is not None:
            status = run.status()
    state = [t for each in optimizer.state.values() for t in each.values()]
    return elements([p.detach() for p in (*model.parameters(), *state)]), status, there


def of_matrices(status: Any, what: str) -> list[StateParking]:
    return [state for state in status.plan.states if state.what == what and state.nbytes >= WEIGHT_NBYTES]


@pytest.mark.parametrize("early", [False, True])
def test_copies_run_while_backward_goes_on(early: bool) -> None:
    """A gradient, or the state of two updates, is on the device meanwhile, as the plan says, to the byte."""
    plain, _, _ = train(early, None)
    _, least, _ = train(early, "min")
    found, status, there = train(early, least.plan.budget_nbytes + 4 * WEIGHT_NBYTES)
    assert found == plain
    assert 0 <= status.predicted_peak_nbytes - status.measured_peak_nbytes <= 64
    moving = of_matrices(status, "state" if early else "gradient")
    assert sum(bool(each.leaves_before) for each in moving) == len(moving) - 1 >= 3
    assert sum(bool(each.comes_after) for each in moving) == (len(moving) - 1 if early else 0)
    assert all(each.seconds < each.copy_seconds for each in moving if each.leaves_before)
    if early:  # that of the last update, and that of the one that follows
        assert there == [(0, 0), *[(0, 2)] * (DEPTH - 1)]
    else:
        assert max(gradients for gradients, _ in there) == 1 and sum(gradients for gradients, _ in there) == len(moving) - 1


def test_smallest_plans_wait_for_copies() -> None:
    """One gradient at a time takes fewer bytes than two."""
    _, least, there = train(False, "min")
    assert not any(each.leaves_before for each in of_matrices(least, "gradient")) and there == [(0, 0)] * DEPTH


# -- prices ----------------------------------------------------------------------------------------


def step(gaps: Sequence[float], early: bool) -> Graph:
    """A step whose backward computes so many seconds before each gradient is accumulated. Early updates take a second each."""
    ops: list[Op] = []

    def tensor(id: int, name: str, kind: Kind) -> Tensor:
        return Tensor(id=id, name=name, nbytes=1, kind=kind, storage=id, born_at=0, freed_at=0)

    def op(phase: Phase, seconds: float = 0.0) -> int:
        at = len(ops)
        ops.append(Op(id=at, name=phase, phase=phase, inputs=(), outputs=(), seconds=seconds, at=at))
        return at

    count = len(gaps)
    parameters = [tensor(i, f"p{i}", "parameter") for i in range(count)]
    gradients, updates = {}, []
    for i, gap in enumerate(gaps):
        op("backward", gap)
        point = op("backward")
        gradients[f"p{i}"] = count + i, point
        if early:
            updates.append(EarlyUpdate(parameter=i, at=point, nbytes=1, since=point))
            op("update", 1.0)
    made = [tensor(count + i, f"p{i}.grad", "gradient") for i in range(count)]
    points = tuple(Point("op", i) for i in range(len(ops)))
    tensors = (*parameters, *made)
    return Graph(ops=tuple(ops), tensors=tensors, saves=(), points=points, updates=tuple(updates), gradients=gradients)


def states_of(copies: Sequence[tuple[float, float]], what: Read) -> list[StateOf]:
    """`copies`: seconds out, and back."""
    return [
        StateOf(
            StateParking(
                parameter=f"p{i}", what=what, tier="disk", nbytes=1, tier_nbytes=1, copy_seconds=out + back, seconds=out + back
            ),
            (1,),
            back,
        )
        for i, (out, back) in enumerate(copies)
    ]


def waited(gaps: Sequence[float], copies: Sequence[tuple[float, float]], early: bool) -> float:
    """Seconds that backward waits, by clocks of the two directions of a link. Copies back of gradients are in the update."""
    waited = 0.0 if early else sum(back for _, back in copies)
    now = leaves = comes = 0.0  # when the copies that run end
    for i, (out, back) in enumerate(copies):
        now += gaps[i]
        if early and i == 0:
            comes = now + back
        wait = max(0.0, leaves - now, comes - now)
        waited, now = waited + wait, now + wait
        if early:
            comes = now + copies[i + 1][1] if i + 1 < len(copies) else 0.0
            now += 1.0
        leaves = now + out
    return waited + leaves - now


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("early", [False, True])
def test_a_step_waits_as_long_as_clocks_say(seed: int, early: bool) -> None:
    draw = random.Random(seed)
    gaps = [draw.choice([0.0, 1.0, 2.0, 5.0]) for _ in range(6)]
    copies = [(draw.choice([0.5, 1.0, 3.0]), draw.choice([0.5, 1.0, 4.0])) for _ in range(6)]
    rests = Rests(tuple(states_of(copies, "state" if early else "gradient")), ahead=True)
    assert rests.priced(step(gaps, early), []).seconds == pytest.approx(waited(gaps, copies, early))
    assert replace(rests, ahead=False).priced(step(gaps, early), []).seconds == sum(map(sum, copies))


@pytest.mark.parametrize(("others", "waited"), [(0.0, 0.0), (1.0, 1.0), (3.0, 3.0)])
def test_all_copies_share_the_link(others: float, waited: float) -> None:
    """A gradient leaves after what leaves already, and the step waits for both."""
    graph = step([2.0, 2.0, 9.0], False)
    weights = Copy(
        what="weights", tensor=0, lane="out", after=BEFORE, before=5, seconds=2.0 + others
    )  # until the last gradient is there
    rests = Rests(tuple(states_of([(2.0, 0.0)] * 3, "gradient")), ahead=True)
    assert rests.priced(graph, []).seconds == 2.0, "the last gradient leaves when nothing is computed any more"
    assert rests.priced(replace(graph, copies=(weights,)), []).seconds == 2.0 + waited
    other_way = replace(weights, lane="in")
    assert rests.priced(replace(graph, copies=(other_way,)), []).seconds == 2.0


def test_copies_run_beside_what_is_rebuilt() -> None:
    """A plan that runs ops again computes more meanwhile: its step is not slower by both."""
    rests = Rests(tuple(states_of([(3.0, 0.0)] * 2, "gradient")), ahead=True).priced(step([2.0, 2.0], False), [])
    graph = rests.in_step(step([2.0, 2.0], False), [])
    again = Schedule(frozenset(), {2: (Rebuild(0),)}, {}, {0: 2})  # the first op takes 2 seconds
    assert sum(waits(graph)) == 1.0 + 3.0 and stall_seconds(graph, again) == 3.0


def test_copies_in_both_directions_at_one_point_are_waited_for_together() -> None:
    """So the bound has the longer of the two, and is not above the price of the plan."""
    graph = step([9.0], False)
    _, point = graph.gradients["p0"]
    weights = Copy(what="weights", tensor=1, lane="in", after=point, before=point + 1, seconds=2.0)
    rests = Rests(tuple(states_of([(3.0, 0.0)], "gradient")))
    plan = with_rest(PLAN, rests.in_step(replace(graph, copies=(weights,)), []), rests)
    assert plan.lower_bound_seconds == plan.predicted.stall_seconds == 3.0


def test_a_late_neighbour_costs_what_it_hid() -> None:
    """In a plan that updates a parameter late, the step waits for its state, and for the copies that ran beside its update."""
    graph = step([9.0] * 3, True)
    rests = Rests(tuple(states_of([(1.0, 2.0)] * 3, "state")), ahead=True).priced(graph, [])
    assert [state.parking.seconds for state in rests.states] == [2.0, 0.0, 1.0]
    graph = rests.in_step(graph, [])
    whole = with_rest(replace(PLAN, updates=(0, 1, 2)), graph, rests)
    assert whole.predicted.stall_seconds == whole.lower_bound_seconds == 3.0
    some = with_rest(replace(PLAN, updates=(0, 2)), graph, rests)
    assert [state.seconds for state in some.states] == [3.0, 3.0, 3.0]
    assert some.predicted.stall_seconds == some.lower_bound_seconds == 9.0


def test_a_late_update_leaves_the_copies_of_its_weights() -> None:
    """Those of its state are made in the update after backward. A weight comes to its module as before."""
    weights = Copy(what="weights", tensor=1, lane="in", after=BEFORE, before=2, seconds=1.0)
    graph = replace(step([9.0] * 3, True), copies=(weights,))
    graph = Rests(tuple(states_of([(1.0, 2.0)] * 3, "state"))).in_step(graph, [])
    assert [copy.tensor for copy in graph.copies] == [1, 0, 0, 1, 1, 2, 2]
    left = [(copy.what, copy.tensor) for copy in updated(graph, (0, 2)).copies]
    assert left == [("weights", 1), ("state", 0), ("state", 0), ("state", 2), ("state", 2)]


def test_small_ones_do_not_take_turns() -> None:
    """Nothing is computed between the gradients of a weight and of its bias."""
    states = states_of([(1.0, 1.0)] * 4, "gradient")
    states[1] = replace(states[1], parking=replace(states[1].parking, nbytes=1))
    large = [replace(s, parking=replace(s.parking, nbytes=1000)) if i != 1 else s for i, s in enumerate(states)]
    found = priced(step([1.0] * 4, False), large, [], beside_backward=True)
    assert [state.parking.leaves_before for state in found] == ["p2", "", "p3", ""]


def test_gradients_of_two_optimizers_take_turns_apart() -> None:
    """Each optimizer's gradients are told of its own parameters alone."""
    own = [[Chunk((f"p{i}", f"p{i + 2}"), 0, False)] for i in range(2)]
    found = priced(step([1.0] * 4, False), states_of([(1.0, 1.0)] * 4, "gradient"), own, beside_backward=True)
    assert [state.parking.leaves_before for state in found] == ["p2", "p3", "", ""]


def test_a_neighbour_that_is_updated_after_backward() -> None:
    """Its state does not come in backward, so nothing comes or leaves beside it."""
    states = priced(step([1.0] * 3, True), states_of([(1.0, 1.0)] * 3, "state"), [], beside_backward=True)
    parking = [state.parking for state in states]
    assert [(each.comes_after, each.leaves_before) for each in parking] == [("", "p1"), ("p0", "p2"), ("p1", "")]
    chosen = in_plan(parking, {"p0", "p2"})
    assert [(each.comes_after, each.leaves_before) for each in chosen] == [("", ""), ("", ""), ("", "")]
    chosen = in_plan(parking, {"p1", "p2"})
    assert [(each.comes_after, each.leaves_before) for each in chosen] == [("", ""), ("", "p2"), ("p1", "")]
