"""Recomputation, offload and compression decided together, for one budget. `search` finds the plan, `bound` proves a lower
bound on the seconds of all plans, `choice` decides what to park (by CP-SAT), and `polish` improves the best plan one trip at a
time. The method is this project's own (docs/formulation.md, "The joint bound"). To add plans to start from, change `search`.
"""

from lightning_memopt.solvers.joint.least import fewest_in_tier, least
from lightning_memopt.solvers.joint.search import ALONE_SHARE, Form, Joint, solve_joint

__all__ = ["ALONE_SHARE", "Form", "Joint", "fewest_in_tier", "least", "solve_joint"]
