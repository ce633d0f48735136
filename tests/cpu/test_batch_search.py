"""Searching for a batch size on a device of so many bytes: sizes, trials, everything as it was. Ids: hazards.md, L, P27."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from lightning_memopt import find_max_batch_size, optimize
from lightning_memopt.batching import FromLoader, is_out_of_memory, untouched
from lightning_memopt.batching import batches as batches_module
from lightning_memopt.batching.oom import release
from lightning_memopt.errors import AlreadyAttachedError, ConfigError, InfeasibleError, UnsupportedError
from tests.cpu.harness import same_bits
from tests.cpu.limits import Device
from tests.cpu.loops import CLASSES, LENGTH, QUIET, WORDS, batches, installed, small, step

BUDGET = 500_000
CHECKED: dict[str, Any] = dict(verbose=False)


class Words:
    """A small model, its optimizer and loop body, and batches from a generator of its own."""

    def __init__(self, momentum: float = 0.9, seed: int = 0) -> None:
        self.model = small(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.generator = torch.Generator().manual_seed(1)
        self.sizes: list[int] = []

    def make(self, size: int) -> tuple[Tensor, Tensor]:
        draw = lambda high: torch.randint(0, high, (size, LENGTH), generator=self.generator)  # noqa: E731
        return draw(WORDS), draw(CLASSES)

    def step(self, batch: Any) -> None:
        self.sizes.append(len(batch[0]))
        step(self.model, self.optimizer, batch)

    def find(self, source: Any = None, **options: Any) -> Any:
        options = {"budget": BUDGET, "start": 8, "recompute": False, **options}
        return find_max_batch_size(
            self.step,
            self.make if source is None else source,
            self.model,
            self.optimizer,
            keep=(self.generator, *options.pop("keep", ())),
            **options,
        )

    def state(self) -> list[Any]:
        """All that a search could change, copied."""
        state = self.optimizer.state_dict()
        moments = [t.clone() for s in state["state"].values() for t in s.values()]
        grads = [p.grad for p in self.model.parameters()]
        tensors = [t.clone() for t in self.model.state_dict().values()]
        return [tensors, moments, grads, state["param_groups"], self.generator.get_state(), torch.get_rng_state(),
                random.getstate(), np.random.get_state()[1].tolist(), self.model.training]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same_bits(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def true_maximum(limit: int, low: int, high: int) -> int:
    """By exhaustion: the largest size whose steps in the steady state pass a device of so many bytes, every size tried."""
    fitting = []
    for size in range(low, high):
        words = Words()
        device = Device(limit, [words.model])
        try:
            with device:
                for n in (2, size, size):
                    words.step(words.make(n))
        except torch.OutOfMemoryError:
            break
        fitting.append(size)
    assert fitting and fitting[-1] < high - 1, "the device was never full: the test tests nothing"
    return fitting[-1]


# -- the size ----------------------------------------------------------------------------------------


def test_l1_the_size_is_within_2_percent_of_exhaustive_search_and_then_trains() -> None:
    """One trial step beyond the profile, no OOM on the device meanwhile, and none in the training that follows."""
    words = Words()
    device = Device(BUDGET, [words.model])
    with device:
        found = words.find()
        for _ in range(3):
            words.step(words.make(found.size))
    assert device.errors == 0
    assert (found.trial_steps, found.profile_steps) == (1, 3)
    assert found.confirmed_peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.01)
    assert found.confirmed_peak_bytes <= BUDGET
    true = true_maximum(BUDGET, found.size - 1, found.size + 4)
    assert true / 1.02 - 1 < found.size <= true


def test_l1_with_plans_the_budget_holds_a_larger_one_and_keeps_it_in_training() -> None:
    words = Words()
    plain = words.find().size
    found = words.find(recompute=True)
    assert found.size > 1.5 * plain and found.planned and found.trial_steps == 2
    assert found.confirmed_peak_bytes <= BUDGET
    with optimize(words.model, words.optimizer, budget=BUDGET, **QUIET) as run:
        for _ in range(4):
            words.step(words.make(found.size))
    assert run.session.main.measured_bytes <= BUDGET
    with pytest.raises(InfeasibleError):
        with optimize(words.model, words.optimizer, budget=BUDGET, **QUIET):
            for _ in range(4):
                words.step(words.make(int(found.size * 1.02) + 2))


def test_p27_everything_is_as_it_was_and_training_goes_on_as_if_nothing_had_been() -> None:
    runs = []
    for search in (False, True):
        words = Words()
        torch.manual_seed(5)
        words.step(words.make(8))  # there is optimizer state, and generators have moved
        if search:
            before, objects = words.state(), [id(p) for p in words.model.parameters()]
            for recompute in (False, True):
                words.find(recompute=recompute)
                assert same(before, words.state())
            assert objects == [id(p) for p in words.model.parameters()]
        for _ in range(3):
            words.step(words.make(16))
        runs.append(words.state())
    assert same(*runs)


def test_p27_no_optimizer_state_is_left_where_there_was_none() -> None:
    words = Words()
    words.find()
    assert not words.optimizer.state and words.optimizer.state_dict()["state"] == {}
    assert all(p.grad is None for p in words.model.parameters())


class Square(nn.Module):
    """Nothing that two small sizes show: from 20 samples on it holds the square of the batch for every one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).tanh()
        if len(x) > 20:
            h = h + (h[:, None, :1] * h[None, :, :1]).exp().mean((1, 2))[:, None]
        return h.square().mean()


class Plain:
    """A model on random numbers, SGD; `errors` are raised in its forward."""

    def __init__(self, model: nn.Module, error: Callable[[int], BaseException | None] = lambda n: None) -> None:
        self.model, self.error = model, error
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.tried: list[int] = []

    def step(self, x: Tensor) -> None:
        self.tried.append(len(x))
        error = self.error(len(x))
        if error is not None:
            raise error
        self.model(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def find(self, **options: Any) -> Any:
        options = {"recompute": False, "start": 4, **options}
        return find_max_batch_size(self.step, lambda n: torch.randn(n, 8), self.model, self.optimizer, **options)


def test_what_the_fit_did_not_see_is_found_by_bisection() -> None:
    """The prediction fails in a real step on a device that is full; what remains is found with real steps."""
    plain = Plain(Square())
    device = Device(120_000, [plain.model])
    with device:
        found = plain.find(budget=120_000)
    assert "were predicted" in found.why or "ran out" in found.why
    assert found.confirmed_peak_bytes <= 120_000

    def fits(size: int) -> bool:
        try:
            with Device(120_000, [plain.model]):
                plain.step(torch.randn(size, 8))
        except torch.OutOfMemoryError:
            plain.optimizer.zero_grad()
            return False
        return True

    true = max(size for size in range(found.size, found.size + 8) if fits(size))
    assert true < found.size + 7
    assert true / 1.03 - 1 < found.size <= true


def test_p27_after_running_out_of_memory_live_bytes_are_those_of_the_start() -> None:
    """With the garbage collector off: what a failed trial made is freed by who ran it."""
    plain = Plain(Square())
    device = Device(120_000, [plain.model])
    with device:
        plain.step(torch.randn(4, 8))
        before, hooks = device.live_nbytes(), installed()
        plain.find(budget=120_000)
        assert device.errors > 0, "memory never ran out: the test tests nothing"
        gc.disable()
        try:
            assert device.live_nbytes() == before
        finally:
            gc.enable()
    assert [str(h) for h in installed()[2:]] == [str(h) for h in hooks[2:]]


def test_steps_that_are_another_one_at_every_size_are_bisected() -> None:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(len(x)):
                x = self.linear(x).tanh()
            return x.square().mean()

    plain = Plain(Depth())
    found = plain.find(budget=60_000)
    assert "depends on the batch size" in found.why or "ops" in found.why
    assert found.predicted_peak_bytes is None and found.confirmed_peak_bytes <= 60_000
    assert set(plain.tried) > {found.size}


def test_l2_where_not_even_one_sample_fits_the_error_says_so_and_nothing_has_changed() -> None:
    words = Words()
    words.step(words.make(4))
    before = words.state()
    device = Device(BUDGET, [words.model])
    with device:
        device.limit_nbytes = device.live_nbytes() + 100
        with pytest.raises(InfeasibleError, match=r"not even a batch of 1 fits \(tried 4, 2, 1\)"):
            words.find()
    assert same(before, words.state())
    with pytest.raises(InfeasibleError, match="No batch size fits 20000 bytes"):
        words.find(budget=20_000, recompute=True)
    assert same(before, words.state())


def test_l2_other_errors_are_raised_as_they_are_and_nothing_has_changed() -> None:
    class Mine(Exception):
        pass

    plain = Plain(Square(), lambda n: Mine("no") if n == 4 else None)
    before = [p.clone() for p in plain.model.parameters()]
    with pytest.raises(Mine):
        plain.find(budget=200_000)
    assert same(before, [p.detach() for p in plain.model.parameters()])
    interrupt = Plain(Square(), lambda n: KeyboardInterrupt() if n == 4 else None)
    with pytest.raises(KeyboardInterrupt):
        interrupt.find(budget=200_000, recompute=True)
    assert not interrupt.optimizer.state


# -- data --------------------------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    """So many samples, from the beginning every time."""

    def __init__(self, count: int) -> None:
        self.count, self.reads = count, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.count):
            self.reads += 1
            yield tuple(t[0] for t in batches(1, 1, seed=i)[0])  # type: ignore[misc]


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

    refused = {
        "batch_size=None": DataLoader(data, batch_size=None),
        "has no batch_size to set": DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),  # type: ignore[arg-type]
        "IterableDataset with __len__": DataLoader(Sized(40), batch_size=4),
        "is read once": DataLoader(Once(), batch_size=4),
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


# -- options -----------------------------------------------------------------------------------------


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
    assert words.find(recompute=True, headroom=BUDGET // 2, solver_seconds=5.0).size < words.find(recompute=True).size
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
    found = words.find(recompute=True)
    assert found.confirmed_peak_bytes <= BUDGET and not found.planned and found.why


# -- what is put back --------------------------------------------------------------------------------


class Everything(nn.Module):
    """Keeps all sorts of state in its forward, and not only in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("ema", torch.zeros(4))
        self.calls, self.seen, self.cache, self.names = 0, [1], {"a": torch.ones(2)}, {"x"}
        self.last: deque[int] = deque([1, 2], maxlen=2)
        self.numbers = np.random.default_rng(0)
        self.drawn = random.Random(0)
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["a"] += 1
        self.cache["b"] = x.detach()
        self.names.add("y")
        self.last.append(self.calls)
        self.numbers.random(), self.drawn.random(), torch.rand(1, generator=self.own)
        random.random(), np.random.rand(), torch.rand(1)
        self.ema = self.ema * 0.9 + x.detach().mean(0)
        self.added = True
        return self.norm(self.linear(x))

    def everything(self) -> list[Any]:
        return [
            len(self.state_dict()), *(v.clone() for v in self.state_dict().values()),
            self.calls, list(self.seen), sorted(self.cache), self.cache["a"].clone(), sorted(self.names), list(self.last),
            self.numbers.bit_generator.state, self.drawn.getstate(), self.own.get_state(), hasattr(self, "added"),
            random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), self.linear.training,
        ]  # fmt: skip


def test_l4_attributes_containers_and_generators_are_put_back_in_place() -> None:
    model = Everything()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    x = torch.randn(8, 4)
    model(x).sum().backward()
    before, containers = model.everything(), [id(v) for v in (model.seen, model.cache, model.names, model.last)]
    weight, grad, group = model.linear.weight, model.linear.weight.grad, optimizer.param_groups[0]
    kept = grad.clone()  # type: ignore[union-attr]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with untouched(model, optimizer, schedule):
        for _ in range(2):
            optimizer.step(closure)
            schedule.step()
        model.linear.weight.data = torch.zeros(4, 4)
        model.linear.eval()
        model.norm = nn.BatchNorm1d(4)
        assert group["lr"] < 1
    assert same(before, model.everything())
    assert containers == [id(v) for v in (model.seen, model.cache, model.names, model.last)]
    assert model.linear.weight is weight and weight.grad is grad and torch.equal(grad, kept)  # type: ignore[arg-type]
    assert group["lr"] == 1 and schedule.last_epoch == 0 and not optimizer.state[weight]
    assert group is optimizer.param_groups[0]


def test_l4_views_ties_and_other_layouts_are_put_back() -> None:
    storage = torch.arange(12.0)
    model = nn.Module()
    model.register_buffer("rows", storage.view(3, 4))
    model.register_buffer("part", storage[2:5])
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("nothing", torch.empty(0))
    with untouched(model):
        model.rows.zero_()
        model.sparse.mul_(3)
    assert torch.equal(storage, torch.arange(12.0)) and torch.equal(model.part, storage[2:5])
    assert model.part.data_ptr() == storage[2:].data_ptr()
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))


# -- errors ------------------------------------------------------------------------------------------

OOM: list[BaseException] = [
    torch.OutOfMemoryError("anything"),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("XPU out of memory. Tried to allocate 1.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."),
    RuntimeError("hipblas error: HIPBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("NCCL Error 1: unhandled cuda error, Failed to CUDA calloc async 4 bytes"),
    RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error: Cuda failure 2 'out of memory'"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("CUDA out of memory.", "with two arguments"),
    OSError(12, "Cannot allocate memory"),
]

OTHERS: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
    ValueError("out of memory"),
    OSError(2, "No such file"),
    KeyboardInterrupt(),
    RuntimeError(),
    AssertionError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", OOM, ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}")
def test_l5_errors_that_mean_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("in the user's layer")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("error", OTHERS, ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}")
def test_l5_errors_that_do_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", (OOM[1], OOM[-2]), ids=lambda e: type(e).__name__)
def test_l5_a_search_takes_them_for_what_they_are(error: BaseException) -> None:
    plain = Plain(Square(), lambda n: type(error)(*error.args) if n > 6 else None)
    assert plain.find(budget=1 << 30).size == 6
    with pytest.raises(RuntimeError, match="shapes"):
        Plain(Square(), lambda n: OTHERS[0] if n > 6 else None).find(budget=1 << 30)


def test_l1_frames_of_an_error_keep_no_tensors() -> None:
    refs: list[weakref.ref[Any]] = []

    def fails() -> None:
        x = torch.ones(10)
        refs.append(weakref.ref(x))
        raise MemoryError

    gc.disable()
    try:
        try:
            fails()
        except MemoryError as error:
            held = error
        assert refs[0]() is not None
        release(held)
        assert refs[0]() is None
    finally:
        gc.enable()
