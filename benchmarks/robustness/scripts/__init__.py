"""Training loops as people write them, in our own words: what `python -m benchmarks loops` trains plainly and within budgets.

A script is a function `(watch, log, steps)`. It builds its models, data and optimizers, and trains inside
`with watch(model, optimizer)`, which is `optimize` with a budget, or nothing at all: plain and planned runs run the same
code. It calls `log(...)` after every step with what it would print, and returns what it would save: models, optimizers,
averages, tensors. Frameworks that own the loop are given `watch.strategy()` instead.
"""

from __future__ import annotations

from benchmarks.robustness.scripts import (
    adversarial,
    calls,
    control,
    frameworks,
    functions,
    graphs,
    indexing,
    inner,
    language,
    methods,
    no_trainer,
    odd,
    recurrent,
    sequences,
    states,
    teachers,
    trainers,
    varying,
    vision,
)
from benchmarks.robustness.scripts.registry import Log, Script, Watch, scripts

__all__ = ["LOOPS", "Log", "Script", "Watch"]

_FAMILIES = (
    vision, adversarial, recurrent, language, graphs, control, methods, functions, teachers, indexing, varying, inner, calls,
    sequences, odd, trainers, frameworks, no_trainer, states,
)  # fmt: skip

LOOPS: dict[str, Script] = {script.name: script for family in _FAMILIES for script in scripts(family)}
