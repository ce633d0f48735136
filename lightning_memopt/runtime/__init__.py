"""Carry out plans: the eager engine (`engine`), parked tensors (parked.py, `codecs`, `tiers`) and early updates."""

from lightning_memopt.runtime.engine import (
    Engine,
    Handle,
    Kept,
    Learned,
    ObservingEngine,
    PlannedEngine,
    Program,
    install_native,
    let_go,
    see_ops,
    sized_by_data,
    step_ended,
)

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
