"""Observing -> Planning -> Running, or Failed: the only place that knows trace, solvers and runtime."""

from lightning_memopt.session.session import Session
from lightning_memopt.session.status import Phase, RunStatus, Transfers

__all__ = ["Phase", "RunStatus", "Session", "Transfers"]
