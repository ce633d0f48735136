"""The eager engine: it carries out plans, and decides nothing by itself.

How its files depend on each other, from the bottom up:

    holding        the bytes that are held of a storage version: states and the doors between them
    naming         names of tensors for messages
    handles        the objects that autograd gets in place of saved tensors
    rebuild        runs recorded calls again
    native         runs them in C++, where that can be built
    program        a plan, indexed by what the engine meets at run time
    templates, learned    what the engine remembers of earlier forwards under the plan
    cursor, turns, guard  how far a step has come in the plan, and what a deviation keeps
    checks, starts        checksums; writes to memory after the forward
    parking        parked tensors
    planned_holdings      how long bytes are held under a plan
    rejoining, placing, matching   compare a forward with the plan
    base           the parts that both engines share; observing, planned: the two engines
"""

from lightning_memopt.runtime.engine.base import Engine
from lightning_memopt.runtime.engine.handles import Handle, Kept
from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.letting_go import let_go, step_ended
from lightning_memopt.runtime.engine.native import install_native, see_ops, wake_hooks
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
    "wake_hooks",
    "sized_by_data",
]
