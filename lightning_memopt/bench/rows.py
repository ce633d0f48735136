"""One row of a comparison: a method on a subject, measured against the unmodified step."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

from lightning_memopt.bench.catalogue import Spec
from lightning_memopt.bench.methods import Applied
from lightning_memopt.bench.subject import Outcome, Seconds, Subject
from lightning_memopt.clocks import perf_counter
from lightning_memopt.errors import InfeasibleError, MemOptError

MIB = 2**20
Row = dict[str, Any]
LONGEST_REASON = 300


class Reference:
    """The unmodified step, with which every row is compared.

    repeats: whether two unmodified steps from the same state leave the same bits.
    """

    def __init__(self, subject: Subject) -> None:
        self.outcome: Outcome = subject.outcome()
        self.repeats = not subject.outcome().differs(self.outcome)
        self.flops = subject.flops()
        self.held_nbytes = subject.held_nbytes()
        self.peak_nbytes = subject.peak_nbytes()

    def row(self, subject: Subject) -> Row:
        seconds = [subject.seconds() for _ in range(3)]
        return {
            "method": "unmodified",
            "budget": "",
            "state": "measured",
            "peak_nbytes": self.peak_nbytes,
            "held_nbytes": self.held_nbytes,
            "flops": self.flops,
            "extra_flops": 0.0,
            "exact": "equal" if self.repeats else "differs from itself",
            "step_seconds": statistics.median(each.wall for each in seconds),
        }


def measured(spec: Spec, subject: Subject, reference: Reference, rounds: int) -> Row:
    """The row of this spec, with measurements, or with the reason why there are none. Only an interrupt raises."""
    row: Row = {"method": spec.method, "budget": spec.budget, "at": spec.at}
    began = perf_counter()
    try:
        with spec.opening(subject) as applied:
            row |= _measured(applied, subject, reference, rounds)
        row["state"] = "measured"
    except InfeasibleError as error:
        least = error.smallest_nbytes
        above = f"{(least - subject.held_nbytes()) / MIB:.1f} MiB above what is resident" if least is not None else "not known"
        row |= {"state": "refused", "reason": f"no plan fits; the smallest budget is {above}", "smallest_nbytes": least}
    except MemOptError as error:
        row |= {"state": "refused", "reason": _line(error)}
    except Exception as error:
        row |= {"state": "failed", "reason": said(error)}
    gc.collect()
    return row | {"seconds": perf_counter() - began}


def said(error: Exception) -> str:
    """An error of another library, in one line."""
    return f"{type(error).__name__}: {_line(error)}"


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:LONGEST_REASON]


def _measured(applied: Applied, subject: Subject, reference: Reference, rounds: int) -> Row:
    for _ in range(2):  # the first steps compile, learn or cache
        _step(applied, subject.step)
    difference = _step(applied, subject.outcome).differs(reference.outcome)
    exact = f"differs: {difference}" if difference else "equal"
    if difference and not reference.repeats:
        exact = "not known: the unmodified step differs from itself"
    row: Row = {
        "exact": exact,
        "peak_nbytes": _step(applied, subject.peak_nbytes),
        "extra_flops": _extra_flops(applied, subject, reference),
        "note": applied.note,
    }
    subject.restore()
    return row | _ratios(applied, subject, rounds) | applied.facts()


def _step(applied: Applied, call: Callable[[], Any]) -> Any:
    with applied.with_it():
        return call()


def _extra_flops(applied: Applied, subject: Subject, reference: Reference) -> float | None:
    """Extra FLOPs as a share of those of a step; None if torch's counter knows no FLOPs of the step."""
    if not reference.flops:
        return None
    more = applied.extra_flops
    return (more() if more is not None else _step(applied, subject.flops) - reference.flops) / reference.flops


def _ratios(applied: Applied, subject: Subject, rounds: int) -> Row:
    """Ratios of paired steps: each round has a step with the method and one without it, in alternating order."""
    ratios: list[Seconds] = []
    for turn in range(rounds):
        took: dict[bool, Seconds] = {}
        for with_it in (turn % 2 == 0, turn % 2 != 0):
            with applied.with_it() if with_it else applied.without():
                took[with_it] = subject.seconds()
        ratios.append(Seconds(took[True].wall / took[False].wall, took[True].cpu / took[False].cpu))
    return {
        "rounds": rounds,
        "wall_ratio": _spread([ratio.wall for ratio in ratios]),
        "cpu_ratio": _spread([ratio.cpu for ratio in ratios]),
    }


def _spread(ratios: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"low": low, "median": middle, "high": high}
