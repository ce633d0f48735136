"""Early updates under DistributedDataParallel: a bucket of gradients is reduced, then the parameters of the bucket are updated.

A hook of a parameter would come too early: its gradient is still that of this process alone. So the updates are made in the
communication hook of the wrapper. The hook reduces a bucket exactly as the wrapper would: it multiplies by 1/processes and
sums up. While a bucket is being reduced, backward goes on. When the next bucket is full, or backward ends, the parameters of
the previous bucket are updated. All updates are made in the thread of backward, in the order of the buckets.

The wrapper copies each gradient into its bucket, and back when backward ends. A parameter that is updated early is not copied
back: its gradient becomes a view of the bucket, and the memory of its own gradient is freed when the bucket is full.

Torch cannot remove a communication hook. After the run, the hook does what the wrapper would do without it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.record import uncompiled
from lightning_memopt.torch_private import JOIN_CONFIG, JOIN_DIVIDES, current_node, queue_callback, register_comm_hook

Full = Callable[[torch.Tensor, torch.Tensor], Callable[[], None] | None]
"""`full(p, view)`: the gradient of `p` was copied into the `view` of its bucket. Returns a function that updates `p` when the
bucket is reduced, or None.
"""


class Reduced:
    """The communication hook of one wrapper. It stays as long as the wrapper."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._group = wrapper.process_group
        self._full: Full | None = None
        self._reduced: Callable[[], None] | None = None
        self._begun = False
        self._waiting: tuple[Any, list[Callable[[], None]]] | None = None
        register_comm_hook(wrapper.reducer, None, self._hook)

    @contextlib.contextmanager
    def told(self, full: Full, reduced: Callable[[], None] | None = None) -> Iterator[None]:
        """Within (one backward), call `full` for the parameters of each bucket, and `reduced()` when all buckets are reduced,
        before the wrapper copies them back.
        """
        self._full, self._reduced, self._begun, self._waiting = full, reduced, False, None
        try:
            yield
        finally:
            self._full = self._reduced = self._waiting = None

    def parameters(self) -> frozenset[int]:
        """Identities of the parameters whose gradients are reduced."""
        wrapper = self._wrapper()
        return frozenset() if wrapper is None else frozenset(id(p) for p in wrapper._module_parameters if p.requires_grad)

    @uncompiled
    @torch.no_grad()
    def _hook(self, _: Any, bucket: distributed.GradBucket) -> Future[torch.Tensor]:
        self._refuse_join()
        updates = list[Callable[[], None]]()
        if self._full is not None:
            if not self._begun:
                self._begun = True
                queue_callback(self._backward_ends)
            self._arrived()
            for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                update = self._full(p, _laid_out(gradient, p))
                if update is not None:
                    updates.append(update)
        buffer = bucket.buffer()
        buffer.mul_(1.0 / self._group.size())
        work = distributed.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None, "this process belongs to the group"
        if updates:
            self._waiting = work, updates
        if bucket.is_last() and current_node() is None:  # static_graph=True: all buckets come after the first backward
            self._all_reduced()
        summed: Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed

    def _arrived(self) -> None:
        """Wait until the current bucket is reduced, and update its parameters."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            work, updates = waiting
            work.wait()
            for update in updates:
                update()

    @uncompiled
    @torch.no_grad()
    def _backward_ends(self) -> None:
        if self._full is not None:
            self._arrived()
            self._all_reduced()

    def _all_reduced(self) -> None:
        reduced, self._reduced = self._reduced, None
        if reduced is not None:
            reduced()

    def _refuse_join(self) -> None:
        """Raise UpdatesInBackwardError in a `Join` that divides by the number of processes that are left."""
        wrapper = self._wrapper()
        if wrapper is not None and getattr(wrapper, JOIN_CONFIG).enable and not getattr(wrapper, JOIN_DIVIDES, True):
            raise UpdatesInBackwardError(
                "Join(divide_by_initial_world_size=False) divides by the number of processes that are left. Updates "
                "in backward, which this wrapper was prepared for, divide by all. Leave that argument out, or wrap "
                "the model anew and set optimizer_in_backward='never'."
            )


def _laid_out(gradient: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A gradient of a bucket with the strides that the wrapper gives it: those of `p` if its memory has no gaps."""
    if p.is_contiguous() or torch.empty_like(p, device="meta").stride() != p.stride():
        return gradient
    return gradient.as_strided(p.size(), p.stride(), gradient.storage_offset())


_reduced: weakref.WeakKeyDictionary[DistributedDataParallel, Reduced] = weakref.WeakKeyDictionary()


def reduced_by(wrapper: DistributedDataParallel) -> Reduced:
    """The communication hook of a wrapper; registers it at the first call."""
    known = _reduced.get(wrapper)
    if known is None:
        _reduced[wrapper] = known = Reduced(wrapper)
    return known


def is_ours(wrapper: DistributedDataParallel) -> bool:
    """Whether the communication hook of a wrapper is the one of this module."""
    return wrapper in _reduced
