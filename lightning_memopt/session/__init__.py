"""Sessions: they observe steps, solve for a plan and run it. Only this package uses trace, solvers and runtime together."""

from lightning_memopt.session.session import Session
from lightning_memopt.session.status import Phase, RunStatus, Transfers

__all__ = ["Phase", "RunStatus", "Session", "Transfers"]
