"""A sequence of layers that a user describes by numbers: read it, refuse it if something is wrong, and plan it.

In: `{"stages": [{...}, ...]}` with the keys of `KEYS` (seconds and bytes). Out: a `SequenceResult`: status, total
seconds, peak bytes, the checkpoint tree and its operations in the words of the source (F_none, F_ck, F_all, B).

The semantics are those of Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous
chains" (2019). For stage k with input x_k and output x_{k+1}:

    F_none, F_ck   input + output + forward workspace; F_ck keeps the input afterwards
    F_all          input + saved + forward workspace; keeps input and saved (the output is part of saved)
    B              gradient of the output + saved + input + gradient of the input + backward workspace

The gradient of the input is `grad_nbytes` of the predecessor, 0 for the first stage. The gradient of stage t's output
is there during every forward operation before B_t; as in the source this includes the user's own forward, before the
last stage's backward, although a framework makes that gradient later. The chain's input counts as part of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lightning_memopt.clocks import perf_counter
from lightning_memopt.errors import ChainError
from lightning_memopt.solvers.chain import (
    Chain,
    ChainTable,
    CheckpointTree,
    Option,
    Stage,
    minimum_budget,
    operations,
    simulate,
    smallest_tree,
    solve_chain,
)
from lightning_memopt.units import ceil_div

SECONDS_KEYS = ("forward_seconds", "backward_seconds")
NBYTES_KEYS = (
    "input_nbytes",
    "output_nbytes",
    "saved_nbytes",
    "grad_nbytes",
    "forward_workspace_nbytes",
    "backward_workspace_nbytes",
)
KEYS = SECONDS_KEYS + NBYTES_KEYS
OPTIONAL_KEYS = ("name",)

_EXACT_CELLS = 1 << 24  # up to this size of the table, the largest bucket that loses nothing is used
_BUCKETS = 1024
_MOST_CELLS = 1 << 29  # the largest table of a retry with finer buckets (2 GiB of float32, of which half is touched)


class Status(Enum):
    """How a plan was found; the value says what it means."""

    OPTIMAL = "least seconds among memory-persistent schedules, within one bucket per size"
    FEASIBLE = "fits the budget, but is so close to the smallest that no bucket tried can tell if it is the fastest"
    INFEASIBLE = "no schedule fits; smallest_budget_nbytes is the smallest budget that does"


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """A plan for a sequence. If infeasible, its seconds are infinite, its peak is 0, and it has no tree and no operations.

    `total_seconds` counts every forward and backward once, and all reruns. `operations` can be written as JSON.
    """

    status: Status
    total_seconds: float
    peak_nbytes: int
    bucket_nbytes: int
    solve_seconds: float
    smallest_budget_nbytes: int
    tree: CheckpointTree | None
    operations: tuple[tuple[str, int], ...]


def chain_from_dict(data: Mapping[str, Any]) -> Chain:
    """The chain of a sequence, with one option per stage (F_all). Raises ChainError, which names the stage and both numbers."""
    rows = _checked(data)
    stages = []
    for index, row in enumerate(rows):
        gradient_in = rows[index - 1]["grad_nbytes"] if index else 0
        forward_all = row["saved_nbytes"] + row["forward_workspace_nbytes"]
        backward = row["grad_nbytes"] + row["saved_nbytes"] + gradient_in + row["backward_workspace_nbytes"]
        keep_all = Option(
            name="F_all",
            held_nbytes=row["saved_nbytes"] - row["output_nbytes"],
            rerun_seconds=row["forward_seconds"],
            rebuild_seconds=0.0,
            forward_peak_nbytes=forward_all,
            backward_peak_nbytes=backward,
        )
        stages.append(
            Stage(
                name=str(row.get("name", index)),
                input_nbytes=row["input_nbytes"],
                sweep_seconds=row["forward_seconds"],
                sweep_peak_nbytes=row["output_nbytes"] + row["forward_workspace_nbytes"],
                rebuild_seconds=row["forward_seconds"],
                rebuild_peak_nbytes=max(row["grad_nbytes"] + forward_all, backward),
                forward_base_nbytes=rows[-1]["grad_nbytes"],
                backward_base_nbytes=row["grad_nbytes"],
                options=(keep_all,),
            )
        )
    return Chain(tuple(stages))


def base_seconds(data: Mapping[str, Any]) -> float:
    """Seconds of every forward and every backward, once."""
    return math.fsum(row[key] for row in _checked(data) for key in SECONDS_KEYS)


def solve_sequence(data: Mapping[str, Any], budget_nbytes: int, bucket_nbytes: int | None = None) -> SequenceResult:
    """Plan the sequence within `budget_nbytes`, which counts everything including the chain's input.

    Without `bucket_nbytes`, the bucket is the largest one that loses nothing if the table stays small, else the budget divided
    by 1024. If rounding makes a feasible budget infeasible, smaller buckets are tried. If they do not help, the result is the
    schedule of the smallest budget, with status FEASIBLE. Raises ChainError for a bad sequence or number.
    """
    for key, value, least in (("budget_nbytes", budget_nbytes, 0), ("bucket_nbytes", bucket_nbytes, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ChainError(f"{key} is {value!r}: give an int of at least {least}")
    start = perf_counter()
    chain = chain_from_dict(data)
    smallest = minimum_budget(chain)
    if budget_nbytes < smallest:
        spent = perf_counter() - start
        bucket = bucket_nbytes or _first_bucket(chain, budget_nbytes)
        return SequenceResult(Status.INFEASIBLE, math.inf, 0, bucket, spent, smallest, None, ())

    table = _finest_needed(chain, budget_nbytes, bucket_nbytes or _first_bucket(chain, budget_nbytes))
    solved = math.isfinite(table.seconds(budget_nbytes))
    tree = table.tree(budget_nbytes) if solved else smallest_tree(chain)
    extra_seconds, peak_nbytes = simulate(chain, tree)
    return SequenceResult(
        status=Status.OPTIMAL if solved else Status.FEASIBLE,
        total_seconds=base_seconds(data) + extra_seconds,
        peak_nbytes=peak_nbytes,
        bucket_nbytes=table.grid.bucket_nbytes,
        solve_seconds=perf_counter() - start,
        smallest_budget_nbytes=smallest,
        tree=tree,
        operations=sequence_operations(tree),
    )


def sequence_operations(tree: CheckpointTree) -> tuple[tuple[str, int], ...]:
    """The operations of a tree in the words of the source: ("F_ck", 0), ("F_none", 1), ("F_all", 2), ("B", 2), ..."""
    words = {"keep": "F_ck", "forget": "F_none", "hold": "F_all", "rebuild": "F_all", "backward": "B"}
    return tuple((words[operation[0]], operation[1]) for operation in operations(tree))


def _first_bucket(chain: Chain, budget_nbytes: int) -> int:
    """The largest bucket that rounds nothing, if its table is small; else the budget divided by `_BUCKETS`."""
    exact = 0
    for stage in chain.stages:
        exact = math.gcd(exact, stage.input_nbytes, *(option.held_nbytes for option in stage.options))
    exact = max(1, exact)
    if (budget_nbytes // exact + 1) * len(chain.stages) ** 2 <= _EXACT_CELLS:
        return exact
    return max(1, ceil_div(budget_nbytes, _BUCKETS))


def _finest_needed(chain: Chain, budget_nbytes: int, bucket_nbytes: int) -> ChainTable:
    """The table of the first bucket in which the budget is feasible. Each bucket that is tried is a quarter of the one
    before.
    """
    while True:
        table = solve_chain(chain, budget_nbytes, bucket_nbytes=bucket_nbytes)
        if math.isfinite(table.seconds(budget_nbytes)) or bucket_nbytes == 1:
            return table
        bucket_nbytes = max(1, bucket_nbytes // 4)
        if (budget_nbytes // bucket_nbytes + 1) * len(chain.stages) ** 2 > _MOST_CELLS:
            return table


def _checked(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The rows of a sequence, or ChainError."""
    if not isinstance(data, Mapping) or set(data) != {"stages"}:
        keys = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise ChainError(f'a sequence is an object with the one key "stages", found {keys}: rename or remove keys')
    rows = data["stages"]
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)) or not rows:
        raise ChainError(f'"stages" must be a list of at least 1 stage, found {rows!r}: add the stages in forward order')
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ChainError(f"stage {index} is {row!r}, must be an object: give it the keys {', '.join(KEYS)}")
        missing = sorted(set(KEYS) - set(row))
        unknown = sorted(map(str, set(row) - set(KEYS) - set(OPTIONAL_KEYS)))
        if missing or unknown:
            raise ChainError(f"stage {index}: missing keys {missing}, unknown keys {unknown}: add the first, remove the second")
        for key in KEYS:
            _check_value(index, key, row[key])
        if row["saved_nbytes"] < row["output_nbytes"]:
            raise ChainError(
                f"stage {index}: saved_nbytes is {row['saved_nbytes']}, below output_nbytes {row['output_nbytes']}; "
                "saved_nbytes includes the output, so add it"
            )
        if index and row["input_nbytes"] != rows[index - 1]["output_nbytes"]:
            raise ChainError(
                f"stage {index}: input_nbytes is {row['input_nbytes']}, but output_nbytes of stage {index - 1} is "
                f"{rows[index - 1]['output_nbytes']}: a stage reads its predecessor's output, so make them equal"
            )
    return rows


def _check_value(index: int, key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ChainError(
            f"stage {index}: {key} is {value!r}, must be a number: give {'seconds' if key in SECONDS_KEYS else 'bytes'}"
        )
    if not math.isfinite(value) or value < 0:
        raise ChainError(f"stage {index}: {key} is {value!r}, must be finite and at least 0: measure it again")
    if key in NBYTES_KEYS and not isinstance(value, int):
        raise ChainError(f"stage {index}: {key} is {value!r}, must be a whole number of bytes: write it as an int")
