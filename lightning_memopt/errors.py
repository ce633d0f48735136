"""Every error that this package raises on purpose: one base class, one subclass for each cause.

A message says what was wrong, with numbers, and what to do. If callers usually catch a builtin exception for a cause
(ValueError for a bad value, RuntimeError for a tensor that was modified in place), the subclass derives from that builtin, too.

A class's docstring has the cause in its first line, and what to do after "Remedy:": docs/troubleshooting.py reads both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping


class MemOptError(Exception):
    """Base class of every error of this package.

    Remedy: read the message: it says what to do. To catch all errors of this package, catch this class.
    """


class BudgetError(MemOptError, ValueError):
    """The memory budget cannot be understood, or is more than the device has.

    Remedy: write bytes, a size with a unit ("8GiB"), a share of the device ("80%"), "auto", or "min" for the smallest plan.
    """


class InfeasibleError(MemOptError):
    """No plan fits `budget_nbytes`; `smallest_nbytes` is the smallest budget known to be enough, None if unknown.

    Remedy: set the budget that the message names (`smallest_nbytes`), or make the batch smaller; offload, compression and early
    updates lower the smallest budget.
    """

    def __init__(
        self,
        message: str,
        *,
        smallest_nbytes: int | None = None,
        budget_nbytes: int | None = None,
        ranks: tuple[int, ...] = (),
        tiers: Mapping[str, int] | None = None,
    ) -> None:
        """`ranks`: if all ranks raise this error together, the numbers of the ranks whose budget is too small. `tiers`: where a
        tier is too small, its smallest budget that is known to be enough for this budget of the device.
        """
        super().__init__(message)
        self.smallest_nbytes = smallest_nbytes
        self.budget_nbytes = budget_nbytes
        self.ranks = ranks
        self.tiers = dict(tiers or {})


class PlanFileError(MemOptError, ValueError):
    """A plan, graph or profile file cannot be read or written, or has wrong content.

    Remedy: save the plan again with this version (`save_plan`, or `memopt plan`), and give the path of that file.
    """


class PlanMismatchError(MemOptError):
    """The plan was made for another model; the message names what differs first: an op, or the weights.

    Remedy: leave `plan` out, so that a plan is made for this model and batch, or save a new one.
    """


class ChainError(MemOptError, ValueError):
    """The given stages, or those cut from a graph, are not a chain that can be solved.

    Remedy: correct the stage that the message names; docs/formulation.md has the fields of a chain.
    """


class ModifiedError(MemOptError, RuntimeError):
    """A tensor that backward needs was modified in place after it was saved.

    Remedy: do not write in place to a tensor between forward and backward: write to a copy, or after backward.
    """


class PlacementError(MemOptError, ValueError):
    """Buffers to be placed, their file, or the request to place them are not valid.

    Remedy: correct the row that the message names; a buffer has a positive size, and an end after its beginning.
    """


class OrderingError(MemOptError, ValueError):
    """Ops to be put in order, or the request to order them, are not valid.

    Remedy: correct the op or the buffer that the message names.
    """


class ConfigError(MemOptError, ValueError):
    """An option has a value that is not accepted, or that contradicts another option.

    Remedy: give one of the values that the message names; docs/options.md has every option.
    """


class UnsupportedError(MemOptError):
    """The request cannot be carried out safely; the message names what is refused.

    Remedy: make the change that the message names, or train without a budget.
    """


class NotGatheredError(UnsupportedError, RuntimeError):
    """A rebuild needs a sharded weight at a moment when it is not in memory.

    Remedy: run backward in the order of the observed steps, or train without a plan (MEMOPT_DISABLE=1).
    """


class UpdatesInBackwardError(UnsupportedError):
    """Updating parameters in backward would give wrong results for this loop; the message says why, and what to change.

    Remedy: make the change that the message names, or set optimizer_in_backward="never".
    """


class RankFailedError(MemOptError, RuntimeError):
    """Another rank of the process group failed or does not answer; the message names it and says why.

    Remedy: look at the first error of the rank that the message names; start all ranks again.
    """


class AlreadyAttachedError(MemOptError):
    """The model already belongs to an open run.

    Remedy: end the other run first (leave its block, or call its `close()`).
    """


class RebuildMismatchError(MemOptError, RuntimeError):
    """An op gave other bits in a rebuild than in the forward pass; raised before any parameter is updated.

    Remedy: mark the op with register_op(op, "opaque"), so that its result is kept, or use deterministic algorithms.
    """


class OffloadError(MemOptError, RuntimeError):
    """A tensor could not be copied to a tier or back: no space, a failed copy, or a closed tier.

    Remedy: free space in the directory or give another one (offload="disk:/a/directory"), or train with offload="none".
    """


class TierFullError(OffloadError):
    """A tier has no space for a tensor.

    Remedy: give the tier more space, or a larger budget, so that less is parked.
    """


class EnergyUnavailableError(MemOptError):
    """The energy of a device cannot be measured; a meter turns it into a warning.

    Remedy: install the extra "energy" and NVIDIA's driver, or do nothing: training goes on without energy.
    """


EXTRAS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "lightning_fabric": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
}
"""Package that is imported -> the extra of lightning-memopt that installs it."""


class MissingExtraError(MemOptError, ImportError):
    """A part of this package needs a framework that is not installed; the message names the extra.

    Remedy: install the extra that the message names.
    """


@contextlib.contextmanager
def needing(extra: str, whose: str) -> Iterator[None]:
    """Within, raise MissingExtraError for a package that is not installed. `whose`: what needs it, such as "Pictures need"."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error}. {whose} it. Install it with: pip install 'lightning-memopt[{extra}]'") from None
