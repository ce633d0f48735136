"""Observing -> Planning -> Running, or Failed: the only place that knows trace, solvers and runtime."""

from lightning_memopt.session.session import Session

__all__ = ["Session"]
