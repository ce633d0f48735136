"""Carry out plans: the eager engine (`engine`), parked tensors (parked.py, `codecs`, `tiers`) and early updates."""

from lightning_memopt.runtime.engine.base import Engine
from lightning_memopt.runtime.engine.handles import Handle, Kept
from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.letting_go import let_go, step_ended
from lightning_memopt.runtime.engine.native import install_native, see_ops
from lightning_memopt.runtime.engine.observing import ObservingEngine
from lightning_memopt.runtime.engine.planned import PlannedEngine
from lightning_memopt.runtime.engine.program import Program, sized_by_data

__all__ = [
    "Engine",
    "Handle",
    "Kept",
    "Learned",
    "ObservingEngine",
    "PlannedEngine",
    "Program",
    "install_native",
    "let_go",
    "step_ended",
    "see_ops",
    "sized_by_data",
]
