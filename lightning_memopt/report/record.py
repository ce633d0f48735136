"""The record of a run, as data and as a file. The page of a report (`report/page`) is made from it.

`{"format": "lightning_memopt.run", "schema": 1, ...}`. It contains the plan and its graph as a plan file does, and they are
checked as those of a plan file. All other fields are checked, too. Unknown amounts are null; in columns, unknown bytes are -1
and unknown seconds 0.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

from lightning_memopt import jsonio
from lightning_memopt.errors import PlanFileError
from lightning_memopt.graph import Graph
from lightning_memopt.graph.fields import Fields, letters
from lightning_memopt.graph.json_io import graph_from_json, graph_to_json
from lightning_memopt.plan import Plan, plan_from_json, plan_to_json
from lightning_memopt.plan.files import FORMAT as PLAN_FORMAT
from lightning_memopt.plan.rates import MachineRates
from lightning_memopt.report.frontier import Row
from lightning_memopt.runtime.pool import PoolStatus
from lightning_memopt.session import Phase, Transfers
from lightning_memopt.session.history import StepEntry, StepKind
from lightning_memopt.telemetry import Throughput
from lightning_memopt.telemetry.throughput import throughput_of

FORMAT = "lightning_memopt.run"
SCHEMA = 1

_TEXTS = ("model", "device", "torch", "phase", "reason", "remedy", "error", "compiled")
_AMOUNTS = ("budget_nbytes", "measured_peak_nbytes")
_KEYS = (
    *("format", "schema", *_TEXTS, *_AMOUNTS, "rank", "ranks", "replans", "deviates", "checkpointed"),
    *("plan", "graph", "frontier", "steps", "rates", "transfers", "pool", "throughput", "before"),
)
_FRONTIER = ("peak_nbytes", "extra_seconds", "extra_flops", "rebuilt_nbytes", "solvers", "solver")
_STEPS = ("kind", "steps", "seconds", "predicted_nbytes", "measured_nbytes")
_TRANSFERS = ("forwards", "moved_nbytes", "timed", "copied_seconds", "waited_seconds", "coded_seconds")
_COUNTS = ("arena_nbytes", "max_live_nbytes", "reserved_nbytes", "steps", "deviating", "served", "fallen", "fallen_nbytes")
_POOL = ("reason", "period", *_COUNTS, "first", "until", "nbytes", "offset")
_KINDS = letters(get_args(StepKind))


class Placed(NamedTuple):
    """A buffer with an address in an arena, which exists from request `first` until request `until`."""

    first: int
    until: int
    nbytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The planned pool of a run. Other fields have the meaning that they have in `PoolStatus`, `Addresses` and `Counts`.

    reason: why there is no arena; "" if there is one.
    period: number of requests of a step.
    placed: the buffers with an address.
    """

    reason: str = ""
    period: int = 0
    arena_nbytes: int = 0
    max_live_nbytes: int = 0
    reserved_nbytes: int = 0
    steps: int = 0
    deviating: int = 0
    served: int = 0
    fallen: int = 0
    fallen_nbytes: int = 0
    placed: tuple[Placed, ...] = ()

    @classmethod
    def of(cls, pool: PoolStatus) -> Arena:
        a = pool.addresses
        if a is None:
            return cls(reason=pool.reason or "the requests of a step were still being logged when the run ended")
        rows = zip(range(len(a.nbytes)), a.until, a.nbytes, a.offsets, strict=True)
        return cls(
            reason=pool.reason or "",
            period=len(a.nbytes),
            arena_nbytes=a.arena_nbytes,
            max_live_nbytes=a.max_live_nbytes,
            reserved_nbytes=pool.reserved_nbytes,
            steps=pool.steps,
            deviating=pool.deviating,
            served=pool.last.served,
            fallen=pool.last.fallen,
            fallen_nbytes=pool.last.fallen_nbytes,
            placed=tuple(Placed(first, until, n, offset) for first, until, n, offset in rows if offset is not None),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RunRecord:
    """What is known of a run at its end, or of a plan file (then `phase` is "file"). Other fields are those of `RunStatus`.

    model: the class of the model; "" for a plan file.
    torch: the version of torch; "" for a plan file.
    rank: the process that wrote this, among those that train the model. ranks: number of these processes.
    error: the exception that ended the run, with its type; "" if there was none.
    graph: the step that the plan was made for; without a plan, the last observed step; None if there is none.
    frontier: all plans that were found.
    steps: the steps of the run.
    throughput: samples and joules, if a meter counted them. before: the same for a run without a plan.
    """

    phase: str
    model: str = ""
    device: str = ""
    torch: str = ""
    reason: str = ""
    remedy: str = ""
    error: str = ""
    compiled: str = ""
    budget_nbytes: int | None = None
    measured_peak_nbytes: int | None = None
    rank: int = 0
    ranks: int = 1
    replans: int = 0
    deviates: bool = False
    checkpointed: tuple[str, ...] = ()
    plan: Plan | None = None
    graph: Graph | None = None
    frontier: tuple[Row, ...] = ()
    steps: tuple[StepEntry, ...] = ()
    rates: MachineRates | None = None
    transfers: Transfers | None = None
    pool: Arena | None = None
    throughput: Throughput | None = None
    before: Throughput | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of the file, unchecked."""
        plan, graph, rows, steps = self.plan, self.graph, self.frontier, self.steps
        solvers = sorted({row.solver for row in rows})
        obj: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA}
        obj |= {key: getattr(self, key) for key in (*_TEXTS, *_AMOUNTS, "rank", "ranks", "replans", "deviates")}
        obj["checkpointed"] = list(self.checkpointed)
        obj["plan"] = plan_to_json(plan, graph) if plan is not None and graph is not None else None
        obj["graph"] = graph_to_json(graph) if plan is None and graph is not None else None
        obj["frontier"] = {key: [getattr(row, key) for row in rows] for key in _FRONTIER[:4]}
        obj["frontier"] |= {"solvers": solvers, "solver": [solvers.index(row.solver) for row in rows]}
        obj["steps"] = {
            "kind": "".join(step.kind[0] for step in steps),
            "steps": [step.steps for step in steps],
            "seconds": [step.seconds or 0.0 for step in steps],
            "predicted_nbytes": [-1 if step.predicted_nbytes is None else step.predicted_nbytes for step in steps],
            "measured_nbytes": [-1 if step.measured_nbytes is None else step.measured_nbytes for step in steps],
        }
        obj["rates"] = None if self.rates is None else self.rates.to_json()
        obj["pool"] = None
        if self.pool is not None:
            obj["pool"] = {key: getattr(self.pool, key) for key in ("reason", "period", *_COUNTS)}
            obj["pool"] |= {key: [getattr(p, key) for p in self.pool.placed] for key in Placed._fields}
        for key in ("transfers", "throughput", "before"):
            value = getattr(self, key)
            obj[key] = None if value is None else asdict(value)
        return obj

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `read_record` reads, whole or not at all. Raises PlanFileError."""
        jsonio.write(path, self.to_json())


def record_of_plan(plan: Plan, graph: Graph) -> RunRecord:
    """The record of a plan file."""
    return RunRecord(phase="file", budget_nbytes=plan.budget_nbytes, plan=plan, graph=graph, device=graph.device)


def read_record(path: str | os.PathLike[str]) -> RunRecord:
    """The record in the file at `path`, which is the record of a run or a plan file. Raises PlanFileError."""
    obj = jsonio.read(path)
    try:
        if obj.get("format") == PLAN_FORMAT:
            return record_of_plan(*plan_from_json(obj))
        if obj.get("format") != FORMAT:
            shown = repr(obj.get("format"))[:80]
            raise PlanFileError(f'"format" is {shown}; give the record of a run ("{FORMAT}") or a plan file ("{PLAN_FORMAT}")')
        return _record(Fields(obj, "run", _KEYS, (SCHEMA,)))
    except PlanFileError as error:
        raise PlanFileError(f"{os.fspath(path)!r}: {error}") from error


def _record(top: Fields) -> RunRecord:
    plan, graph = plan_from_json(top.value("plan")) if top.value("plan") is not None else (None, None)
    if top.value("graph") is not None:
        if plan is not None:
            top.refuse("graph", None, "the plan has its own")
        graph = graph_from_json(top.value("graph"))
    if top.string("phase") not in get_args(Phase):
        top.refuse("phase", None, f"none of {', '.join(get_args(Phase))}")
    if type(top.value("deviates")) is not bool:
        top.refuse("deviates", None, "neither true nor false")
    simple: dict[str, Any] = {key: top.string(key) for key in _TEXTS}
    simple |= {key: None if top.value(key) is None else top.integer(key) for key in _AMOUNTS}
    return RunRecord(
        **simple,
        rank=top.integer("rank"),
        ranks=top.integer("ranks"),
        replans=top.integer("replans"),
        deviates=top.value("deviates"),
        checkpointed=tuple(top.strings("checkpointed")),
        plan=plan,
        graph=graph,
        frontier=_frontier(top),
        steps=_steps(top),
        rates=None if top.value("rates") is None else MachineRates.from_json(top.value("rates")),
        transfers=None if top.value("transfers") is None else _transfers(top.inner("transfers", _TRANSFERS)),
        pool=None if top.value("pool") is None else _arena(top.inner("pool", _POOL)),
        throughput=None if top.value("throughput") is None else throughput_of(top.value("throughput"), "run.throughput"),
        before=None if top.value("before") is None else throughput_of(top.value("before"), "run.before"),
    )


def _frontier(top: Fields) -> tuple[Row, ...]:
    columns, n = top.table("frontier", _FRONTIER, "peak_nbytes")
    solvers = columns.strings("solvers")
    rows = zip(
        columns.ints("peak_nbytes", n),
        columns.floats("extra_seconds", n),
        columns.ints("extra_flops", n),
        columns.ints("rebuilt_nbytes", n),
        (solvers[i] for i in columns.ints("solver", n, 0, len(solvers) - 1)),
        strict=True,
    )
    return tuple(Row(*row) for row in rows)


def _steps(top: Fields) -> tuple[StepEntry, ...]:
    columns, n = top.table("steps", _STEPS, "kind")
    seconds = columns.floats("seconds", n)
    predicted, measured = (columns.ints(key, n, low=-1) for key in ("predicted_nbytes", "measured_nbytes"))
    return tuple(
        StepEntry(
            kind=kind,
            steps=steps,
            seconds=s or None,
            predicted_nbytes=None if p < 0 else p,
            measured_nbytes=None if m < 0 else m,
        )
        for kind, steps, s, p, m in zip(
            columns.chosen("kind", n, _KINDS), columns.ints("steps", n, low=1), seconds, predicted, measured, strict=True
        )
    )


def _transfers(fields: Fields) -> Transfers:
    counts = (fields.integer(key) for key in _TRANSFERS[:3])
    return Transfers(*counts, *(fields.number(key) for key in _TRANSFERS[3:]))


def _arena(fields: Fields) -> Arena:
    n = len(fields.ints("first", None))
    columns = (fields.ints(key, n) for key in Placed._fields)
    return Arena(
        reason=fields.string("reason"),
        period=fields.integer("period"),
        **{key: fields.integer(key) for key in _COUNTS},
        placed=tuple(Placed(*row) for row in zip(*columns, strict=True)),
    )
