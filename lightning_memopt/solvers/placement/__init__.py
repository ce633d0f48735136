"""Addresses: lifetimes and sizes of buffers in, offsets within one arena out (dynamic storage allocation).

Enter through `place(buffers, capacity, seconds)`, or through `place_cyclic` for steps that follow one another. `faults` checks
a placement with code of its own. The modules:

    buffers    the problem as arrays, the lower bound max-live, independent parts; the buffers of a recorded step
    best_fit   put one buffer after the other into the smallest gap
    promotion  best-fit again and again: what ended too high is placed earlier
    sections   the times that a search has to look at
    search     the exact search within a capacity, in C++, if there is a compiler
    solve      `place`: each part of a problem by best-fit, and by the search and repeated best-fit at the same time
    cyclic     buffers that live from one step into the next
"""

from lightning_memopt.solvers.placement.buffers import Buffer, buffers_of
from lightning_memopt.solvers.placement.cyclic import place_cyclic
from lightning_memopt.solvers.placement.solve import Placement, place
from lightning_memopt.solvers.placement.validate import faults

__all__ = ["Buffer", "Placement", "buffers_of", "faults", "place", "place_cyclic"]
