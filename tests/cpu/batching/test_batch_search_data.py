"""Searching for a batch size with loaders, samplers and data sets, and with every option (L3, L8, L9, P27)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from lightning_memopt import find_max_batch_size, optimize
from lightning_memopt.batching import FromLoader
from lightning_memopt.batching import batches as batches_module
from lightning_memopt.errors import AlreadyAttachedError, ConfigError, UnsupportedError
from tests.cpu.lib.loops import LENGTH, QUIET, batches
from tests.cpu.lib.searches import BUDGET, Stream, Words, same

pytestmark = pytest.mark.profiled  # their budgets are those of a process that holds nothing else


def test_l3_no_size_is_larger_than_a_batch_that_was_there() -> None:
    words = Words()
    stream = Stream(40)
    found = words.find(DataLoader(stream, batch_size=8), budget="8GiB", start=None)
    assert found.size == 40 and 40 in words.sizes and max(words.sizes) == 40
    assert stream.reads == 0, "the dataset's counter was put back"
    x, y = batches(1, 40)[0]
    words.sizes.clear()
    assert words.find(DataLoader(TensorDataset(x, y), batch_size=8), budget="8GiB", start=None).size == 40
    assert max(words.sizes) == 40


def test_l3_batches_that_do_not_follow_the_size_are_refused() -> None:
    words = Words()
    with pytest.raises(ConfigError, match="no dimension is 4"):
        words.find(lambda size: words.make(7))

    class Stubborn(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([i, i + 1, i + 2] for i in range(0, 30, 3))

    loader = DataLoader(TensorDataset(*batches(1, 64)[0]), batch_sampler=Stubborn(SequentialSampler(range(30)), 3, False))
    with pytest.raises(UnsupportedError, match=r"Stubborn\) gave 3 indices with batch_size=2"):
        words.find(loader, start=None)


def test_p27_loaders_samplers_and_datasets_are_as_they_were() -> None:
    data = TensorDataset(*batches(1, 400)[0])
    for make in (
        lambda g: DataLoader(data, batch_size=8, shuffle=True, generator=g),
        lambda g: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=g), 8, True)),
        lambda g: DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=g), drop_last=True),
    ):
        orders = []
        for search in (False, True):
            generator = torch.Generator().manual_seed(3)
            loader, words = make(generator), Words()
            if search:
                assert words.find(loader, start=None, max_size=100).size > 8
            assert loader.batch_sampler.batch_size == 8  # type: ignore[union-attr]
            orders.append([x for x, _ in loader])
        assert same(*orders)


def test_loaders_whose_size_cannot_be_set_are_refused_by_name() -> None:
    data = TensorDataset(*batches(1, 64)[0])

    class Sized(Stream):
        def __len__(self) -> int:
            return self.count

    class Once(IterableDataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.items = iter(range(10))

        def __iter__(self) -> Iterator[int]:
            return self.items

    class Shard(BatchSampler):
        """As Accelerate's: it has a batch size, and another batch sampler that decides."""

        def __init__(self, batch_sampler: BatchSampler) -> None:
            super().__init__(batch_sampler.sampler, batch_sampler.batch_size, False)
            self.batch_sampler = batch_sampler

    refused = {
        "batch_size=None": DataLoader(data, batch_size=None),
        "has no batch_size to set": DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),  # type: ignore[arg-type]
        "IterableDataset with __len__": DataLoader(Sized(40), batch_size=4),
        "is read once": DataLoader(Once(), batch_size=4),
        "takes its batches from another one": DataLoader(data, batch_sampler=Shard(BatchSampler(range(64), 4, False))),
        "of a list cannot be set": [1, 2],
    }
    for text, loader in refused.items():
        with pytest.raises(UnsupportedError, match=text):
            FromLoader(loader)


def test_l8_the_host_must_hold_the_batches_that_workers_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = 2 * LENGTH * 8
    monkeypatch.setattr(batches_module, "host_memory_nbytes", lambda: 2 * 50 * sample)
    words = Words()
    assert words.find(budget=1 << 30).size == 50
    loader = DataLoader(TensorDataset(*batches(1, 400)[0]), batch_size=4, num_workers=1, prefetch_factor=3)
    assert words.find(loader, budget=1 << 30, start=None).size == 10, "two, and three that the worker prepares"


def test_l9_every_option_says_what_it_does() -> None:
    words = Words()
    largest = words.find().size
    assert words.find(max_size=20).size == 20
    assert words.find(effective=96).size == max(n for n in range(1, largest + 1) if 96 % n == 0)
    assert words.find(start=2).before == 2
    plain = words.find(start=16)
    assert [t.size for t in plain.trials] == [8, 8, 16, plain.size] and abs(plain.size - largest) <= 1
    assert words.find(budget=BUDGET // 2).size < largest
    assert 1 <= words.find(mode="throughput").size <= largest
    saving = words.find(mode="energy", watts=200.0)
    assert saving.joules_per_sample == pytest.approx(200.0 / saving.samples_per_second)
    assert "J/sample predicted" in str(saving) and f"batch 8 -> {saving.size}" in str(saving)
    assert words.find(planned=True, headroom=BUDGET // 2, solver_seconds=5.0).size < words.find(recompute=True).size
    counter = [0]
    words_step = words.step
    words.step = lambda batch: (counter.append(1), words_step(batch))[1]  # type: ignore[method-assign]
    words.find(keep=(counter,))
    assert counter == [0]


def test_options_that_make_no_sense_are_refused() -> None:
    words = Words()
    for options, text in (
        ({"mode": "best"}, "mode is 'best'"),
        ({"mode": "energy"}, "needs the power"),
        ({"mode": "energy", "watts": -1.0}, "watts is -1.0"),
        ({"max_size": 0}, "max_size is 0"),
        ({"effective": 0}, "effective is 0"),
        ({"budget": "min"}, "budget='min'"),
    ):
        with pytest.raises(ConfigError, match=text):
            words.find(**options)
    lazy = nn.LazyLinear(4)
    with pytest.raises(ConfigError, match="lazy"):
        find_max_batch_size(lambda b: None, words.make, lazy, [], budget=BUDGET)
    with optimize(words.model, words.optimizer, budget=BUDGET, **QUIET), pytest.raises(AlreadyAttachedError):
        words.find()


def test_without_memopt_sizes_are_found_by_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    words = Words()
    found = words.find(planned=True)
    assert found.confirmed_peak_nbytes <= BUDGET and not found.planned and found.why
