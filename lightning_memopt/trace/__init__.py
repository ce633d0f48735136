"""Observe one real step through the recorder, into a Graph."""

from lightning_memopt.trace.memory import AllocatorEvents, metered_cpu
from lightning_memopt.trace.scopes import Scopes
from lightning_memopt.trace.tracer import Tracer, backward_runs, watch_all

__all__ = ["AllocatorEvents", "Scopes", "Tracer", "backward_runs", "metered_cpu", "watch_all"]
