"""Our own rows: `optimize` within a budget, as a user calls it, by engine and technique.

A step without the plan is a step in `run.pause()`, on the same model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning_memopt.bench.methods import Applied, eagerly, needs_a_host
from lightning_memopt.bench.subject import Subject
from lightning_memopt.bench.torch_compiled import compiled_in_place
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.integrations.plain import optimize
from lightning_memopt.native import engine
from lightning_memopt.record import compiled_modules

_MOST_STEPS, _MOST_COMPILED_STEPS = 12, 24
"""A plan is in force after three observed steps, unless the observed steps differ. A region of torch.compile is compiled up to
six times, and a step in which code is compiled is not observed.
"""


@contextlib.contextmanager
def planned(
    subject: Subject, budget_nbytes: int, native: bool = True, compiled: bool = False, **options: Any
) -> Iterator[Applied]:
    """The subject within a budget.

    Args:
        native: whether to use the native engine, not the one in Python.
        compiled: whether the user has compiled the model by Inductor.
        options: options of `MemOptConfig`.

    Raises InfeasibleError if no plan keeps the budget, UnsupportedError if there is no plan for another reason.
    """
    if options.get("offload") == "host":
        needs_a_host(subject)
    compiles = compiled or options.get("compile")
    with (
        contextlib.nullcontext() if native else engine.without(),
        compiled_in_place(subject.model, "inductor") if compiled else contextlib.nullcontext(),
        optimize(subject.model, subject.training.optimizer, budget=budget_nbytes, verbose=False, **options) as run,
    ):
        steps = _MOST_COMPILED_STEPS if compiles else _MOST_STEPS
        for _ in range(steps):
            subject.step()
            if run.status().phase in ("planned", "unplanned", "off") and not compiles:
                break
        status = run.status()
        if status.plan is None:
            raise UnsupportedError(status.reason or f"{steps} steps gave no plan. Run `memopt plan` to see why.")
        if native and engine.loaded() is None:
            raise UnsupportedError(
                "there is no native engine: no C++ compiler, or MEMOPT_NATIVE=0. Install or allow it, or use ours-python."
            )

        def facts() -> dict[str, Any]:
            status = run.status()
            if status.plan is None or status.phase != "planned":
                raise UnsupportedError(f"the plan did not stay in force: {status.reason}. Give a larger budget.")
            return {
                "predicted_nbytes": status.plan.predicted.needed_nbytes,
                "session_peak_nbytes": status.measured_peak_nbytes,
                "unmodified_nbytes": status.plan.unmodified_peak_nbytes,
                "step_seconds": status.plan.step_seconds,
                "predicted_extra_seconds": status.plan.predicted.seconds,
                "bound_seconds": status.plan.lower_bound_seconds,
                "rebuilt_ops": status.plan.predicted.rebuilt_ops,
                "parked_nbytes": status.plan.predicted.moved_nbytes,
                "solver": status.plan.solver,
                "deviates": status.deviates,
            }

        def extra_flops() -> float:
            plan = run.plan
            return float(plan.predicted.extra_flops) if plan is not None else 0.0

        @contextlib.contextmanager
        def paused() -> Iterator[None]:
            with run.pause(), eagerly(compiled_modules(subject.model)):
                yield

        yield Applied(without=paused, facts=facts, extra_flops=extra_flops)
