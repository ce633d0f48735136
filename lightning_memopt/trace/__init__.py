"""Observe one real step through the recorder, into a Graph."""

from lightning_memopt.trace.memory import AllocatorEvents, metered_cpu
from lightning_memopt.trace.scopes import Scopes
from lightning_memopt.trace.tracer import Tracer, watch_all

__all__ = ["AllocatorEvents", "Scopes", "Tracer", "metered_cpu", "watch_all"]
