"""What came of a script's runs: exact or not, the budget kept or not, silent or not. Plain data in, plain data out.

The budgets are those of the plain run: its true peak, and what is there between its steps with half of what a step has on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Outcome = dict[str, Any]
Run = Callable[[int | str | None], Outcome]
BUDGETS = ("100 %", "half", "min")
_PROGRESS = tuple(
    f"MemOpt: {text}"
    for text in (
        "observing ",
        "solving for ",
        " ",
        "plan in force",
        "the step does not fit",
        "parameters are updated",
        "no saved tensor is parked",
        "parked between updates",
        "on the device only while",
        "optimizer state",
        "gradients",
        "weights",
    )
)
"""Lines that say what is being done, or what is not moved, never why there is no plan."""
_NOTICED = ("was measured at", "left the plan")
"""Lines that say of a step that it was larger than planned, or another one."""
_NOT_KEPT = ("the budget is not kept", "no smaller plan exists")
"""Lines that say that no plan keeps the budget, why, and what to do."""
_BETWEEN = "between an update and the next forward"
"""Of a line that says that there was more between two steps than the budget: no plan changes that."""
_STAYS = {"state": "MemOpt: optimizer state ", "gradients": "MemOpt: gradients ", "weights": "MemOpt: weights "}
"""What rests -> how a line begins that says why some of it is not parked."""
_SLIGHT, _SLIGHT_NBYTES = 0.02, 1 << 14
"""The smallest plan promises no budget; its prediction is right where a step takes no more than this share of it, or so many
bytes, on top."""
OBSERVED_SHARE, _OBSERVED_NBYTES = 1.1, 1 << 15
"""A step without a plan may take this share of the same step of the plain run, or the budget, and these bytes on top: each
random op that is observed keeps the state of a generator, 5,056 bytes."""
_TRIES = 4
RESTS = (
    "parked",
    "parkable",
    "away",
    *(f"{what}_{how}" for what in ("gradients", "weights") for how in ("parked", "away", "unknown", "missing")),
)
"""Bytes of the last planned step (loops_rest.py). Of state: what its plan parks, what can be parked, and what is away. Of
gradients and frozen weights: what its plan parks, what is away, what no plan was offered, and what the plan parks and is not
away."""


def different(plain: Outcome, ours: Outcome) -> list[str]:
    """Where the results of two runs differ: losses by step, then what was returned by name, then generators."""
    found = [f"loss of step {i}" for i, (a, b) in enumerate(zip(plain["losses"], ours["losses"], strict=False)) if a != b]
    if len(plain["losses"]) != len(ours["losses"]):
        found.append(f"{len(ours['losses'])} steps instead of {len(plain['losses'])}")
    for key in ("state", "generators"):
        found += _unequal(plain[key], ours[key], key)
    return found


def _unequal(one: Any, other: Any, name: str) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in _unequal(one[key], other[key], f"{name}.{key}")]
    return [] if one == other else [name]


def sizes(plain: Outcome) -> tuple[int, int] | None:
    """The plain run's peak, and the most that was there between its steps; None where nothing was counted."""
    if any(step["peak"] is None for step in plain["steps"]):
        return None
    return max(step["peak"] for step in plain["steps"]), max(step["began"] for step in plain["steps"])


def examine(run: Run, names: Sequence[str] = BUDGETS) -> dict[str, Any]:
    """All runs of one script: the plain one, and one for each budget of `names`, repeated with the number that a refusal
    names.
    """
    plain = run(None)
    if plain["status"] != "trained":
        return {"status": "does not train plainly", "error": plain["error"], "traceback": plain.get("traceback"), "runs": {}}
    counted = sizes(plain)
    if counted is None:
        return {"status": "not counted", "error": "no compiler: nothing counts the allocator's bytes", "runs": {}}
    peak, resident = counted
    budgets: dict[str, int | str] = {"100 %": peak, "half": resident + (peak - resident) // 2, "min": "min"}
    runs = {name: within(run, plain, budgets[name]) for name in names}
    return {
        "status": "ok" if all(not found["faults"] for found in runs.values()) else "faulty",
        "peak": peak,
        "resident": resident,
        "seconds": plain["seconds"],
        "runs": runs,
    }


def within(run: Run, plain: Outcome, budget: int | str) -> dict[str, Any]:
    """The run within a budget, or within the one that its refusal names."""
    tried: list[int | str] = [budget]
    ours = run(budget)
    while ours["status"] == "refused" and ours["smallest"] is not None and len(tried) <= _TRIES:
        tried.append(ours["smallest"])
        ours = run(ours["smallest"])
    return judge(plain, ours, tried)


def judge(plain: Outcome, ours: Outcome, tried: list[int | str]) -> dict[str, Any]:
    """One row: `tried` are the budgets in turn, of which all but the last were refused. `faults` is empty where all is well."""
    budget = tried[-1]
    row: dict[str, Any] = {"budgets": tried, "refusals": len(tried) - 1, "said": ours["said"], "faults": []}
    faults: list[str] = row["faults"]
    if len(tried) > 2:
        faults.append(f"refused {len(tried) - 1} times")
    if ours["status"] == "refused":
        return row | {"faults": [*faults, "refused at last"], "error": ours["error"]}
    if ours["status"] == "crashed":
        return row | {"faults": [*faults, "crashed"], "error": ours["error"], "traceback": ours["traceback"]}
    unequal = different(plain, ours)
    planned = [step for step in ours["steps"] if step["predicted"] is not None]
    promises = [_smallest(step["promised"]) if budget == "min" else budget for step in planned]
    over = [step["peak"] - promise for step, promise in zip(planned, promises, strict=True)]
    pairs = zip(plain["steps"], ours["steps"], strict=False)
    observed = [(step["peak"], before["peak"]) for before, step in pairs if step["predicted"] is None]
    explained = any(not line.startswith(_PROGRESS) for line in ours["said"])
    row |= {
        "exact": not unequal,
        "different": unequal[:8],
        "planned_steps": len(planned),
        "dropped": max((step["dropped"] for step in planned), default=0),
        **{name: planned[-1][name] if planned else 0 for name in RESTS},
        "predicted": max((step["predicted"] for step in planned), default=None),
        "measured": max((step["peak"] for step in planned), default=None),
        "measured_by_session": ours["measured_by_session"],
        "over": max(over, default=None),
        "observed": max((peak / before for peak, before in observed), default=None),
        "between": max(step["between"] for step in ours["steps"]),
        "steps_over": sum(excess > 0 for excess in over),
        "not_kept_said": any(text in line for line in ours["said"] for text in _NOT_KEPT),
        "solves": ours["solves"],
        "solve_seconds": round(ours["solve_seconds"], 2),
        "seconds": round(ours["seconds"], 2),
        "noise": [line for line in ours["output"] if line not in plain["output"]][:3],
        "report": [report.splitlines()[0] if report.startswith("MemOpt: ") else "a table" for report in ours["reports"]],
        "steps": len(ours["steps"]),
        "peaks": " ".join(f"{step['peak']}/{step['predicted']}" for step in ours["steps"]),
    }
    if unequal:
        faults.append("not exact")
    noticed = sum(any(text in line for text in _NOTICED) for line in ours["said"])
    # a step unlike all before is not foreseen, but noticed; where nobody named a budget, the prediction becomes right again
    broken = planned and (over[-1] > 0 or (budget != "min" and row["steps_over"] > noticed))
    if broken and not row["not_kept_said"]:
        faults.append("budget broken")
    limit = budget if isinstance(budget, int) else 0
    if any(peak > max(OBSERVED_SHARE * before, limit) + _OBSERVED_NBYTES for peak, before in observed):
        faults.append("observed step too large")
    between = max((step["between"] for step in planned), default=0)
    if between > limit > 0 and not row["not_kept_said"] and not any(_BETWEEN in line for line in ours["said"]):
        faults.append("more between steps, silent")
    if not planned and not explained:
        faults.append("silent")
    silent = [what for what, begin in _STAYS.items() if not any(line.startswith(begin) for line in ours["said"])]
    # the plan of "min" may take slightly more than the smallest one, if it parks less
    slight = max((_smallest(step["promised"]) - step["promised"] for step in planned), default=0)
    due = {
        "state": (row["parkable"] - slight if budget == "min" else min(row["parkable"], row["parked"])) - row["away"],
        "gradients": row["gradients_missing"] + (row["gradients_unknown"] if budget == "min" else 0),
        "weights": row["weights_missing"] + (row["weights_unknown"] if budget == "min" else 0),
    }
    faults += [f"{what} not parked, silent" for what in silent if due[what] > 0]
    return row


def prediction_error(row: dict[str, Any]) -> float | None:
    """The largest measured peak of the planned steps against the largest predicted one; None without a plan."""
    predicted, measured = row.get("predicted"), row.get("measured")
    return None if not predicted else measured / predicted - 1


def _smallest(promised: int) -> int:
    return promised + max(int(_SLIGHT * promised), _SLIGHT_NBYTES)


def why_no_plan(row: dict[str, Any]) -> str:
    """The first line that does not show progress; empty where there is none."""
    return next((line.removeprefix("MemOpt: ") for line in row["said"] if not line.startswith(_PROGRESS)), "")
