"""The eager engine: it obeys a plan, and never decides.

How its files depend on each other, from the bottom up:

    holding        what is held of a storage version: states and the doors between them
    handles        what autograd gets; naming: what messages call tensors
    rebuild        recorded calls run again
    program        a plan, indexed; templates, learned: what its steps teach; cursor, turns, guard: where a step is
    parking        tensors that are parked; planned_holdings: what a plan has in memory
    rejoining, placing, matching   a forward is compared with the plan
    base           what every engine shares; observing, planned: the two engines
"""

from lightning_memopt.runtime.engine.base import Engine
from lightning_memopt.runtime.engine.handles import Handle, Kept
from lightning_memopt.runtime.engine.learned import Learned
from lightning_memopt.runtime.engine.observing import ObservingEngine
from lightning_memopt.runtime.engine.planned import PlannedEngine
from lightning_memopt.runtime.engine.program import Program, sized_by_data

__all__ = ["Engine", "Handle", "Kept", "Learned", "ObservingEngine", "PlannedEngine", "Program", "sized_by_data"]
