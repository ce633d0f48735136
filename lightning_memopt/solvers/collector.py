"""Pause Python's cycle collector while a solver works."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within this context, the cycle collector does not run. Solvers make no reference cycles, and each collection would walk
    all graphs and plans.

    At 100K ops, collections took a third of the planning time. Contexts may be nested.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
