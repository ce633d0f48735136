"""Recomputation, offload and compression decided together, for one budget: `search` finds the plan, `bound` proves what no plan
is below, `choice` says what to park (CP-SAT), `polish` improves the best plan one trip at a time. The method is this project's
own (docs/formulation.md, "The joint bound"). A new source of plans to start from is entered in `search`.
"""

from lightning_memopt.solvers.joint.search import ALONE_SHARE, Form, Joint, least, solve_joint

__all__ = ["ALONE_SHARE", "Form", "Joint", "least", "solve_joint"]
