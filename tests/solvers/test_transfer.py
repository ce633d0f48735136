"""Transfers by dependencies alone, and policies to compare with: order, prefetches, validity, and how far from optimal."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from build import Step, random_step
from test_trips import Link

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models.papers.layers import Net
from benchmarks.models.papers.networks import alexnet, network, resnet
from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Fetch, Life, Prediction, lower, simulate, validate
from lightning_memopt.plan.clocks import TransferRates
from lightning_memopt.plan.forms import tier_of
from lightning_memopt.plan.rates import profile
from lightning_memopt.solvers import joint, planner
from lightning_memopt.solvers.joint.bound import Relaxation, points
from lightning_memopt.solvers.offload.dymem import dymem_trips, flow, prefetches
from lightning_memopt.solvers.offload.policies import POLICIES
from lightning_memopt.solvers.offload.policy import Policy, carry_out
from lightning_memopt.solvers.offload.trips import Trip, TripPlanner, gaps, send_away
from lightning_memopt.solvers.rollout import keep_all

CARD = profile("pcie3-12gb")
CONVOLUTION, RELU, NORM, LINEAR = "aten::convolution", "aten::relu", "aten::native_batch_norm", "aten::addmm"


@dataclass(frozen=True)
class Codec(Link):
    """A codec that is this many times as fast as the link."""

    times: float = 1.0

    def encode_seconds(self, codec: str, nbytes: int) -> float:
        return nbytes / self.rate / self.times

    decode_seconds = encode_seconds


def lives_of(policy: Policy, graph: Graph, rates: TransferRates) -> tuple[Life, ...]:
    """The lives that the policy gives, with no budget."""
    return carry_out(policy, graph, rates)[0]


def named(graph: Graph, rng: random.Random) -> Graph:
    """The graph with layers of all kinds for names."""
    ops = []
    for op in graph.ops:
        name = rng.choice((CONVOLUTION, RELU, NORM, LINEAR)) if op.phase == "forward" else op.name
        ops.append(replace(op, name=name, heavy=name in (CONVOLUTION, LINEAR)))
    return replace(graph, ops=tuple(ops))


def timed(graph: Graph) -> Graph:
    """Backward takes twice as long as forward."""
    back = [op for op in graph.ops if op.phase != "forward"]
    seconds = 2 * sum(op.seconds for op in graph.forward) / max(1, len(back))
    return replace(graph, ops=(*graph.forward, *(replace(op, seconds=seconds) for op in back)))


def price(graph: Graph, lives: tuple, rates: object) -> Prediction:
    """What valid lives cost; the validator counts the same bytes."""
    schedule = lower(graph, lives)
    report = validate(graph, lives, schedule)
    assert report.ok, report.problems[:3]
    found = simulate(graph, lives, schedule, rates=rates).predicted
    assert report.peak_nbytes == found.peak_nbytes
    return found


def layers(kinds: str, nbytes: int = 100, gradient: int = 100) -> Graph:
    """A line of layers that save what they read: c a convolution, r a ReLU, l a linear layer."""
    names = {"c": CONVOLUTION, "r": RELU, "l": LINEAR}
    step = Step()
    (x,) = step.op(step.given(), makes=(nbytes,), name="input", recomputable=False)
    for kind in kinds:
        (x,) = step.op(x, makes=(nbytes,), saves=(x,), name=names[kind])
    graph = step.build(gradient=gradient)
    return replace(graph, ops=tuple(replace(op, heavy=op.name in (CONVOLUTION, LINEAR)) for op in graph.ops))


def inputs(graph: Graph) -> dict[int, int]:
    """The tensor that a layer reads -> its place on the line."""
    return {op.inputs[0]: i for i, op in enumerate(graph.forward[1:])}


def test_a_join_comes_after_its_last_branch() -> None:
    """Algorithm 1: ops made breadth-first are walked branch by branch (Dymem, fig. 10)."""
    step = Step()
    (l0,) = step.op(step.given(), saves=("out",))
    heads = [step.op(l0)[0] for _ in range(4)]  # ops 1..4
    (l5,) = step.op(heads[0])
    (l7,) = step.op(heads[3])
    (l8,) = step.op(l7)
    step.op(l5, heads[1], heads[2], l8)
    assert flow(step.build()) == [0, 1, 5, 2, 3, 4, 6, 7, 8]


def test_no_more_than_two_heavy_layers_ahead() -> None:
    """Algorithm 2: light layers on the way to the second heavy one come along; the third one waits."""
    graph = layers("crrcrrcrrc")
    lives = keep_all(graph)
    found = prefetches(graph, gaps(graph, lives))
    place = inputs(graph)
    at = {place[t]: point for t, point in found.items()}
    asked = {place[s.tensor]: s.unpacked_at[0] for s in graph.saves}
    assert at[8] == at[7] == at[6] == asked[9]  # from the convolution at 9: two ReLUs and the next convolution
    assert at[5] == asked[9] and at[4] == asked[9]  # what is light before the third is on the way still
    assert at[3] == asked[8] and at[2] == at[1] == asked[8]  # a light layer may look two convolutions ahead
    assert 9 not in at


def test_small_layers_stay() -> None:
    """What only fully connected layers read is not moved."""
    graph = layers("crcll")
    place = inputs(graph)
    moved = {place[life.tensor] for life in lives_of(dymem_trips, graph, Link(1000.0)) if life.how == "fetch"}
    assert moved == {0, 1, 2}


@pytest.mark.parametrize("name", POLICIES)
def test_lives_are_valid(name: str) -> None:
    """On random graphs with links of all speeds, and on networks of the papers."""
    away = 0
    for seed in range(50):
        rng = random.Random(seed)
        graph = named(random_step(rng), rng)
        lives = lives_of(POLICIES[name], graph, Link(rng.choice((5.0, 100.0, 5000.0))))
        price(graph, lives, Link())
        away += sum(life.how != "original" for life in lives)
    assert away > 30 or name == "liveness"
    for net in ("AlexNet", "ResNet-32, no norm", "Inception V4"):
        graph = network(net, 8, CARD.device, 0.7)
        price(graph, lives_of(POLICIES[name], graph, CARD), CARD)


def test_networks_are_those_published() -> None:
    """Parameters and multiply-adds of one image, as their papers and torchvision have them."""
    published = {
        "AlexNet": (62.4e6, 1.14e9),
        "VGG-16": (138.4e6, 15.5e9),
        "ResNet-50": (25.6e6, 4.1e9),
        "ResNet-101": (44.5e6, 7.8e9),
        "ResNet-152": (60.2e6, 11.5e9),
        "Inception V4": (42.7e6, 12.3e9),
    }
    for name, (parameters, macs) in published.items():
        graph = network(name, 2, CARD.device, 1.0)
        assert sum(t.nbytes for t in graph.tensors if t.kind == "parameter") / 4 == pytest.approx(parameters, rel=0.01)
        assert sum(op.flops for op in graph.forward) / 4 == pytest.approx(macs, rel=0.03), name


def test_shape_of_dymems_comparison() -> None:
    """No barriers beat barriers, in the same bytes too, and one stream is behind all (Dymem, 5.2 and 5.3)."""
    net = Net(CARD.device, 0.7)
    resnet(net, 32, (3, 4, 6, 3))
    graph = net.build()
    rows = {name: price(graph, lives_of(policy, graph, CARD), CARD) for name, policy in POLICIES.items()}
    barriers = rows["vDNN (all)"]
    lives, fits = carry_out(POLICIES["Dymem"], graph, CARD, budget_nbytes=barriers.peak_nbytes)
    in_its_bytes = price(graph, lives, CARD)
    assert fits and in_its_bytes.peak_nbytes <= barriers.peak_nbytes
    assert rows["Dymem"].seconds < in_its_bytes.seconds < barriers.seconds < rows["one stream"].seconds
    assert rows["one stream"].overlap < 1e-9
    assert rows["Dymem"].moved_nbytes == pytest.approx(barriers.moved_nbytes, rel=0.01)


def every_plan(graph: Graph, forms: dict, link: Link, stay: bool = True) -> Iterator[tuple]:
    """The lives of keep-all with every tensor away for every part of its gap in every form, or, where they may `stay`, here."""
    base = keep_all(graph)
    found = gaps(graph, base)
    fences = sorted({gap.leaves for gap in found.values()})
    asked = TripPlanner(graph, base, link).unpacks(found)
    choices = []
    for t, gap in found.items():
        mine: list[Trip | None] = [None] if stay or t not in forms else []
        for form, nbytes in forms.get(t, ()):
            last, moves = max(gap.leaves, graph.tensors[t].freed_at), bool(tier_of(form))
            for gone in [f for f in fences if gap.leaves <= f] if moves else [gap.leaves]:
                for back in [p for p in asked if max(gone, last) < p <= gap.needed] if moves else [gap.needed]:
                    mine.append(Trip(gap, gone, back, form, nbytes))
        choices.append(mine)
    for choice in product(*choices):
        trips = [trip for trip in choice if trip is not None]
        if {trip.gone_at for trip in trips} <= {trip.gap.leaves for trip in trips}:  # where the engine is given something
            yield send_away(base, trips)


def least_seconds(graph: Graph, forms: dict, link: Link, stay: bool = True) -> list[tuple[int, float]]:
    """(peak, fewest seconds within it) of all transfers, peaks rising and seconds falling."""
    found = []
    for lives in every_plan(graph, forms, link, stay):
        p = simulate(graph, lives, rates=link).predicted
        found.append((p.peak_nbytes, p.seconds))
    best: list[tuple[int, float]] = []
    for peak, seconds in sorted(found):
        if not best or seconds < best[-1][1] - 1e-12:
            best.append((peak, seconds))
    return best


def forms_of(graph: Graph, codecs: bool = True) -> dict:
    """The host for every map, and an 8-bit codec where its tensor is large."""
    made = (t for t in graph.tensors if t.born_at >= 0)
    return {t.id: [("host", t.nbytes), *([("block8", -(-t.nbytes // 4))] if codecs else [])] for t in made}


def test_dymem_beside_the_optimum() -> None:
    """All subsets, fences and requests of small lines of layers, in Dymem's bytes: it waits longer than the best of them, as it
    moves what need not move; of those that move what it moves, none waits less.
    """
    above = []
    for seed in range(2):
        rng = random.Random(seed)
        graph = timed(layers("".join(rng.choice("ccr") for _ in range(4))))
        for rate in (30.0, 1000.0):
            link = Link(rate)
            mine = price(graph, lives_of(dymem_trips, graph, link), link)
            forms = forms_of(graph, False)
            least = min(s for peak, s in least_seconds(graph, forms, link) if peak <= mine.peak_nbytes)
            same = min(s for peak, s in least_seconds(graph, forms, link, stay=False) if peak <= mine.peak_nbytes)
            assert least <= same and mine.seconds == pytest.approx(same)
            above.append(mine.seconds - least)
    assert max(above) > 0.01


def solved(graph: Graph, budget: int, forms: dict, rates: object) -> joint.Joint | None:
    frontier = planner.solve(graph)
    plans = [(c.solver, c.lives) for c in frontier.candidates]
    return joint.solve_joint(graph, budget, rates=rates, forms=forms, plans=plans, limit_seconds=1.0)


def test_joint_is_never_worse() -> None:
    """Than any policy, as it is or made to fit by waiting, nor than recomputation, at the budgets at which that matters."""
    better = pairs = 0
    for seed in range(10):
        rng = random.Random(seed)
        graph = timed(named(random_step(rng, 8), rng))
        link = Link(rng.choice((20.0, 100.0, 1000.0)))
        forms = forms_of(graph, False)
        for found in forms.values():
            found += [(f"block{bits}", -(-found[0][1] * bits // 32)) for bits in (4, 6)]
        rows = [price(graph, lives_of(policy, graph, link), link) for policy in POLICIES.values()]
        for budget in {row.peak_nbytes for row in rows}:
            others = [row.seconds for row in rows if row.peak_nbytes <= budget]
            for policy in POLICIES.values():
                lives, fits = carry_out(policy, graph, link, budget_nbytes=budget)
                others += [price(graph, lives, link).seconds] if fits else []
            ours = solved(graph, budget, forms, link)
            assert ours is not None and ours.predicted.peak_nbytes <= budget
            assert ours.predicted.seconds <= min(others) + 1e-9, (seed, budget, ours.solver)
            assert ours.bound_seconds <= min(others) + 1e-9, (seed, budget)
            pairs += 1
            better += ours.predicted.seconds < min(others) - 1e-9
    assert pairs > 30 and better > pairs / 3


def test_a_link_that_takes_forever() -> None:
    """Counts of its seconds do not fit 64 bits: nothing goes away where ops can run again, and else it is waited for."""
    graph, forever = timed(named(random_step(random.Random(5), 12), random.Random(5))), Link(1e-20)
    alone = planner.solve(graph)
    for budget in {c.predicted.peak_nbytes for c in alone.candidates}:
        found = solved(graph, budget, forms_of(graph), forever)
        assert found is not None and found.predicted.seconds == pytest.approx(alone.within(budget + 4096).predicted.seconds)
    least = joint.least(graph, [c.lives for c in alone.candidates], forms_of(graph))[0]
    assert least < alone.candidates[0].predicted.peak_nbytes
    found = solved(graph, least, forms_of(graph), forever)
    assert found is not None and found.predicted.stall_seconds + found.predicted.codec_seconds > 1e20


def lines(seed: int, count: int = 2) -> tuple[Graph, Codec, dict]:
    """A line of layers of all lengths, none of which can run again, where codecs and copies hide behind ops."""
    rng = random.Random(seed)
    graph = layers("c" * count, gradient=1)
    ops = (replace(op, seconds=rng.choice((0.1, 1.0, 4.0)), recomputable=False) for op in graph.ops)
    graph = replace(graph, ops=tuple(ops))
    return graph, Codec(rng.choice((15.0, 25.0, 40.0, 60.0)), rng.choice((1.0, 2.0, 4.0, 20.0))), forms_of(graph)


def with_both(forms: dict) -> dict:
    """What a codec makes may go to the host, too."""
    return {t: [*found, *((f"{name}@host", n) for name, n in found if name != "host")] for t, found in forms.items()}


def test_joint_is_the_optimum_of_few_tensors() -> None:
    """Of all subsets, forms, fences and requests, at every budget at which that matters, with a bound that is not above; where
    codec and tier together are allowed they are strictly the best at some budgets, and joint finds that.
    """
    pairs = both = tight = 0
    for seed in range(7):
        graph, link, single = lines(seed)
        plans = [("keep all", keep_all(graph))]
        alone, best = (least_seconds(graph, forms, link) for forms in (single, with_both(single)))
        for peak, seconds in best:
            found = joint.solve_joint(graph, peak, rates=link, forms=with_both(single), plans=plans, limit_seconds=60.0)
            assert found is not None and found.predicted.peak_nbytes <= peak
            assert found.predicted.seconds == pytest.approx(seconds), (seed, peak)
            assert found.bound_seconds <= seconds + 1e-9, (seed, peak)
            tight += found.bound_seconds > seconds / 2 > 0
            pairs += 1
            without = [s for p, s in alone if p <= peak]
            if not without or seconds < min(without) - 1e-9:
                both += 1
                assert any("@" in life.form for life in found.lives), (seed, peak)
    assert pairs > 20 and both > 3 and tight > 2


def test_no_plan_is_below_the_bound() -> None:
    """Of all transfers, where copies hide behind codecs and ops of all lengths and both are dear; at all points of the step."""
    above = pairs = 0
    for seed in range(9):
        graph, link, forms = lines(seed, 3)
        some = {t: [*found[:1], ("block2", 4), ("block2@host", 4)][: 2 + seed % 2] for t, found in forms.items()}
        for peak, seconds in least_seconds(graph, some, link):
            proved = max(Relaxation(graph, p, some, link).dearest(peak)[0] for p in points(graph, peak))
            assert proved <= seconds + 1e-9, (seed, peak)
            pairs += 1
            above += proved > 0
    assert pairs > 20 and above > pairs / 2


def test_the_bound_of_random_steps() -> None:
    """With recomputation, in-place ops and requests out of order: nothing found is below what any point proves."""
    pairs = above = again = 0
    for seed in range(10):
        rng = random.Random(seed)
        graph = timed(random_step(rng, 12))
        link = Codec(rng.choice((0.2, 1.0, 5.0)), rng.choice((0.2, 1.0)))
        forms = with_both(forms_of(graph, rng.random() < 0.5))
        most, least = max(unmodified_levels(graph)), joint.least(graph, (), forms)[0]
        for budget in {least + (most - least) * i // 3 for i in range(3)}:
            found = joint.solve_joint(graph, budget, rates=link, forms=forms, limit_seconds=1.0)
            if found is None:
                continue
            again += found.predicted.rebuilt_ops > 0
            last = max(p for s in graph.saves for p in s.unpacked_at)
            for p in range(0, last, 2):
                proved = proved_at(graph, p, forms, link, budget)
                assert proved <= found.predicted.seconds + 1e-9, (seed, budget, p)
                pairs += 1
                above += proved > 0
    assert pairs > 100 and above > 10 and again > 3, (pairs, above, again)


def proved_at(graph: Graph, point: int, forms: dict, link: Link, budget: int) -> float:
    try:
        return Relaxation(graph, point, forms, link).dearest(budget)[0]
    except ValueError:  # something is needed there that nobody can make
        return 0.0


def test_what_is_not_allowed_stays() -> None:
    """Policies feed joint in the forms that a session allows: another codec for theirs, nothing for what may not go."""
    graph = timed(layers("ccccc"))
    some = {t: found for t, found in forms_of(graph).items() if t % 2}
    found = solved(graph, max(unmodified_levels(graph)) - 50, some, Link())
    assert found is not None
    away = {(life.tensor, life.form, life.parked_nbytes) for life in found.lives if life.how == "fetch"}
    assert all((form, nbytes) in some.get(t, ()) for t, form, nbytes in away)


def test_alexnet_has_the_steps_that_dymem_counts() -> None:
    """23 forward and 23 backward steps (4.3.1)."""
    net = Net(CARD.device, 1.0)
    alexnet(net, 1)
    graph = net.build()
    assert (len(graph.forward), len(graph.ops) - len(graph.forward)) == (23, 23)


def test_what_is_read_first_is_fetched_first() -> None:
    """Whatever their numbers: a link carries one copy after the other."""
    graph, link = timed(layers("cccc")), Link(50.0)
    base = keep_all(graph)
    planner = TripPlanner(graph, base, link)
    by_need = sorted(planner.gaps.values(), key=lambda gap: gap.needed)[1:3]
    at = by_need[0].needed
    lives = send_away(base, [Trip(gap, gap.leaves, at, "host", 100) for gap in by_need])
    schedule = lower(graph, lives)
    assert [step.tensor for step in schedule.segments[at] if isinstance(step, Fetch)] == [gap.tensor for gap in by_need]
    late = send_away(base, [Trip(gap, gap.leaves, gap.needed, "host", 100) for gap in by_need])
    assert price(graph, lives, link).stall_seconds < price(graph, late, link).stall_seconds
