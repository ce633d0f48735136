"""Every error that this package raises on purpose: one base class, one subclass for each cause.

A message says what was wrong, with numbers, and what to do. If callers already catch a builtin exception for a cause
(ValueError for a bad value, RuntimeError for a tensor that was modified in place), the subclass derives from that builtin too.
"""

from __future__ import annotations


class MemOptError(Exception):
    """Base class of every error of this package."""


class BudgetError(MemOptError, ValueError):
    """The memory budget cannot be understood, or is more than the device has."""


class InfeasibleError(MemOptError):
    """No plan fits `budget_nbytes`; `smallest_nbytes` is the smallest budget that is known to suffice, None if unknown."""

    def __init__(
        self,
        message: str,
        *,
        smallest_nbytes: int | None = None,
        budget_nbytes: int | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """`ranks`: the numbers of the ranks whose budget is too small, where all ranks raise this error together."""
        super().__init__(message)
        self.smallest_nbytes = smallest_nbytes
        self.budget_nbytes = budget_nbytes
        self.ranks = ranks


class PlanFileError(MemOptError, ValueError):
    """A plan, graph or profile file cannot be read or written, or has wrong content."""


class PlanMismatchError(MemOptError):
    """The plan was made for another model; the message names both fingerprints and the first different op."""


class ChainError(MemOptError, ValueError):
    """The given stages, or those cut from a graph, are not a chain that can be solved."""


class ModifiedError(MemOptError, RuntimeError):
    """A tensor that backward needs was modified in place after it was saved."""


class PlacementError(MemOptError, ValueError):
    """Buffers that are to be placed, their file, or the request to place them are not valid."""


class OrderingError(MemOptError, ValueError):
    """Ops that are to be put in order, or the request to order them, are not valid."""


class ConfigError(MemOptError, ValueError):
    """An option has a value that is not accepted, or that contradicts another option."""


class UnsupportedError(MemOptError):
    """The request cannot be carried out safely; the message names what is refused."""


class NotGatheredError(UnsupportedError, RuntimeError):
    """A rebuild needs a sharded weight at a moment when it is not in memory."""


class UpdatesInBackwardError(UnsupportedError):
    """Updating parameters in backward would give wrong results for this loop; the message says why, and what to change."""


class RankFailedError(MemOptError, RuntimeError):
    """Another rank of the process group failed, or does not answer; the message names it and says why."""


class AlreadyAttachedError(MemOptError):
    """The model already belongs to an open run; close that one first."""


class RebuildMismatchError(MemOptError, RuntimeError):
    """An op gave other bits in a rebuild than in the forward pass; raised before any parameter is updated."""


class OffloadError(MemOptError, RuntimeError):
    """A tensor could not be copied to a tier or back: no space, a failed copy, or a closed tier."""


class TierFullError(OffloadError):
    """A tier has no space for a tensor."""


class EnergyUnavailableError(MemOptError):
    """The energy of a device cannot be measured; a meter turns it into a warning."""


EXTRAS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "lightning_fabric": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
}
"""Package that is imported -> the extra of lightning-memopt that installs it."""


class MissingExtraError(MemOptError, ImportError):
    """A part of this package was asked for that needs a framework which is not installed; the message names the extra."""
