"""Which options regions get: a choice that is expected to fit is found wherever one of all choices does."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_memopt.compiled import Halves
from lightning_memopt.session.regions.region_choice import Choice, Eager, Measured, Option, Stage, cheapest, modelled


def stage(options: list[Option], dynamic: bool = False) -> Any:
    region: Any = SimpleNamespace(dynamic=dynamic, checkpointed=False)
    made = Stage(region, 0.0)
    made.__dict__["options"] = options
    return made


def measured(modelled: int, peak: int, chosen: list[int | None], fits: bool = False) -> Measured:
    return Measured(modelled, peak, chosen, fits)


def stages(rng: random.Random) -> list[Any]:
    """Regions with options whose bytes fall while their FLOPs rise."""
    regions = []
    for _ in range(rng.randint(1, 3)):
        saved, flops, options = 1000, 0, []
        for _ in range(rng.randint(1, 5)):
            options.append(Option((), Halves(saved, saved + rng.randint(10, 60)), flops, flops))
            saved, flops = saved - rng.randint(1, 200), flops + rng.randint(0, 50)
        regions.append(stage(options))
    return regions


@pytest.mark.parametrize("seed", range(200))
def test_a_choice_fits_where_any_does_and_costs_little_more_than_the_best(seed: int) -> None:
    rng = random.Random(seed)
    regions = stages(rng)
    choices = list(itertools.product(*(range(len(r.options)) for r in regions)))

    def nbytes(choice: Any) -> int:
        return modelled([r.options[i].halves for r, i in zip(regions, choice, strict=True)])

    def flops(choice: Any) -> int:
        return sum(r.options[i].extra_flops for r, i in zip(regions, choice, strict=True))

    target = rng.randint(min(map(nbytes, choices)), max(map(nbytes, choices)))
    step = Choice(measured=[measured(0, 0, [])], tries=1)
    chosen = cheapest(step, regions, target)
    fitting = [choice for choice in choices if nbytes(choice) <= target]
    smallest = tuple(len(r.options) - 1 for r in regions)
    if smallest in fitting:  # the greatest saving of each region alone
        assert nbytes(chosen) <= target
        pairs = [pair for r in regions for pair in itertools.pairwise([*r.options, r.options[-1]])]
        dearest_step = max(b.extra_flops - a.extra_flops for a, b in pairs)
        assert flops(chosen) <= min(map(flops, fitting)) + len(regions) * dearest_step
    else:
        assert tuple(chosen) == smallest or nbytes(chosen) <= target


@pytest.mark.parametrize("seed", range(200))
def test_regions_and_eager_code_share_the_bytes_in_one_choice(seed: int) -> None:
    """Of all pairs of an eager plan and options that keep the limit, none adds fewer seconds, except for what is missed by
    choosing options one region at a time.
    """
    rng = random.Random(seed)
    regions = stages(rng)
    saved = 0
    seconds = 0.0
    eager = [Eager(0, 0.0)]
    for _ in range(rng.randint(0, 6)):
        saved, seconds = saved + rng.randint(1, 200), seconds + rng.randint(0, 60)
        eager.append(Eager(saved, seconds))
    peak = 5000
    most = modelled([r.options[0].halves for r in regions])
    step = Choice(measured=[Measured(most, peak, [], False, tuple(eager[1:]), flop_seconds=1.0)], tries=1)
    limit = rng.randint(peak - most - saved, peak)
    chosen = step.with_eager(regions, limit)

    def taken(choice: Any) -> int:
        return modelled([r.options[i].halves for r, i in zip(regions, choice, strict=True)])

    def added(choice: Any) -> float:
        """Seconds, with the cheapest eager plan that keeps the limit beside these options."""
        over = peak + taken(choice) - most - limit
        flops = sum(r.options[i].extra_flops for r, i in zip(regions, choice, strict=True))
        return min((flops + plan.extra_seconds for plan in eager if plan.saved_nbytes >= over), default=math.inf)

    choices = list(itertools.product(*(range(len(r.options)) for r in regions)))
    best = min(map(added, choices))
    if best == math.inf:  # what comes nearest
        assert taken(chosen) == min(map(taken, choices)) or taken(chosen) == taken([len(r.options) - 1 for r in regions])
        return
    smallest = [len(r.options) - 1 for r in regions]
    if added(smallest) < math.inf:  # the greatest saving of each region alone
        pairs = [pair for r in regions for pair in itertools.pairwise([*r.options, r.options[-1]])]
        dearest_step = max(b.extra_flops - a.extra_flops for a, b in pairs)
        assert added(chosen) <= best + len(regions) * dearest_step


def test_eager_code_gives_way_first_where_that_is_cheaper() -> None:
    """400 bytes too many. The region saves them for 1 s, the eager code for a tenth of that, or the other way round."""
    for seconds, expected in ((0.1, [0]), (10.0, [1])):
        region, choice = stage(options(1000, 600)), Choice(tries=1)
        choice.measured.append(Measured(1000, 2000, [None], False, (Eager(400, seconds),), flop_seconds=1.0))
        assert choice.with_eager([region], 1600) == expected


def test_without_a_target_all_regions_get_their_smallest_option() -> None:
    regions = stages(random.Random(0))
    assert cheapest(Choice(measured=[measured(0, 0, [])]), regions, None) == [len(r.options) - 1 for r in regions]


def test_measured_steps_correct_the_model() -> None:
    step = Choice(measured=[measured(1000, 5000, [None])])
    assert step.expected(600) == pytest.approx(1.015 * 4600)  # the model, and a little more
    step.tries = 1
    step.measured.append(measured(600, 4800, [1]))  # twice as little came off as modelled
    assert step.expected(400) == pytest.approx(4700)
    assert step.expected(1000) == 5000


def options(*saved_nbytes: int) -> list[Option]:
    return [Option((), Halves(nbytes, nbytes), i, i) for i, nbytes in enumerate(saved_nbytes)]


def compiled_with(region: Any, i: int) -> None:
    region.compile_with(region.choose(i, "signature"))


def test_a_step_that_fits_is_tried_with_more_bytes_and_keeps_what_fitted() -> None:
    """2,000 unplanned; 900 with option 3, which is wasteful in 1,500; 1,600 with option 2: back to 3, and no more."""
    region, choice = stage(options(1000, 800, 400, 100)), Choice(tries=1)
    choice.measured += [measured(1000, 2000, [None]), measured(100, 900, [3], fits=True)]
    compiled_with(region, 3)
    assert choice.better([region], 1500) == [2]
    compiled_with(region, 2)
    choice.measured.append(measured(400, 1600, [2]))
    assert choice.better([region], 1500) == [3]
    compiled_with(region, 3)
    choice.measured.append(measured(100, 900, [3], fits=True))
    assert choice.better([region], 1500) in (None, [3])


def test_between_what_fits_and_what_is_too_large_another_option_is_tried_once() -> None:
    """As above, with option 1 too large: option 2 lies between. Where that is too large, too, the one that fits stays."""
    region, choice = stage(options(1000, 800, 400, 100)), Choice(tries=2)
    choice.measured += [measured(1000, 2000, [None]), measured(100, 900, [3], fits=True), measured(800, 1600, [1])]
    compiled_with(region, 1)
    assert choice.better([region], 1500) == [2]
    compiled_with(region, 2)
    choice.tries = 3
    choice.measured.append(measured(400, 1550, [2]))
    assert choice.better([region], 1500) == [3]
    compiled_with(region, 3)
    choice.tries = 4
    choice.measured.append(measured(100, 900, [3], fits=True))
    assert choice.better([region], 1500) is None


def test_a_shape_only_lowers_what_code_takes_that_serves_other_shapes() -> None:
    """The large batch needs option 2. The small one would be content with keeping all, and gets option 2."""
    region = stage(options(1000, 800, 400, 100), dynamic=True)
    region.wanted["large"] = 2
    small = Choice(signature="small", tries=1, measured=[measured(1000, 500, [None])])
    assert cheapest(small, [region], 10_000) == [2]
    assert cheapest(Choice(signature="large", tries=1, measured=[measured(1000, 500, [None])]), [region], 10_000) == [0]
