"""The eager replay engine: obeys a plan, never decides."""

from lightning_memopt.runtime.engine import Engine, Handle, Kept
from lightning_memopt.runtime.observing import ObservingEngine
from lightning_memopt.runtime.planned import PlannedEngine
from lightning_memopt.runtime.program import Program, sized_by_data

__all__ = ["Engine", "Handle", "Kept", "ObservingEngine", "PlannedEngine", "Program", "sized_by_data"]
