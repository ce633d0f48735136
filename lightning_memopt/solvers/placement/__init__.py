"""Addresses: lifetimes and sizes of buffers in, offsets within one arena out (dynamic storage allocation).

`place(buffers, capacity, seconds)` is the door, and `place_cyclic` the one for steps that follow one another; `faults` checks a
placement with code of its own. The rooms behind them:

    buffers    the problem as arrays, the lower bound max-live, parts that do not concern each other
    best_fit   one buffer after the other into the smallest gap
    promotion  best-fit again and again: what ended too high is placed earlier
    merging    buffers that tile a rectangle, where all bytes are in use, become one
    search     the exact search within a capacity, section by section (`sections`, `sequences`)
    crowded    the search for the most crowded sections, best-fit for the rest; more sections on demand
    native     best-fit and the search in C++, where a compiler is there
    portfolio  which of them are run, in which order, for how long
    solve      the door: each part of a problem by a portfolio
    cyclic     buffers that live from one step into the next
    steps      the buffers of a recorded step, unmodified or planned
    pyramid    OLLA's preplacement, as a policy
    mobility   Dymem's pool with two ends, as a policy and a baseline
"""

from lightning_memopt.solvers.placement.buffers import Buffer
from lightning_memopt.solvers.placement.cyclic import place_cyclic
from lightning_memopt.solvers.placement.solve import Placement, place
from lightning_memopt.solvers.placement.steps import buffers_of
from lightning_memopt.solvers.placement.validate import faults

__all__ = ["Buffer", "Placement", "buffers_of", "faults", "place", "place_cyclic"]
