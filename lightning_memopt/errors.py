"""Every error this package raises on purpose: one base class, one subclass per cause.

A message says what was wrong, the numbers, and what to do. Where a cause has a builtin exception that callers already
catch (a bad value, what autograd raises for a modified tensor), the subclass is that builtin too.
"""

from __future__ import annotations


class MemOptError(Exception):
    """Base of every error of this package: catching it catches them all."""


class BudgetError(MemOptError, ValueError):
    """The memory budget cannot be read, or no device could give it."""


class InfeasibleError(MemOptError):
    """No plan fits the budget; `smallest_nbytes` is the smallest that would do, as far as known by then (None: not at all)."""

    def __init__(self, message: str, *, smallest_nbytes: int | None = None, budget_nbytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_nbytes = smallest_nbytes
        self.budget_nbytes = budget_nbytes


class PlanFileError(MemOptError, ValueError):
    """A plan, trace or profile file cannot be read, cannot be written, or is not what it must be."""


class PlanMismatchError(MemOptError):
    """The plan was made for another model: the message names the fingerprint and the first op that differ."""


class ChainError(MemOptError, ValueError):
    """The stages given, or cut from a graph, are not a chain that can be solved."""


class ModifiedError(MemOptError, RuntimeError):
    """A tensor that backward needs was modified in place after it was saved."""


class ConfigError(MemOptError, ValueError):
    """An option has a value that is not accepted, or that contradicts another option."""


class UnsupportedError(MemOptError):
    """What was asked for cannot be done safely, and is refused by name."""


class UpdatesInBackwardError(UnsupportedError):
    """Updating parameters in backward would be wrong, or the loop does not keep to what it needs: says what, and the fix."""


class AlreadyAttachedError(MemOptError):
    """The model is already attached to a run: detach that one first."""


class ReplayMismatchError(MemOptError, RuntimeError):
    """An op run again gave other bits than in the forward pass; raised before anything is updated."""


class OffloadError(MemOptError, RuntimeError):
    """A tensor could not be moved to a tier, or back: no room, a failed copy, or a tier that is closed."""


class TierFullError(OffloadError):
    """A tier has no room for a tensor."""


class EnergyUnavailableError(MemOptError):
    """The energy of a device cannot be measured; a meter turns it into a warning."""
