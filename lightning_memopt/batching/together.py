"""Trials that all ranks of a DistributedDataParallel run together. The first rank decides what is tried; the others follow.

A trial is a real step, whose backward runs collectives. So all ranks run the same trials, at the same sizes, in the same order.
They talk through the process group's store (ranks/), never by a collective:

    the first rank    the next trial: its kind and its size; at the end, the result
    every rank        before each step, that its batch is there, or how many samples its data has
    every rank        after each trial, whether the size fits there, and the measured peak

A size fits if it fits on every rank. A rank that ran out of memory alone would leave the others waiting in a collective. So
before the first step of each larger size every rank rehearses the trial in `no_sync`, where DDP's backward runs no collective.

A rehearsal cannot leave out collectives that the step runs by itself: SyncBatchNorm's, those of a sharded optimizer, the user's
own. If memory runs out on one rank before such a collective, that rank ends with an error after `_ALONE_SECONDS`, and the
others end when its process has ended, or at the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.nn.parallel import DistributedDataParallel

from lightning_memopt.batching.batches import TooFewSamplesError
from lightning_memopt.batching.result import BatchSizeResult
from lightning_memopt.batching.trials import Trial, Trials
from lightning_memopt.errors import ConfigError, InfeasibleError, RankFailedError
from lightning_memopt.graph import Graph
from lightning_memopt.ranks import Ranks

_BEGIN_SECONDS, _STEP_SECONDS = 120.0, 600.0
"""Number of seconds to wait for a rank that lives but does not begin the search, or does not end its step."""
_ALONE_SECONDS = 120.0
"""Number of seconds that a rank that ran out of memory in a step with collectives waits for the others, which may wait for
it.
"""

T = TypeVar("T")


class TrialsOfRanks(Trials):
    """`Trials` on several ranks.

    The first rank calls `warm`, `observe` and `confirm`, and then `finish` or `refuse`; the others call `follow`. Each method
    raises RankFailedError if another rank failed.

    Args:
        ranks: the ranks that search together.
        wrapper: the DistributedDataParallel that reduces the gradients of the step.
        args: the arguments of `Trials`.

    too_large_on: the ranks on which the last size that did not fit was too large.
    """

    _together = True

    def __init__(self, ranks: Ranks, wrapper: DistributedDataParallel, *args: Any) -> None:
        super().__init__(*args)
        self.ranks, self._wrapper = ranks, wrapper
        self.too_large_on: list[int] = []
        self._meetings = 0
        self._ran = 0  # the largest size whose steps ran to their end on all ranks
        self._stepped = False  # a step with collectives began
        self._ended_by: Exception | None = None  # why this rank's last attempt did not run to its end
        self._lost = False  # a meeting of the search failed: the search ends

    def begin(self, options: dict[str, Any]) -> int:
        """Compare the options of all ranks. Returns the smallest budget of all ranks, in bytes. Raises ConfigError on all ranks
        if they differ.
        """
        said = self._meet({"options": options, "budget": self.budget_nbytes, "cap": self.cap}, _BEGIN_SECONDS)
        for rank, other in enumerate(said):
            for name, value in said[0]["options"].items():
                if other["options"][name] != value:
                    raise ConfigError(
                        f"Rank {self.ranks.names[rank]} searches with {name}={other['options'][name]}, and rank "
                        f"{self.ranks.names[0]} with {name}={value}. Give all ranks the same."
                    )
        self.cap = min(other["cap"] for other in said)
        return int(min(other["budget"] for other in said))

    # -- the first rank ----------------------------------------------------------------------------

    def warm(self, size: int) -> bool:
        first = self.ranks.rank == 0 and not self._stepped
        _, trial = self._on_all("warm", size, lambda: Trials.warm(self, size))
        if first and trial is not None and trial.fits:
            # DDP makes its buckets anew in its second step (of a static graph in its third), so these graphs are thrown away
            return all(self.observe(size) is not None for _ in range(2 if self._wrapper.static_graph else 1))
        return trial is not None and trial.fits

    def observe_tiles(self, size: int) -> Graph | None:
        return None  # what tiles save is not predicted; a trial has them

    def observe(self, size: int, kind: str = "profile") -> Graph | None:
        graph, trial = self._on_all("observe", size, lambda: Trials.observe(self, size, kind))
        return graph if trial is not None and trial.fits else None

    def confirm(self, size: int, measure_energy: bool = False) -> Trial | None:
        return self._on_all("confirm", size, lambda: Trials.confirm(self, size))[1]

    def finish(self, result: BatchSizeResult) -> None:
        """Tell the other ranks the result."""
        self._order({"kind": "result", "answer": dataclasses.asdict(result)})

    def refuse(self, error: InfeasibleError) -> None:
        """Tell the other ranks that no size fits."""
        self._order({"kind": "infeasible", "answer": {"refused": str(error), "budget": error.budget_nbytes}})

    # -- the other ranks ---------------------------------------------------------------------------

    def follow(self) -> BatchSizeResult:
        """Run the trials that the first rank asks for, and return its result. Raises InfeasibleError if the first rank does."""
        while True:
            order = self._hear(self._next(), 0, math.inf)  # as long as the first rank lives: it may solve plans
            size, answer = order.get("size", 0), order.get("answer", {})
            if order["kind"] == "warm":
                self.warm(size)
            elif order["kind"] == "observe":
                self.observe(size)
            elif order["kind"] == "confirm":
                self.confirm(size)
            elif order["kind"] == "infeasible":
                raise InfeasibleError(f"{answer['refused']}", budget_nbytes=answer["budget"])
            else:
                return BatchSizeResult(**answer | {"trials": tuple(Trial(**trial) for trial in answer["trials"])})

    # -- a trial -----------------------------------------------------------------------------------

    def _on_all(self, kind: str, size: int, run: Callable[[], T]) -> tuple[T | None, Trial | None]:
        """Run a trial on all ranks. Returns what `run` returned on this rank, and the trial of all ranks, which is None if the
        data of a rank has no such batch.
        """
        if self.ranks.rank == 0:
            self._order({"kind": kind, "size": size})
        # in a static graph torch reduces all gradients in the first step, even in `no_sync`
        if size > self._ran and (self._stepped or not self._wrapper.static_graph):
            begun = len(self.done)
            with self._without_collectives():
                self._attempt(run)
            rehearsal, to_end = self._agreed(begun, _STEP_SECONDS)
            if rehearsal is None or not to_end:
                return None, rehearsal
            # only the real step shows whether the peak is above the budget: its gradients may take other bytes
            self.done[begun:] = [dataclasses.replace(rehearsal, kind="rehearsal", fits=True)]
        begun, self._stepped = len(self.done), True
        returned = self._attempt(run)
        trial, to_end = self._agreed(begun, _STEP_SECONDS if self._ended_by is None else _ALONE_SECONDS)
        self._ran = max(self._ran, size if trial is not None and to_end else 0)
        return returned, trial

    @contextlib.contextmanager
    def _without_collectives(self) -> Iterator[None]:
        """Like `no_sync`, but the next forward sends buffers as it would have done without the steps in this block."""
        sends_buffers = self._wrapper.require_forward_param_sync
        try:
            with self._wrapper.no_sync():
                yield
        finally:
            self._wrapper.require_forward_param_sync = sends_buffers

    def _attempt(self, run: Callable[[], T]) -> T:
        self._ended_by = None
        return run()

    def _agreed(self, begun: int, seconds: float) -> tuple[Trial | None, bool]:
        """The trial of all ranks, which replaces this rank's in `done[begun:]`, and whether it ran to its end on all of them.

        Raises RankFailedError if a rank's attempt ended because of another rank, but no rank reported that memory ran out.
        """
        own = self.done[begun] if len(self.done) > begun else None
        error = self._ended_by
        outcome = {
            "ended": True,
            "to_end": error is None,
            "too_large": own is not None and not own.fits and self._concerns_this_rank(error),
            "fits": own is not None and own.fits,
            "peak": own.peak_nbytes if own is not None else None,
            "budget": self.budget_nbytes,
            "cap": self.cap,
        }
        said = self._meet(outcome, seconds)
        while not all(other["ended"] for other in said):  # by then a rank that has begun another step knows that it must not
            said = self._meet(outcome, seconds)
        self._ended_by = None
        self.cap = min(other["cap"] for other in said)
        too_large_on = [self.ranks.names[rank] for rank, other in enumerate(said) if other["too_large"]]
        if isinstance(error, RankFailedError) and not too_large_on:
            raise error
        self.too_large_on = too_large_on or self.too_large_on
        if own is None:
            return None, True
        least = min(other["budget"] for other in said)  # a rank with a larger budget may have another plan, and a higher peak
        peaks = [other["peak"] for other in said if other["budget"] == least]
        peak_nbytes = None if None in peaks else max(peaks)
        merged = dataclasses.replace(own, fits=all(other["fits"] for other in said), peak_nbytes=peak_nbytes)
        self.done[begun:] = [merged]
        return merged, all(other["to_end"] for other in said)

    def _concerns_this_rank(self, error: Exception | None) -> bool:
        """Whether a size is too large on this rank. `error`: what ended this rank's attempt."""
        if isinstance(error, InfeasibleError):
            return not error.ranks or self.ranks.name in error.ranks
        return not isinstance(error, RankFailedError)

    def _too_large(self, error: Exception) -> bool:
        """See `Trials`. If another rank ended the attempt, `_agreed` decides, after all ranks have reported how theirs
        ended.
        """
        by_others = isinstance(error, RankFailedError)
        ends_trial = not self._lost if by_others else super()._too_large(error)
        if ends_trial:
            self._ended_by = error
        return ends_trial

    def _batch(self, size: int) -> Any:
        """This rank's batch, after every rank has made its own. Raises TooFewSamplesError on all ranks if one has fewer
        samples.
        """
        batch: Any = None
        available: int | None = None
        try:
            batch = super()._batch(size)
        except TooFewSamplesError as error:
            available = error.available
        said = self._meet({"ended": False, "available": available}, _STEP_SECONDS)
        if any(other["ended"] for other in said):
            raise RankFailedError("Memory ran out in this trial on another rank. Make the batches smaller on all ranks.")
        fewest = min((other["available"] for other in said if other["available"] is not None), default=None)
        if fewest is not None:
            raise TooFewSamplesError(fewest)
        return batch

    # -- messages between ranks --------------------------------------------------------------------

    def _order(self, order: dict[str, Any]) -> None:
        self.ranks.tell(self._next(), order)

    def _meet(self, decision: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """What all ranks post at the next meeting, in the order of ranks."""
        about = self._next()
        self.ranks.tell(about, decision)
        return [self._hear(about, rank, seconds) for rank in range(self.ranks.size)]

    def _hear(self, about: str, rank: int, seconds: float) -> dict[str, Any]:
        try:
            heard = self.ranks.hear(about, rank, seconds)
        except RankFailedError:
            self._lost = True
            raise
        if heard is None:
            self._lost = True
            if self._ended_by is not None and not isinstance(self._ended_by, RankFailedError):
                raise self._ended_by  # memory ran out on this rank, and the others may wait for it in a collective
            raise RankFailedError(
                f"Rank {self.ranks.names[rank]} did not reach {about} of the search for a batch size. "
                "Run the search on every rank, with a step in which all ranks run the same collectives."
            )
        return heard

    def _next(self) -> str:
        """The name of the next meeting, the same on all ranks."""
        self._meetings += 1
        return f"meeting {self._meetings}"
