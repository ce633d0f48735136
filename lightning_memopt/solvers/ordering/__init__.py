"""Order: put ops in another sequence that needs fewer bytes at its peak (OLLA; Steiner et al., 2022). The package orders the
kernels of compiled code; benchmarks/papers/olla.py, whole steps.

Enter through `order(problem, seconds)`; `faults` checks a sequence with code of its own. The modules:

    problem     ops, their precedence, buffers with makers and users; the peak of a sequence
    reach       which ops come before and after each op in every sequence, and the quick bound
    cuts        the fewest bytes at an op, over all sequences, by a minimum cut: the bound, and a better sequence
    lists       list scheduling
    search      the exact search for an order within a target, or the proof that there is none
    excerpts    the best order of a part of a sequence, by CP-SAT
    solve       `order`: all of these, within the given seconds
"""

from lightning_memopt.solvers.ordering.problem import Problem
from lightning_memopt.solvers.ordering.solve import Order, order
from lightning_memopt.solvers.ordering.validate import faults

__all__ = ["Order", "Problem", "faults", "order"]
