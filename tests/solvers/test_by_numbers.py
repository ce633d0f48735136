"""A sequence given by numbers: reading, refusing, planning, and the baselines it must never lose to."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from schedules import BASELINES, baselines, periodic

from lightning_memopt.errors import ChainError
from lightning_memopt.solvers.chain import minimum_budget, simulate, solve_chain
from lightning_memopt.solvers.chain.by_numbers import Status, base_seconds, chain_from_dict, solve_sequence


def random_sequence(rng: random.Random, length: int, unit: int = 1) -> dict[str, Any]:
    sizes = [rng.randint(1, 9) * unit for _ in range(length + 1)]
    return {
        "stages": [
            {
                "forward_seconds": rng.randint(1, 9),
                "backward_seconds": rng.randint(1, 18),
                "input_nbytes": sizes[k],
                "output_nbytes": sizes[k + 1],
                "saved_nbytes": sizes[k + 1] + rng.randint(0, 20) * unit,
                "grad_nbytes": sizes[k + 1],
                "forward_workspace_nbytes": rng.randint(0, 4) * unit,
                "backward_workspace_nbytes": rng.randint(0, 6) * unit,
            }
            for k in range(length)
        ]
    }


TWO = {
    "stages": [
        dict(forward_seconds=1.0, backward_seconds=2.0, input_nbytes=10, output_nbytes=20, saved_nbytes=50,
             grad_nbytes=20, forward_workspace_nbytes=3, backward_workspace_nbytes=4),
        dict(forward_seconds=5.0, backward_seconds=7.0, input_nbytes=20, output_nbytes=1, saved_nbytes=6,
             grad_nbytes=1, forward_workspace_nbytes=0, backward_workspace_nbytes=2, name="head"),
    ]
}  # fmt: skip


def test_two_stages_by_hand() -> None:
    # Keep all: F_all 0 takes 1 + 10 + 50 + 3 = 64, F_all 1 takes 1 + 10 + 50 + 6 = 67, B 1 takes
    # 10 + 30 (held of 0) + 20 + 1 + 6 + 20 + 2 = 89, B 0 takes 10 + 20 + 50 + 0 + 4 = 84.
    # Replay: F_ck 0 takes 1 + 10 + 20 + 3 = 34, B 1 takes 10 + 20 + 1 + 6 + 20 + 2 = 59, F_all 0 20 + 10 + 50 + 3 = 83.
    assert baselines(TWO)["keep-all"] == (15.0, 89)
    assert baselines(TWO)["every-boundary"] == (16.0, 84)
    kept = solve_sequence(TWO, 89)
    assert (kept.status, kept.total_seconds, kept.peak_nbytes) == (Status.OPTIMAL, 15.0, 89)
    assert kept.operations == (("F_all", 0), ("F_all", 1), ("B", 1), ("B", 0))
    tight = solve_sequence(TWO, 88)
    assert (tight.status, tight.total_seconds, tight.peak_nbytes) == (Status.OPTIMAL, 16.0, 84)
    assert tight.operations == (("F_ck", 0), ("F_all", 1), ("B", 1), ("F_all", 0), ("B", 0))
    assert json.loads(json.dumps(tight.operations))[0] == ["F_ck", 0]
    none = solve_sequence(TWO, 83)
    assert (none.status, none.smallest_budget_nbytes) == (Status.INFEASIBLE, 84)


@pytest.mark.parametrize("length", [1, 2, 5, 12, 20])
def test_never_worse_than_a_baseline_at_its_own_peak(length: int) -> None:
    rng = random.Random(length)
    for unit in (1, 1 << 20):
        data = random_sequence(rng, length, unit)
        for name, (seconds, peak_nbytes) in baselines(data).items():
            result = solve_sequence(data, peak_nbytes)
            assert result.status is Status.OPTIMAL, name
            assert result.total_seconds <= seconds, name
            assert result.peak_nbytes <= peak_nbytes, name


def test_baselines_cost_what_they_should() -> None:
    data = random_sequence(random.Random(4), 10)
    forward = [row["forward_seconds"] for row in data["stages"]]
    found = baselines(data)
    base = base_seconds(data)
    assert set(found) == set(BASELINES)
    assert found["keep-all"][0] == base
    assert found["every-boundary"][0] == base + sum(forward[:-1])
    assert found["from-input"][0] == base + sum(sum(forward[: k + 1]) for k in range(9))
    assert found["square-root"][0] == base + sum(forward[:8])
    assert found["square-root"][1] < found["keep-all"][1]
    assert simulate(chain_from_dict(data), periodic(10, 3))[0] == sum(forward[:9])


def test_the_named_smallest_budget_works() -> None:
    rng = random.Random(8)
    for bucket in (None, 1, 17, 1000, 1 << 22):
        for _ in range(3):
            data = random_sequence(rng, rng.randint(1, 9), unit=rng.choice([1, 37, 4097]))
            smallest = solve_sequence(data, 0, bucket).smallest_budget_nbytes
            result = solve_sequence(data, smallest, bucket)
            assert result.status is not Status.INFEASIBLE
            assert result.peak_nbytes <= smallest
            assert solve_sequence(data, smallest - 1, bucket).status is Status.INFEASIBLE


def test_where_no_bucket_can_help_the_smallest_schedule_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_memopt.solvers.chain import by_numbers

    monkeypatch.setattr(by_numbers, "_MOST_CELLS", 0)
    data = random_sequence(random.Random(21), 12, unit=4097)
    smallest = minimum_budget(chain_from_dict(data))
    result = solve_sequence(data, smallest, bucket_nbytes=smallest)
    assert (result.status, result.peak_nbytes) == (Status.FEASIBLE, smallest)


def test_the_default_bucket_of_round_sizes_loses_nothing() -> None:
    data = random_sequence(random.Random(9), 9, unit=1 << 20)
    chain = chain_from_dict(data)
    budget = minimum_budget(chain) + (5 << 20) + 12345
    result = solve_sequence(data, budget)
    assert result.bucket_nbytes % (1 << 20) == 0
    exact = solve_chain(chain, budget, bucket_nbytes=1 << 16)
    assert result.total_seconds == pytest.approx(base_seconds(data) + exact.seconds(budget))


def spoiled(**changes: object) -> dict[str, Any]:
    rows = [dict(row) for row in TWO["stages"]]
    for key, value in changes.items():
        if value is KeyError:
            del rows[1][key]
        else:
            rows[1][key] = value
    return {"stages": rows}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (spoiled(input_nbytes=21), "stage 1: input_nbytes is 21, but output_nbytes of stage 0 is 20"),
        (spoiled(saved_nbytes=0), "stage 1: saved_nbytes is 0, below output_nbytes 1"),
        (spoiled(grad_nbytes=KeyError), r"stage 1: missing keys \['grad_nbytes'\]"),
        (spoiled(colour=1), r"stage 1: .*unknown keys \['colour'\]"),
        (spoiled(grad_nbytes=-1), "stage 1: grad_nbytes is -1"),
        (spoiled(forward_seconds=math.nan), "stage 1: forward_seconds is nan"),
        (spoiled(forward_seconds=math.inf), "stage 1: forward_seconds is inf"),
        (spoiled(grad_nbytes=True), "stage 1: grad_nbytes is True"),
        (spoiled(grad_nbytes="1"), "stage 1: grad_nbytes is '1'"),
        (spoiled(grad_nbytes=1.5), "stage 1: grad_nbytes is 1.5"),
        ({"stages": []}, "at least 1 stage"),
        ({"stages": [3]}, "stage 0 is 3"),
        ({}, "stages"),
        ([], "stages"),
        ({"stages": TWO["stages"], "more": 1}, "more"),
    ],
)
def test_refusals(data: Any, message: str) -> None:
    with pytest.raises(ChainError, match=message):
        chain_from_dict(data)


@pytest.mark.parametrize(("budget", "bucket"), [(-1, None), (1.5, None), (True, None), (10, 0)])
def test_refuses_bad_budgets(budget: Any, bucket: Any) -> None:
    with pytest.raises(ChainError, match="give an int"):
        solve_sequence(TWO, budget, bucket)
