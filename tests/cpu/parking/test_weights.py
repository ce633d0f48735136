"""Frozen weights that are on the device only while their module runs: bits, bytes, readers, writers, and what goes wrong."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

from lightning_memopt import optimize
from lightning_memopt.errors import InfeasibleError, OffloadError
from lightning_memopt.integrations.to_device import to_device
from lightning_memopt.native.engine import loaded, without
from lightning_memopt.plan import lower
from lightning_memopt.plan.files import read_plan, write_plan
from lightning_memopt.plan.validate import validate
from lightning_memopt.record import beneath_calls, watching
from lightning_memopt.runtime import install_native, parked_weights
from lightning_memopt.runtime.tiers.shelf import Shelf, is_away
from lightning_memopt.runtime.weight_memory import WeightMemory, may_be_parked
from tests.cpu.lib.engines import elements
from tests.cpu.lib.parked import parked_of
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Known, given

MIB = 1 << 20
WORDS, WIDTH = 500, 128


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    given(monkeypatch, Known())
    install_native(lambda line: None)
    if loaded() is None:
        pytest.skip("no C++ compiler: frozen weights are not parked, and a line says so")
    yield
    gc.collect()
    with beneath_calls({}, print):  # lets go of models that `to_device` has parked
        gc.collect()


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 4."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(n_in, n_out)
        self.down = nn.Parameter(torch.randn(4, n_in) / 50)
        self.up = nn.Parameter(torch.randn(n_out, 4) / 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + (x @ self.down.T) @ self.up.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = Adapted(WIDTH, 4 * WIDTH)
        self.narrow = Adapted(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(gelu(self.wide(self.norm(x)))))


class Model(nn.Module):
    """Of 500 words; only adapters are trained. Frozen weights have 2.5 MiB."""

    def __init__(self, again: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.again = again
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for name, p in self.named_parameters():
            p.requires_grad_(name.endswith((".down", ".up")))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def model_of(**kinds: bool) -> Model:
    torch.manual_seed(0)
    return Model(**kinds)


class Trained:
    """The weights and losses of a run, and its status (None without a budget)."""

    def __init__(
        self,
        budget: Any,
        steps: int = 6,
        model: Model | None = None,
        meanwhile: Callable[[Model, int], object] = lambda model, step: None,
        autocast: bool = False,
        **options: Any,
    ) -> None:
        model = model_of() if model is None else model
        optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        options = {"offload": "disk", "max_slowdown": 1e6, "optimizer_in_backward": "never"} | options
        self.losses: list[float] = []
        self.status: Any = None
        self.graph: Any = None
        options |= {} if budget is None else {"budget": budget}
        planned = bool({"budget", "plan"} & options.keys())
        with optimize(model, optimizer, **options) if planned else contextlib.nullcontext() as run:
            for step in range(steps):
                words = torch.randint(0, WORDS, (4, 16))
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
                loss.backward()
                optimizer.step()
                self.losses.append(loss.item())
                meanwhile(model, step)
            if planned:
                self.status = run.status()
                if run.plan is not None:
                    self.graph = run.session._plan_cache.main.program.graph
        self.bits = elements([p.detach() for p in model.parameters()])
        self.resizable = all(p.untyped_storage().resizable() and not is_away(p) for p in model.parameters())

    def is_as(self, plain: Trained) -> bool:
        return self.losses == plain.losses and self.bits == plain.bits and self.resizable


KINDS: dict[str, dict[str, bool]] = {"plain": {}, "with checkpoints": {"again": True}, "tied": {"tied": True}, "autocast": {}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_plan(kind: str) -> None:
    """Bits are the plain ones, with dropout. The measured peak is as predicted, to 4 KiB, and far below that without."""
    autocast = kind == "autocast"
    plain = Trained(None, model=model_of(**KINDS[kind]), autocast=autocast)
    without_, with_ = (
        Trained("min", model=model_of(**KINDS[kind]), autocast=autocast, offload=offload) for offload in ("none", "disk")
    )
    assert with_.is_as(plain) and without_.is_as(plain)
    plan = with_.status.plan
    nbytes = sum(unit.nbytes for unit in plan.weights)
    assert {unit.module for unit in plan.weights} >= {f"blocks.{i}" for i in range(4)} and nbytes >= 2 * MIB
    assert without_.status.plan.budget_nbytes - plan.budget_nbytes >= MIB
    assert 0 <= with_.status.predicted_peak_nbytes - with_.status.measured_peak_nbytes <= 4096
    assert with_.status.measured_peak_nbytes <= plan.budget_nbytes
    assert ("embedding" in {unit.module for unit in plan.weights}) == (kind != "tied")  # the head reads it, too


def test_a_budget_below_the_weights() -> None:
    """It is kept from the first planned step on. The weights are away before the first step runs: they alone exceed it."""
    plain = Trained(None)
    budget = Trained("min").status.plan.budget_nbytes + MIB // 4
    weights_nbytes = sum(p.nbytes for p in model_of().parameters())
    assert budget < weights_nbytes
    with pytest.raises(InfeasibleError, match="below the bytes"):
        Trained(budget, offload="none")
    kept = Trained(budget)
    assert kept.is_as(plain) and kept.status.measured_peak_nbytes <= budget
    assert 0 <= kept.status.predicted_peak_nbytes - kept.status.measured_peak_nbytes <= 4096


def test_no_more_is_parked_than_the_budget_needs() -> None:
    least, most = (Trained("min", offload=offload).status.plan.budget_nbytes for offload in ("disk", "none"))
    half = Trained((least + most) // 2)
    assert 0 < len(half.status.plan.weights) < 6 and half.is_as(Trained(None))
    assert half.status.measured_peak_nbytes <= (least + most) // 2
    assert not Trained(64 * MIB).status.plan.weights


def test_a_plan_is_valid_and_bounded() -> None:
    """By the validator, which counts bytes by code of its own. Copies are in the price, and the bound is no more than it."""
    least, most = (Trained("min", offload=offload).status.plan.budget_nbytes for offload in ("disk", "none"))
    for budget in (least, (least + most) // 2):
        found = Trained(budget)
        plan = found.status.plan
        report = validate(found.graph, plan.lives, lower(found.graph, plan.lives))
        assert not report.problems and report.peak_nbytes == plan.predicted.peak_nbytes
        assert plan.predicted.seconds >= sum(unit.seconds for unit in plan.weights) > 0
        assert plan.lower_bound_seconds <= plan.predicted.seconds
        assert plan.predicted.moved_nbytes >= sum(len(unit.beside) * unit.nbytes for unit in plan.weights)
        windowed = {t.name for t in found.graph.tensors if t.windows}
        assert all(f"{unit.module}." in " ".join(windowed) for unit in plan.weights)


def test_a_plan_file_parks_weights(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = Trained("min")
    write_plan(path, found.status.plan, found.graph)
    read, graph = read_plan(path)
    assert read.weights == found.status.plan.weights and read.weights
    again = Trained(None, model=model_of())
    model = model_of()
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    away = []
    losses = []
    with optimize(model, optimizer, plan=path, offload="disk", optimizer_in_backward="never"):
        for _ in range(6):
            words = torch.randint(0, WORDS, (4, 16))
            optimizer.zero_grad()
            loss = cross_entropy(model(words).flatten(0, 1), words.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            away.append(sum(is_away(p) for p in model.parameters()))
    assert losses == again.losses and away[0] > 15 and len(set(away)) == 1
    assert graph.windowed


# -- whoever reads or writes -----------------------------------------------------------------------


def norms(model: Model, step: int) -> list[float]:
    return [p.detach().norm().item() for p in model.parameters()]


def saves(model: Model, step: int) -> object:
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: t * 1.0 for name, t in state.items()})
    return copy.deepcopy(model)


def merges(model: Model, step: int) -> None:
    """The adapter of a block becomes a part of its frozen weight."""
    if step == 3:
        with torch.no_grad():
            adapted = model.blocks[2].wide
            adapted.frozen.weight += adapted.up @ adapted.down
            adapted.up.zero_()


def writes_data(model: Model, step: int) -> None:
    model.blocks[1].narrow.frozen.weight.data.mul_(1.01)  # moves no version counter that anybody sees


def evaluates(model: Model, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.long))
    model.train()


OTHERS: dict[str, Callable[[Model, int], object]] = {
    "norms": norms,
    "saves": saves,
    "merges": merges,
    "writes data": writes_data,
    "evaluates": evaluates,
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_loop_reads_and_writes_weights_that_are_away(other: str) -> None:
    plain, parked = (Trained(budget, meanwhile=OTHERS[other]) for budget in (None, "min"))
    assert parked.status.plan.weights and parked.is_as(plain)


def test_a_weight_that_is_written_in_its_module_is_written_back() -> None:
    """`X2`: what the module wrote is there when it runs again."""

    class Shrinking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(x)

    module, plain = (nn.Sequential(Shrinking(8, 8)).requires_grad_(False) for _ in range(2))
    plain.load_state_dict(module.state_dict())
    with parked_of(module):
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.equal(module(x), plain(x)) and is_away(module[0].weight)
    assert torch.equal(module[0].weight, plain[0].weight) and not is_away(module[0].weight)


def test_weights_are_there_in_their_module_alone() -> None:
    """In forward and backward one unit is on the device at a time, and none when backward is over, or has raised."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).requires_grad_(False)
    plain = copy.deepcopy(model)
    seen: list[list[int]] = []

    def look(*_: Any) -> None:
        seen.append([i for i, layer in enumerate(model) if not is_away(layer.weight)])

    with parked_of(model) as parked:
        for layer in model:
            layer.register_forward_hook(look)
        x = torch.randn(4, 32, requires_grad=True)
        out = model(x)
        assert seen == [[0], [1], [2], [3]]
        seen.clear()
        out.grad_fn.register_hook(look)
        out.sum().backward()
        assert seen == [[3]] and all(is_away(layer.weight) for layer in model)
        assert parked.moved_nbytes == 2 * sum(p.nbytes for p in model.parameters())
        seen.clear()
        broken = model(x)
        broken.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            broken.sum().backward()
    grad = x.grad.clone()
    x.grad = None
    plain(x).sum().backward()
    assert torch.equal(grad, x.grad) and not any(is_away(p) for p in model.parameters())


def test_nobody_is_told_that_weights_come_and_go() -> None:
    """A weight whose address was taken would be read from unknown memory: nothing that it helps to make would be dropped."""
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    told: list[Any] = []
    seams, listener = watching(lambda *each: told.append(each), lambda *each: told.append(each), None)
    with parked_of(model), seams.listening(listener):
        model(torch.randn(2, 32, requires_grad=True)).sum().backward()
        assert not told and is_away(model[0].weight)
        model[0].bias.data_ptr()
        assert told  # the listener works


# -- models that are larger than the device -------------------------------------------------------


@pytest.mark.parametrize("budget", ["min", 64 * MIB])
def test_a_model_that_never_was_on_the_device(budget: Any) -> None:
    """Weights are away before, between and after runs. A run whose budget has room for them has them on the device."""
    plain = Trained(None)
    torch.manual_seed(0)
    model = to_device(Model(), "cpu")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    large = [p for p in frozen if p.nbytes > 4096]
    assert all(map(is_away, large)) and model(torch.zeros(1, 2, dtype=torch.long)).isfinite().all()
    torch.manual_seed(0)
    model_of()  # draws what the plain run draws
    found = Trained(budget, model=model)
    assert bool(found.status.plan.weights) == (budget == "min") and all(map(is_away, large))
    assert (found.losses, found.bits) == (plain.losses, plain.bits)


class Quantized(nn.Parameter):
    """As weights of bitsandbytes are: a class of its own, whose bytes are all in its storage."""

    scale = 0.02

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Dequantizing(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        numbers = torch.randint(-99, 99, (n_out, n_in), dtype=torch.int8)
        self.weight = Quantized(numbers, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.weight.scale).T


def quantized() -> Model:
    model = model_of()
    for module in model.modules():
        if isinstance(module, Adapted):
            module.frozen = Dequantizing(*reversed(module.frozen.weight.shape))  # type: ignore[assignment]
    return model


def test_weights_of_a_class_whose_bytes_are_plain() -> None:
    plain = Trained(None, model=quantized())
    stays, parked = (Trained("min", model=quantized(), offload=offload) for offload in ("none", "disk"))
    assert parked.is_as(plain) and stays.is_as(plain)
    units = {unit.module: unit.nbytes for unit in parked.status.plan.weights}
    assert all(units[f"blocks.{i}"] >= 8 * WIDTH * WIDTH for i in range(4))
    assert 0 <= parked.status.predicted_peak_nbytes - parked.status.measured_peak_nbytes <= 4096
    assert stays.status.plan.budget_nbytes - parked.status.plan.budget_nbytes >= 3 * 8 * WIDTH * WIDTH


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_bitsandbytes(bits: int) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    def build() -> Model:
        model = model_of()
        for module in model.modules():
            if isinstance(module, Adapted):
                n_out, n_in = module.frozen.weight.shape
                kinds = dict(bias=False)
                made = (
                    Linear4bit(n_in, n_out, **kinds)
                    if bits == 4
                    else Linear8bitLt(n_in, n_out, has_fp16_weights=False, **kinds)
                )
                made.load_state_dict({"weight": module.frozen.weight.detach()})
                module.frozen = made.to("cpu").requires_grad_(False)
        return model

    plain = Trained(None, model=build())
    found = Trained("min", model=build())
    assert found.is_as(plain) and len(found.status.plan.weights) >= 4
    more = found.status.predicted_peak_nbytes - found.status.measured_peak_nbytes
    assert 0 <= more <= 4096 or (bits == 8 and more > 0)  # with 8 bits, the module gives its weight another storage


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for which there is no room stay on the device, a line says so, and training goes on."""
    plain, taken = Trained(None), []

    class Full(Shelf):
        def put(self, flat: Tensor, offset: int, what: str) -> memoryview:
            taken.append(flat.numel())
            if len(taken) == 12:
                raise OffloadError("no space left")
            return super().put(flat, offset, what)

    monkeypatch.setattr(parked_weights, "Shelf", Full)
    with listening() as said:
        found = Trained("min")
        text = said.taken()
    assert found.is_as(plain) and "weights that the plan parks stay on the device: no space left" in text


@pytest.mark.parametrize("what", ["fetch", "drop"])
def test_an_interrupt_at_any_copy_loses_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).requires_grad_(False)
    plain = elements(model.parameters())
    original = getattr(WeightMemory, what)
    for k in range(1, 14):
        left = [k]

        def interrupted(self: Any, *how: bool, left: list[int] = left) -> Any:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return original(self, *how)

        with parked_of(model):
            monkeypatch.setattr(WeightMemory, what, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                model(torch.randn(2, 32, requires_grad=True)).sum().backward()
            monkeypatch.undo()
            out = model(torch.randn(2, 32, requires_grad=True))
            out.sum().backward()
        assert elements(model.parameters()) == plain and not any(is_away(p) for p in model.parameters()), k


def test_a_plan_file_on_a_machine_without_a_compiler(tmp_path: Path) -> None:
    """A line says that its weights stay, and bits are the plain ones."""
    path = tmp_path / "plan.json"
    found = Trained("min")
    write_plan(path, found.status.plan, found.graph)
    with without(), listening() as said:
        again = Trained(None, plan=path)
        text = said.taken()
    assert again.is_as(Trained(None)) and "stay on the device: the native engine is not there" in text


def test_weights_that_were_parked_before_and_that_no_plan_counts_on() -> None:
    torch.manual_seed(0)
    model = to_device(Model(), "cpu")
    torch.manual_seed(0)
    model_of()
    with listening() as said:
        found = Trained(64 * MIB, model=model, offload="none")
        text = said.taken()
    assert found.losses == Trained(None).losses
    assert text.count("stay parked, as to_device() left them") == 1 and "set offload='disk'" in text


def test_nothing_is_parked_of_memory_that_others_have() -> None:
    flat = torch.zeros(2, 8)
    shared = torch.zeros(8).share_memory_()
    views = nn.Parameter(flat[0], requires_grad=False)
    assert not any(map(may_be_parked, (views, shared, torch.zeros(8)._lazy_clone())))
    assert may_be_parked(nn.Parameter(torch.zeros(8), requires_grad=False))
