"""What `prepare` does with models, optimizers and Accelerators in the order and number in which people give them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate.utils import find_executable_batch_size  # noqa: E402

import lightning_memopt  # noqa: E402
from lightning_memopt.errors import InfeasibleError, UnsupportedError, UpdatesInBackwardError  # noqa: E402
from lightning_memopt.integrations import accelerate as front  # noqa: E402
from tests.cpu.lib.launched import same  # noqa: E402
from tests.cpu.lib.loops import batches, counted_nbytes, loss_of, small  # noqa: E402
from tests.cpu.lib.prepared import Loop, fresh, run_of, trained  # noqa: E402
from tests.cpu.lib.said import Said  # noqa: E402

OPTIONS: dict[str, Any] = dict(budget="min", profile_steps=2, verbose=False)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def steps(accelerator: Any, model: Any, optimizer: Any, count: int = 6) -> list[Tensor]:
    losses = []
    for batch in batches(count):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def both(use: Callable[[Any, Callable[..., Any]], Any], **options: Any) -> Any:
    """What `use(accelerator, prepare)` returns is the same with and without plans. Returns the planned Accelerator."""
    plain = fresh()
    torch.manual_seed(3)
    expected = use(plain, plain.prepare)
    planned = fresh()
    torch.manual_seed(3)
    found = use(planned, lambda *objects: front.prepare(planned, *objects, **OPTIONS | options))
    assert same(expected, found)
    return planned


def plans(accelerator: Any) -> list[int]:
    """For each open run, how many ops its plan runs again; -1 without a plan."""
    watched = front._process.find(accelerator)
    found = [] if watched is None else [run.plan for run in watched.runs.values()]
    return [-1 if plan is None else plan.predicted.rebuilt_ops for plan in found]


def test_the_public_name_is_there_without_accelerate_being_imported() -> None:
    assert lightning_memopt.accelerate.prepare is front.prepare


def test_objects_stay_what_they_are() -> None:
    """Types, names, copies and pickles are those of the plain objects, while a plan is in force."""
    accelerator = fresh()
    own = small()
    model, optimizer = front.prepare(accelerator, own, adam(own), **OPTIONS)
    steps(accelerator, model, optimizer)
    assert plans(accelerator)[0] > 0
    assert model is own and accelerator.unwrap_model(model) is own and type(model) is type(small())
    assert list(model.state_dict()) == list(small().state_dict())
    assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    restored = [torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    x = batches(1)[0][0]
    expected = model.eval()(x)
    assert all(torch.equal(twin.eval()(x), expected) for twin in restored)


def test_optimizer_and_model_are_prepared_apart() -> None:
    def use(accelerator: Any, prepare: Callable[..., Any]) -> list[Any]:
        own = small()
        optimizer = prepare(adam(own))
        model = prepare(own)
        return [*steps(accelerator, model, optimizer), model.state_dict()]

    assert plans(both(use))[0] > 0


def test_single_methods_prepare_as_well() -> None:
    front._install()

    def use(accelerator: Any, prepare: Callable[..., Any]) -> list[Any]:
        own = small()
        model, optimizer = accelerator.prepare_model(own), accelerator.prepare_optimizer(adam(own))
        twin = accelerator.prepare_model(small(1), evaluation_mode=True)
        return [*steps(accelerator, model, optimizer), model.state_dict(), twin.state_dict()]

    plain = fresh()
    expected = use(plain, plain.prepare)
    front.watch(lightning_memopt.MemOptConfig(**OPTIONS))
    planned = fresh()
    assert same(expected, use(planned, planned.prepare))
    assert len(plans(planned)) == 1 and plans(planned)[0] > 0


def test_a_model_without_an_optimizer_is_left_alone() -> None:
    accelerator = fresh()
    teacher, _ = front.prepare(accelerator, small(), torch.utils.data.DataLoader(range(4)), **OPTIONS)
    loss_of(teacher, batches(1)[0]).backward()
    assert plans(accelerator) == []


def test_a_second_optimizer_for_a_part() -> None:
    """One model, two optimizers, given in two calls."""

    def use(accelerator: Any, prepare: Callable[..., Any]) -> list[Any]:
        own = small()
        head, rest = own.layers[0], [p for n, p in own.named_parameters() if not n.startswith("layers.0")]
        model, first = prepare(own, torch.optim.SGD(rest, 0.1))
        second = prepare(torch.optim.Adam(head.parameters()))
        for batch in batches(6):
            accelerator.backward(loss_of(model, batch))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return [model.state_dict()]

    planned = both(use)
    assert len(plans(planned)) == 1 and plans(planned)[0] > 0


def test_a_gan() -> None:
    """Two models and two optimizers: a plan each within one budget."""

    def use(accelerator: Any, prepare: Callable[..., Any]) -> list[Any]:
        layers = lambda last: nn.Sequential(  # noqa: E731
            *(m for _ in range(4) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())), nn.Linear(32, last)
        )
        g, d = layers(32), layers(1)
        g, d, og, od = prepare(g, d, adam(g), adam(d))
        losses = []
        for i in range(12):
            real = torch.randn(64, 32, generator=torch.Generator().manual_seed(i))
            fake = g(torch.randn(64, 32))
            loss = nn.functional.softplus(-d(real)).mean() + nn.functional.softplus(d(fake.detach())).mean()
            accelerator.backward(loss)
            od.step()
            od.zero_grad()
            loss = nn.functional.softplus(-d(fake)).mean()
            accelerator.backward(loss)
            og.step()
            og.zero_grad()
            od.zero_grad()
            losses.append(loss.detach())
        return [losses, g.state_dict(), d.state_dict(), torch.rand(2)]

    found = plans(both(use))
    assert len(found) == 2 and max(found) > 0
    with pytest.raises(UpdatesInBackwardError, match="several models"):
        both(use, optimizer_in_backward="always")


def test_freed_and_prepared_again(said: Said) -> None:
    """`free_memory` ends the run and prints its table once; nothing holds the model; the next model has a plan of its own."""
    front._install()

    def use(accelerator: Any, prepare: Callable[..., Any]) -> list[Any]:
        found = []
        for seed in (1, 2):
            own = small(seed)
            model, optimizer = prepare(own, adam(own))
            found += steps(accelerator, model, optimizer)
            model, optimizer = accelerator.free_memory(model, optimizer)
            gone = weakref.ref(own)
            del own
            gc.collect()
            assert gone() is None
        return found

    accelerator = both(use, verbose=True)
    assert plans(accelerator) == [] and said.taken().count("measured peak") == 2
    accelerator.end_training()
    front.end()
    assert said.taken() == ""


def test_an_accelerator_that_nobody_holds() -> None:
    """Its runs end when the next Accelerator prepares."""
    accelerator = fresh()
    own = small()
    front.prepare(accelerator, own, adam(own), **OPTIONS)
    gone = weakref.ref(own)
    del accelerator, own
    gc.collect()
    other = small()
    accelerator = accelerate.Accelerator(cpu=True)
    front.prepare(accelerator, other, adam(other), **OPTIONS)
    gc.collect()
    assert gone() is None and len(front._process.watched) == 1


def test_a_model_moves_to_the_next_accelerator() -> None:
    own = small()
    first, second = fresh(), accelerate.Accelerator(cpu=True)
    front.prepare(first, own, adam(own), **OPTIONS)
    model, optimizer = front.prepare(second, own, adam(own), **OPTIONS)
    steps(second, model, optimizer)
    assert plans(first) == [] and plans(second)[0] > 0


@pytest.mark.parametrize("frees", [False, True])
def test_a_budget_that_no_plan_keeps_makes_the_batch_smaller(frees: bool) -> None:
    """For `find_executable_batch_size`, an InfeasibleError is a lack of memory, also where the function has closed its run."""
    accelerator = fresh()
    sizes = []

    @find_executable_batch_size(starting_batch_size=800)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        accelerator.free_memory()
        own = small()
        model, optimizer = front.prepare(accelerator, own, adam(own), budget=budget, profile_steps=1, verbose=False)
        try:
            for batch in batches(8, batch_size):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            assert run_of(accelerator, model).status().measured_peak_nbytes <= budget  # type: ignore[union-attr, operator]
        finally:
            if frees:
                accelerator.free_memory()

    budget = counted_nbytes() + 4_000_000
    train()
    assert len(sizes) > 1 and sizes[-1] < 800


def test_updates_in_backward() -> None:
    """`accelerator.backward` is the last backward before an update where gradients are synchronised; else nothing is early."""
    for loop in (Loop(), Loop(accumulate=3, precision="bf16")):
        plain, planned = trained(loop), trained(loop, budget="min", optimizer_in_backward="always")
        assert same(plain.end, planned.end) and planned.run is not None and planned.run.session._early.learnt  # type: ignore[union-attr]
    with pytest.raises(UpdatesInBackwardError, match="reads gradients"):
        trained(Loop(clip="norm"), budget="min", optimizer_in_backward="always")
    scaled = Loop(scaler=lambda: torch.amp.GradScaler("cpu", init_scale=1024.0))
    with pytest.raises(UpdatesInBackwardError, match="GradScaler"):
        trained(scaled, budget="min", optimizer_in_backward="always")


@pytest.mark.parametrize("clip", ["", "norm"])
def test_a_grad_scaler_that_skips_steps(clip: str) -> None:
    loop = Loop(scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4), clip=clip)
    plain, planned = trained(loop), trained(loop, budget="min")
    assert same(plain.end, planned.end) and planned.run is not None and planned.run.plan is not None


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP", "XLA"])
def test_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = fresh()
    monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType(kind))
    own = small()
    if kind == "FSDP":
        monkeypatch.setattr(accelerator.state, "fsdp_plugin", SimpleNamespace(fsdp_version=1), raising=False)
    with pytest.raises(UnsupportedError, match=f"cannot plan {kind} under Accelerate.*{'FSDP1' if kind == 'FSDP' else ''}"):
        front.prepare(accelerator, own, adam(own), **OPTIONS)
    assert accelerator._models == [] and plans(accelerator) == []


def test_a_model_on_several_devices_is_refused() -> None:
    accelerator = fresh()
    own = small()
    own.hf_device_map = {"embed": 0, "layers": "cpu"}  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="device_map"):
        front.prepare(accelerator, own, adam(own), **OPTIONS)


def test_too_small_a_budget_is_an_error_of_the_loop() -> None:
    accelerator = fresh()
    own = small()
    model, optimizer = front.prepare(accelerator, own, adam(own), budget=1000, verbose=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InfeasibleError):
        steps(accelerator, model, optimizer)
    assert same(before, model.state_dict())
