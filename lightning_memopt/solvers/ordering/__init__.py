"""Order: put the ops of a training step in another sequence that needs fewer bytes at its peak (OLLA; Steiner et al., 2022).

Enter through `order(problem, seconds)`; `faults` checks a sequence with code of its own. The modules:

    problem     ops, their precedence, buffers with makers and users; the peak of a sequence
    steps       the problem of a recorded step
    reach       which ops come before and after each op in every sequence, and the quick bound
    cuts        the fewest bytes at an op, over all sequences, by a minimum cut: the bound, and a better sequence
    lists       list scheduling
    updates     updates as early as possible, and OLLA's control edges
    search      the exact search for an order within a target, or the proof that there is none
    excerpts    the best order of a part of a sequence, by CP-SAT
    solve       `order`: all of these, within the given seconds
    savings     how much another order could save at most, for `memopt explain`
"""

from lightning_memopt.solvers.ordering.problem import Problem
from lightning_memopt.solvers.ordering.savings import Savings, savings
from lightning_memopt.solvers.ordering.solve import Order, order
from lightning_memopt.solvers.ordering.steps import Step, step_of
from lightning_memopt.solvers.ordering.validate import faults, faults_in_step

__all__ = ["Order", "Problem", "Savings", "Step", "faults", "faults_in_step", "order", "savings", "step_of"]
