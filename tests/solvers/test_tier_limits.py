"""Plans within a limit of a tier: against all subsets, forms, fences and requests of small steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from build import Step
from test_transfer import CONVOLUTION, Codec, every_plan

from lightning_memopt.graph import Graph, unmodified_levels
from lightning_memopt.plan import Life, lower, saved_in_tiers, simulate, validate
from lightning_memopt.solvers import joint, planner
from lightning_memopt.solvers.joint.bound import Relaxation, points
from lightning_memopt.solvers.rollout import keep_all

PIECE = 4096


def line(seed: int, count: int = 3, recomputable: bool = False) -> tuple[Graph, Codec, dict]:
    """A line of layers that save what they read, which can run again or not; sizes are not multiples of a tier's pieces. Each
    tensor may go to the host, or there in half the bytes.
    """
    rng = random.Random(seed)
    step = Step()
    (x,) = step.op(step.given(), makes=(rng.randint(1, 4 * PIECE),), name="input", recomputable=False)
    for _ in range(count):
        makes = (rng.randint(1, 4 * PIECE),)
        seconds = rng.choice((0.1, 1.0, 4.0))
        (x,) = step.op(x, makes=makes, saves=(x,), name=CONVOLUTION, seconds=seconds, recomputable=recomputable)
    graph = step.build(gradient=1)
    made = [t for t in graph.tensors if t.born_at >= 0]
    forms = {t.id: [("host", t.nbytes), ("block16@host", -(-t.nbytes // 2))] for t in made}
    return graph, Codec(rng.choice((1e3, 4e3, 1e4)), rng.choice((1.0, 4.0))), forms


def in_host(lives: tuple[Life, ...]) -> int:
    return saved_in_tiers(lives).get("host", 0)


def plans_of(graph: Graph, forms: dict, link: Codec) -> list[tuple[int, int, float]]:
    """(peak, bytes in the tier, seconds) of every plan."""
    found = []
    for lives in every_plan(graph, forms, link):
        p = simulate(graph, lives, rates=link).predicted
        found.append((p.peak_nbytes, in_host(lives), p.seconds))
    return found


def test_pieces_of_a_tier_are_counted_once_for_each_tensor() -> None:
    def fetched(tensor: int, at: int, form: str, nbytes: int) -> Life:
        return Life(tensor=tensor, born_at=at, freed_at=at, how="fetch", form=form, parked_nbytes=nbytes)

    twice = fetched(0, 1, "host", 1), fetched(0, 5, "host", 1)
    lives = (*twice, fetched(1, 2, "block8@disk", PIECE + 1), fetched(2, 1, "bools", 9))
    assert saved_in_tiers(lives) == {"host": PIECE, "disk": 2 * PIECE}


@pytest.mark.parametrize(("count", "seeds"), [(2, 16), (3, 5)])
def test_joint_finds_plans_within_every_limit(count: int, seeds: int) -> None:
    """Of all plans, at the budgets and limits at which that matters: of two tensors never a slower one, of three always one.
    The bound is not above the best.
    """
    pairs = binding = above = none = 0
    for seed in range(seeds):
        graph, link, forms = line(seed, count)
        plans = plans_of(graph, forms, link)
        known = [("keep all", keep_all(graph))]
        for budget in sorted({peak for peak, _, _ in plans})[::count]:
            free = min(seconds for peak, _, seconds in plans if peak <= budget)
            for limit in sorted({nbytes for peak, nbytes, _ in plans if peak <= budget}):
                best = min(seconds for peak, nbytes, seconds in plans if peak <= budget and nbytes <= limit)
                limits = {"host": limit}
                found = joint.solve_joint(graph, budget, rates=link, forms=forms, plans=known, limits=limits)
                assert found is not None, (seed, budget, limit)
                assert in_host(found.lives) <= limit and found.predicted.peak_nbytes <= budget
                assert count > 2 or found.predicted.seconds <= best + 1e-9, (seed, budget, limit)
                assert found.bound_seconds <= min(best, found.predicted.seconds) + 1e-9, (seed, budget, limit)
                assert validate(graph, found.lives, lower(graph, found.lives)).ok
                pairs += 1
                binding += best > free + 1e-9
                for p in points(graph, budget):
                    proved = Relaxation(graph, p, forms, link, limits).dearest(budget)[0]
                    without = Relaxation(graph, p, forms, link).dearest(budget)[0]
                    assert without <= proved * (1 + 1e-3) + 1e-9 and proved <= best + 1e-9
                    above += proved > 0
            least = min(nbytes for peak, nbytes, _ in plans if peak <= budget)
            if least:
                limits = {"host": least - 1}
                assert joint.solve_joint(graph, budget, rates=link, forms=forms, plans=known, limits=limits) is None
                none += 1
    assert pairs > 60 and binding > 3 and above > 60 and none > 15, (pairs, binding, above, none)


def test_a_limit_makes_the_bound_tighter() -> None:
    """Where ops can run again. With nothing in the tier, the bound is that of plans that only rebuild; more in the tier never
    makes it larger; no plan that is found is below it.
    """
    tighter = pairs = 0
    for seed in range(12):
        graph, link, forms = line(seed, 5, recomputable=True)
        link = replace(link, rate=100 * link.rate)
        none = {t: () for t in forms}
        solved = planner.solve(graph)
        plans = [(c.solver, c.lives) for c in solved.candidates]
        for candidate in solved.candidates[:-1]:
            budget = candidate.predicted.peak_nbytes
            for p in points(graph, budget):
                proved = [Relaxation(graph, p, forms, link, {"host": n}).dearest(budget)[0] for n in (0, PIECE, 1 << 40)]
                rebuilding, free = (Relaxation(graph, p, each, link).dearest(budget)[0] for each in (none, forms))
                assert proved[0] == pytest.approx(rebuilding, rel=2e-3, abs=1e-6)
                assert proved[2] == pytest.approx(free, rel=2e-3, abs=1e-6)
                assert proved[0] >= proved[1] * (1 - 2e-3) - 1e-6 and proved[1] >= proved[2] * (1 - 2e-3) - 1e-6
                tighter += proved[0] > 1.1 * proved[2] + 1e-6
                pairs += 1
            for limit in (0, PIECE, 3 * PIECE):
                limits = {"host": limit}
                found = joint.solve_joint(graph, budget, rates=link, forms=forms, plans=plans, limit_seconds=1.0, limits=limits)
                assert found is not None and in_host(found.lives) <= limit
                assert found.bound_seconds <= found.predicted.seconds * (1 + 1e-9) + 1e-9
                assert found.predicted.seconds <= candidate.predicted.seconds
    assert pairs > 30 and tighter > 10, (pairs, tighter)


def test_the_smallest_plan_within_a_limit_is_the_smallest_of_all() -> None:
    sizes = set()
    for seed in range(8):
        graph, link, forms = line(seed, 4)
        plans = plans_of(graph, {t: f[:1] for t, f in forms.items()}, link)  # every_plan takes long with more forms
        for limit in sorted({nbytes for _, nbytes, _ in plans}):
            least, lives = joint.least(graph, (), {t: f[:1] for t, f in forms.items()}, None, {"host": limit})
            assert in_host(lives) <= limit
            assert least == simulate(graph, lives).predicted.peak_nbytes
            assert least == min(peak for peak, nbytes, _ in plans if nbytes <= limit)
            sizes.add((seed, least))
    assert len(sizes) > 20


def test_the_fewest_bytes_of_a_tier_are_the_fewest_of_all() -> None:
    some = 0
    for seed in range(8):
        graph, link, forms = line(seed)
        plans = plans_of(graph, forms, link)
        for budget in sorted({peak for peak, _, _ in plans}):
            lives = joint.fewest_in_tier(graph, (), forms, budget, "host")
            assert lives is not None and simulate(graph, lives).predicted.peak_nbytes <= budget
            assert in_host(lives) == min(nbytes for peak, nbytes, _ in plans if peak <= budget)
            some += in_host(lives) > 0
        assert joint.fewest_in_tier(graph, (), forms, min(peak for peak, _, _ in plans) - 1, "host") is None
    assert some > 50


def test_a_limit_of_one_tier_leaves_the_other_free() -> None:
    graph, link, forms = line(3)
    both = {t: [*f, ("disk", graph.tensors[t].nbytes)] for t, f in forms.items()}
    budget = joint.least(graph, (), both)[0]
    assert budget < max(unmodified_levels(graph))
    for limits in ({"host": 0}, {"disk": 0}, {"host": PIECE, "disk": 1 << 40}):
        found = joint.solve_joint(graph, budget, rates=link, forms=both, limits=limits)
        assert found is not None
        assert all(saved_in_tiers(found.lives).get(tier, 0) <= most for tier, most in limits.items())
    nothing = dict.fromkeys(("host", "disk"), 0)
    assert joint.solve_joint(graph, budget, rates=link, forms=both, limits=nothing) is None
    assert joint.least(graph, (), both, None, nothing)[0] == max(unmodified_levels(graph))


def test_a_plan_beside_a_limit_may_still_encode() -> None:
    """The limit is of the tier: what is encoded on the device takes none of it."""
    graph, _, forms = line(1)
    coded = {t: [*f, ("block8", -(-graph.tensors[t].nbytes // 4))] for t, f in forms.items()}
    least = joint.least(graph, (), coded, None, {"host": 0})
    assert least[0] < max(unmodified_levels(graph)) and in_host(least[1]) == 0
    assert {life.form for life in least[1] if life.how == "fetch"} == {"block8"}


def test_equal_ops_of_any_size() -> None:
    """Bytes of a tier beside those of the device: no overflow where both are large."""
    graph, _, forms = line(2)
    graph = replace(graph, tensors=tuple(replace(t, nbytes=t.nbytes << 30) for t in graph.tensors))
    forms = {t: [(form, n << 30) for form, n in f] for t, f in forms.items()}
    limit = in_host(joint.least(graph, (), forms)[1]) // 2
    least, lives = joint.least(graph, (), forms, None, {"host": limit})
    assert 0 < in_host(lives) <= limit and least < max(unmodified_levels(graph))
