"""Make batches of any size: with a function of the user, or with the sampler, dataset and collation of a DataLoader.

The loader itself is not iterated: this module draws indices from its sampler, reads the samples and collates them. That
changes the state of random generators; the caller restores it (`untouched`). A batch always has the size that was asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_memopt.errors import ConfigError, MemOptError, UnsupportedError
from lightning_memopt.torch_private import tree_leaves
from lightning_memopt.units import host_memory_nbytes

_HOST_SHARE = 2
"""Batches that wait for training may use one part in this many of the host's memory."""


class TooFewSamplesError(MemOptError):
    """The data has fewer samples than were asked for; `available` is the number that it has.

    Remedy: give more samples, or a smaller largest size; the search itself stops at what there is.
    """

    def __init__(self, available: int) -> None:
        super().__init__(f"The data gave {available} samples. Ask for no more.")
        self.available = available


def nbytes_of(batch: Any) -> int:
    """Bytes of the tensors in a batch."""
    return sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor))


class FromFunction:
    """Batches made by `make(size)`. `size`: samples of a batch before the search."""

    def __init__(self, make: Callable[[int], Any], size: int = 2) -> None:
        self.make, self.size = make, size
        self.cap: int | None = None
        self.copies = 1

    def batch(self, size: int) -> Any:
        """A batch of `size` samples. Raises ConfigError if no dimension of its tensors has that size."""
        batch = self.make(size)
        tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
        if tensors and not any(size in t.shape for t in tensors):
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
            raise ConfigError(
                f"make_batch({size}) gave tensors of {shapes}: no dimension is {size}, so it does not follow the size it is "
                "given. Make it return that many samples."
            )
        return batch


class FromLoader:
    """Batches of a DataLoader's samples. Raises UnsupportedError if the loader's batch size cannot be set (`refuse_loader`)."""

    def __init__(self, loader: Any) -> None:
        refuse_loader(loader)
        self.loader: DataLoader[Any] = loader
        self.size: int = loader.batch_sampler.batch_size
        self.iterable = isinstance(loader.dataset, IterableDataset)
        self.cap: int | None = None if self.iterable else len(loader.dataset)
        # every worker prepares `prefetch_factor` batches ahead; the batch in use and the next one come on top
        self.copies = 2 + loader.num_workers * (loader.prefetch_factor or 0)

    def batch(self, size: int) -> Any:
        """A batch as the loader would make it at this size. Raises TooFewSamplesError if the data has fewer samples."""
        loader = self.loader
        sampler: Any = loader.batch_sampler
        with sized(loader, size):
            indices: list[Any] = next(iter(sampler), [])
        if len(indices) != size:
            self._refuse_length(len(indices), size)
        if self.iterable:
            samples = list(itertools.islice(iter(loader.dataset), size))
            if len(samples) < size:
                raise TooFewSamplesError(len(samples))
        elif hasattr(loader.dataset, "__getitems__"):
            samples = loader.dataset.__getitems__(list(indices))
        else:
            samples = [loader.dataset[i] for i in indices]
        return loader.collate_fn(samples)

    def _refuse_length(self, length: int, size: int) -> None:
        """Raise for a batch sampler that gave `length` indices, not `size`."""
        if length < size:
            raise TooFewSamplesError(length)
        raise UnsupportedError(
            f"The batch sampler ({type(self.loader.batch_sampler).__name__}) gave {length} indices with batch_size={size}: it "
            "does not follow its batch_size. Set the batch size there, and leave the batch scaler out."
        )


def refuse_loader(loader: Any) -> None:
    """Raise UnsupportedError if a loader's batch size cannot be set in place; the message says why."""
    if not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"The batch size of a {type(loader).__name__} cannot be set. Give a torch DataLoader, or set the batch size there "
            "and leave the batch scaler out."
        )
    sampler = loader.batch_sampler
    if sampler is None:
        raise UnsupportedError(
            "This DataLoader has batch_size=None: its dataset makes the batches. Set the batch size there, and leave the batch "
            "scaler out."
        )
    size = getattr(sampler, "batch_size", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UnsupportedError(
            f"The batch sampler ({type(sampler).__name__}) has no batch_size to set (it is {size!r}). Give it an attribute "
            "batch_size that it follows, or leave the batch scaler out."
        )
    if isinstance(getattr(getattr(sampler, "batch_sampler", None), "batch_size", None), int):
        raise UnsupportedError(
            f"The batch sampler ({type(sampler).__name__}) takes its batches from another one, so it does not follow its own "
            "batch_size. Give the loader as it was before it was prepared for several processes."
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        if hasattr(dataset, "__len__"):
            raise UnsupportedError(
                f"{type(dataset).__name__} is an IterableDataset with __len__: the DataLoader divides it by the batch size it "
                "was made with, so the number of steps would be wrong. Remove __len__, or make the DataLoader with the "
                "size that you want."
            )
        if iter(dataset) is iter(dataset):
            raise UnsupportedError(
                f"{type(dataset).__name__} is read once: what trial steps take would be missing in training. Let __iter__ "
                "begin anew, or leave the batch scaler out."
            )


@contextmanager
def sized(loader: DataLoader[Any], size: int) -> Iterator[None]:
    """Set the loader's batch size to `size` samples inside of this block."""
    sampler: Any = loader.batch_sampler
    before = sampler.batch_size
    sampler.batch_size = size
    try:
        yield
    finally:
        sampler.batch_size = before


def host_cap(sample_nbytes: float, copies: int) -> int | None:
    """The largest batch size whose batches take at most 1 / `_HOST_SHARE` of the host's memory; None if samples have no bytes.

    `sample_nbytes`: bytes of a sample. `copies`: number of batches that exist at once.
    """
    if sample_nbytes <= 0:
        return None
    return max(1, int(host_memory_nbytes() // _HOST_SHARE / (sample_nbytes * copies)))
