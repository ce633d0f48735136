"""Restore everything that trial steps change, bit by bit.

Input: the objects to follow ("roots"). A snapshot remembers

- every tensor that is reachable from them, gradients included: each storage is copied once into the host's memory;
- attributes of modules, optimizers, schedulers, samplers and loaders, and the dicts, lists, sets and deques in them;
- the state of random generators among them, and of the global ones of torch, numpy and Python.

Of a DistributedDataParallel only the module in it is followed: its own attributes describe its reducer, which goes on.

All of it is restored in place. What steps add is removed: optimizer state, caches, counters, states of torchmetrics.
Attributes of other objects (a logger, a user's dataclass) are not followed and not restored.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_memopt.device.backends import generators_kept
from lightning_memopt.device.places import has_memory

_OPEN = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, Sampler, DataLoader)
"""Types of objects whose attributes are followed."""
_MANY = 4096
"""The items of a container with more items than this (a vocabulary) are restored, but not followed."""


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 tensor on the memory of a storage, with a version counter of its own."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _refill(alias: torch.Tensor, kept: np.ndarray[Any, Any]) -> None:
    _bytes_of(alias.untyped_storage()).copy_(torch.from_numpy(kept))


def _same_tensor(t: torch.Tensor, alias: torch.Tensor) -> None:
    """Give a tensor its own data again if it was replaced (`p.data = other`). `alias` shares the original data."""
    if t.data_ptr() != alias.data_ptr() or t.shape != alias.shape or t.stride() != alias.stride():
        t.data = alias


def _regrad(t: torch.Tensor, grad: torch.Tensor | None) -> None:
    t.grad = grad


def _rewrite(t: torch.Tensor, kept: torch.Tensor) -> None:
    t.copy_(kept)


def _same_dict(value: dict[Any, Any], kept: dict[Any, Any]) -> None:
    if len(value) != len(kept) or any(k not in value or value[k] is not v for k, v in kept.items()):
        value.clear()
        value.update(kept)


def _same_items(value: Any, kept: list[Any]) -> None:
    if len(value) == len(kept) and all(a is b for a, b in zip(value, kept, strict=True)):
        return
    value.clear()
    value.update(kept) if isinstance(value, set) else value.extend(kept)


class Snapshot:
    """The state of everything reachable from `roots` when it is created; `restore` may be called once.

    most_nbytes: the bytes of larger storages are not copied: nothing writes them. None: all are.
    """

    def __init__(self, *roots: Any, most_nbytes: int | None = None) -> None:
        self._most_nbytes = most_nbytes
        self._undo: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}  # id -> object; the reference keeps the id from being used again
        self._storages: set[int] = set()
        self._generators()
        todo = list(roots)
        while todo:
            value = todo.pop()
            if id(value) not in self._seen:
                children = list(self._note(value))
                if children or isinstance(value, (torch.Tensor, *_OPEN, dict, list, set, deque)):
                    self._seen[id(value)] = value
                todo.extend(children)

    def restore(self) -> None:
        """Restore containers and attributes first, then tensors, then generators."""
        with torch.no_grad():
            while self._undo:
                self._undo.pop()()

    def _note(self, value: Any) -> Iterable[Any]:
        """Remember how to restore one object. Returns the objects that are followed from it."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            self._generator(value)
        elif isinstance(value, DistributedDataParallel):
            self._undo.append(partial(setattr, value, "training", value.training))
            return [value.module]
        elif isinstance(value, _OPEN):
            return self._attributes(value)
        elif isinstance(value, Dataset):
            return [v for v in self._attributes(value) if not _holds_data(v)]
        elif isinstance(value, dict):
            self._undo.append(partial(_same_dict, value, dict(value)))
            return value.values() if len(value) <= _MANY else ()
        elif isinstance(value, (list, set, deque)):
            self._undo.append(partial(_same_items, value, list(value)))
            return value if len(value) <= _MANY else ()
        elif isinstance(value, tuple):
            return value
        return ()

    def _attributes(self, value: Any) -> list[Any]:
        own = vars(value)
        self._undo.append(partial(_same_dict, own, dict(own)))
        return list(own.values())

    def _tensor(self, t: torch.Tensor) -> Iterable[Any]:
        if t.layout is not torch.strided or type(t) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            if has_memory(t.device):
                self._undo.insert(0, partial(_rewrite, t, t.detach().clone()))
            return ()
        alias = t.detach()
        storage = alias.untyped_storage()
        copied = self._most_nbytes is None or storage.nbytes() <= self._most_nbytes
        if copied and storage._cdata not in self._storages and has_memory(t.device):
            self._storages.add(storage._cdata)
            # numpy's memory, so that the counters of torch's allocator do not change
            kept = np.empty(storage.nbytes(), dtype=np.uint8)
            # never `.numpy()` of the storage itself: torch would then treat the storage as memory of another library
            torch.from_numpy(kept).copy_(_bytes_of(storage))
            self._undo.insert(0, partial(_refill, alias, kept))
        self._undo.append(partial(_same_tensor, t, alias))
        if not t.is_leaf:
            return ()
        self._undo.append(partial(_regrad, t, t.grad))
        return () if t.grad is None else (t.grad,)

    def _generators(self) -> None:
        self._undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        self._undo.append(partial(random.setstate, random.getstate()))
        self._undo.append(partial(np.random.set_state, np.random.get_state()))
        self._undo.append(generators_kept())

    def _generator(self, value: Any) -> None:
        if isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        else:
            self._undo.append(partial(value.set_state, value.get_state()))


def _holds_data(value: Any) -> bool:
    """Whether an attribute of a dataset is its data (arrays, or large containers), which reading samples does not change."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    if isinstance(value, (dict, list, tuple, set, deque)):
        items = value.values() if isinstance(value, dict) else value
        return len(value) > _MANY or any(isinstance(v, (torch.Tensor, np.ndarray)) for v in items)
    return False


@contextmanager
def untouched(*roots: Any, most_nbytes: int | None = None) -> Iterator[None]:
    """After this block, also after an exception, everything reachable from `roots` has the same bits as before. `most_nbytes`:
    see `Snapshot`.
    """
    before = Snapshot(*roots, most_nbytes=most_nbytes)
    try:
        yield
    finally:
        before.restore()
