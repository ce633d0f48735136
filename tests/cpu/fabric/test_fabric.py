"""Loops that Fabric allows: methods of a LightningModule, compiled models, several models, a GradScaler, early updates; when a
run begins and ends, and what it says."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.wrappers import _FabricModule

from lightning_memopt import MemOptFabricDDPStrategy, MemOptFabricStrategy
from lightning_memopt.errors import BudgetError, ConfigError, InfeasibleError, UpdatesInBackwardError
from tests.cpu.lib.fabrics import QUIET, fabric_of, within
from tests.cpu.lib.loops import Batch, batches, installed, leaves_nothing, loss_of, small

Train = Callable[[Fabric], list[Tensor]]
TRAININGS: dict[str, Train] = {}


def training(train: Train) -> Train:
    TRAININGS[train.__name__] = train
    return train


def adam(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def steps(fabric: Fabric, model: Any, optimizer: Any, loss: Callable[..., Tensor] = loss_of) -> list[Tensor]:
    torch.manual_seed(1)
    losses = []
    for batch in batches(6):
        losses.append(loss(model, batch))
        fabric.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    return [t.detach() for t in losses] + [t.clone() for t in model.state_dict().values()]


def planned(fabric: Any) -> None:
    """Within a budget, every model that the loop still has got a plan that rebuilds something."""
    if isinstance(fabric.strategy, MemOptFabricStrategy):
        runs = [model.run for model in fabric.strategy._models._models]  # type: ignore[union-attr]
        assert runs and all(run.plan.predicted.rebuilt_ops for run in runs)


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small(depth=5)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)


@training
def methods_of_a_lightning_module(fabric: Fabric) -> list[Tensor]:
    """The module itself is never called; a copy of Fabric's wrapper runs with its own weights."""
    module = Lit()
    model, optimizer = fabric.setup(module, adam(module))
    found = steps(fabric, model, optimizer, lambda model, batch: model.training_step(batch, 0))
    planned(fabric)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data.zero_()
    return [*found, other.training_step(batches(1)[0], 0).detach()]


@training
def set_up_one_by_one(fabric: Fabric) -> list[Tensor]:
    module = small(depth=5)
    optimizer = fabric.setup_optimizers(adam(module))
    model = fabric.setup_module(module)
    found = steps(fabric, model, optimizer)
    planned(fabric)
    return found


@training
def two_models(fabric: Fabric) -> list[Tensor]:
    """A GAN's order: each model has its own optimizer, and each is called in the other's step."""
    torch.manual_seed(2)
    one, other = small(depth=4), small(1, depth=4)
    one, first = fabric.setup(one, adam(one))
    other, second = fabric.setup_module(other), fabric.setup_optimizers(adam(other))
    losses = []
    for x, y in batches(8):
        losses.append((one(x) - other(x).detach()).square().mean())
        fabric.backward(losses[-1])
        first.step()
        first.zero_grad()
        losses.append(loss_of(other, (x, y)) + (other(x) - one(x).detach()).square().mean())
        fabric.backward(losses[-1])
        second.step()
        second.zero_grad()
    planned(fabric)
    return [t.detach() for t in losses] + [t.clone() for model in (one, other) for t in model.state_dict().values()]


@training
def a_closure(fabric: Fabric) -> list[Tensor]:
    model = small(depth=5)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in batches(6):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            fabric.backward(loss)
            return loss

        optimizer.step(closure)
    planned(fabric)
    return [t.clone() for t in model.state_dict().values()]


@training
def the_same_model_again(fabric: Fabric) -> list[Tensor]:
    """Set up a second time, with another optimizer, while the first wrapper is still there."""
    module = small(depth=5)
    model, optimizer = fabric.setup(module, adam(module))
    found = steps(fabric, model, optimizer)
    again, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    found += steps(fabric, again, optimizer)
    if isinstance(fabric.strategy, MemOptFabricStrategy):
        assert fabric.strategy.run().plan is not None and fabric.strategy.run() is fabric.strategy.run(again)
    return found


@pytest.mark.parametrize("name", TRAININGS)
def test_same_state(name: str) -> None:
    """Bit-equal to Fabric's own strategy; afterwards nothing is installed."""
    expected = TRAININGS[name](fabric_of("auto"))
    with leaves_nothing():
        fabric = fabric_of(within())
        found = TRAININGS[name](fabric)
        fabric.strategy.close()  # type: ignore[attr-defined]
    assert all(map(torch.equal, expected, found)) and len(expected) == len(found)
    assert "training_step" not in vars(_FabricModule)


def test_a_compiled_model_is_exact_and_its_regions_run_ops_again() -> None:
    """Fabric compiles it again behind its strategy's back; the run is of the module that Fabric calls."""

    def train(fabric: Fabric) -> list[Tensor]:
        torch._dynamo.reset()
        module = small(depth=3)
        model, optimizer = fabric.setup(torch.compile(module, backend="aot_eager"), adam(module))
        state = steps(fabric, model, optimizer)
        if hasattr(fabric.strategy, "run"):
            assert "1 of 1 compiled regions run ops again" in fabric.strategy.run().status().compiled
        return state

    expected, within_budget = train(fabric_of("auto")), train(fabric_of(within()))
    assert all(map(torch.equal, expected, within_budget))


@pytest.mark.parametrize("device_scale", [2.0**10, 2.0**126], ids=["finite", "infinite"])
def test_a_grad_scaler(device_scale: float) -> None:
    """16-mixed with a GradScaler: a step whose gradients are infinite is left out, as without us."""

    def train(strategy: Any) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=device_scale, growth_interval=2)  # type: ignore[attr-defined]
        fabric = fabric_of(strategy, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
        module = small(depth=5)
        model, optimizer = fabric.setup(module, adam(module))
        return [*steps(fabric, model, optimizer), torch.tensor(scaler.get_scale())]

    assert all(map(torch.equal, train("auto"), train(within())))


def test_early_updates_are_exact_where_the_loop_marks_them_and_refused_where_not() -> None:
    """`run(model).last_backward()` marks the last backward; with "always" a loop without it ends before anything is updated."""

    def train(fabric: Fabric, mark: bool) -> list[Tensor]:
        module = small(depth=5)
        model, optimizer = fabric.setup(module, adam(module))
        torch.manual_seed(1)
        for batch in batches(6):
            loss = loss_of(model, batch)
            if mark:
                with fabric.strategy.run(model).last_backward():  # type: ignore[attr-defined]
                    fabric.backward(loss)
            else:
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return [t.clone() for t in model.state_dict().values()]

    expected = train(fabric_of("auto"), mark=False)
    for mode in ("auto", "always"):
        assert all(map(torch.equal, expected, train(fabric_of(within(optimizer_in_backward=mode)), mark=True)))
    assert all(map(torch.equal, expected, train(fabric_of(within(optimizer_in_backward="auto")), mark=False)))
    with pytest.raises(UpdatesInBackwardError, match=r"last_backward\(\)"):
        train(fabric_of(within(optimizer_in_backward="always")), mark=False)


def test_the_table_comes_once_when_the_loop_lets_go_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """A model that nobody can call any longer is not kept in memory by us; its run ends with its table."""
    fabric = fabric_of(within(verbose=True))
    module = small(depth=5)
    model, optimizer = fabric.setup(module, adam(module))
    with caplog.at_level("INFO"):
        steps(fabric, model, optimizer)
        run = fabric.strategy.run()  # type: ignore[attr-defined]
        assert run is fabric.strategy.run(model) and run.status().phase == "planned"  # type: ignore[attr-defined]
        assert "unmodified peak" in run.report() and run.frontier()
        assert "plan in force" in caplog.text and "unmodified peak" not in caplog.text
        del run, model, optimizer, module
        gc.collect()
        fabric.strategy.close()  # type: ignore[attr-defined]
    assert caplog.text.count("unmodified peak") == 1
    assert installed()[:2] == [None, []]


def test_an_optimizer_that_fabric_does_not_know() -> None:
    """The loop trains plainly, and one warning says why there is no plan."""

    def train(fabric: Fabric) -> list[Tensor]:
        model = fabric.setup(module := small(depth=5))
        return steps(fabric, model, adam(module))

    expected = train(fabric_of("auto"))
    with pytest.warns(UserWarning, match="no plan for what AdamW trains") as warned:
        found = train(fabric_of(within()))
    assert all(map(torch.equal, expected, found)) and sum("MemOpt" in str(w.message) for w in warned) == 1


def test_a_plan_is_saved_and_used(tmp_path: Any) -> None:
    fabric = fabric_of(within())
    model, optimizer = fabric.setup(module := small(depth=5), adam(module))
    expected = steps(fabric, model, optimizer)
    fabric.strategy.run().save_plan(str(tmp_path / "plan.json"))  # type: ignore[attr-defined]
    fabric.strategy.close()  # type: ignore[attr-defined]
    fabric = fabric_of(within("1GiB", plan=tmp_path / "plan.json"))
    model, optimizer = fabric.setup(module := small(depth=5), adam(module))
    assert all(map(torch.equal, expected, steps(fabric, model, optimizer)))
    assert fabric.strategy.run().status().frontier is None, "nothing was solved"  # type: ignore[attr-defined]


def test_what_is_refused() -> None:
    with pytest.raises(BudgetError):
        MemOptFabricStrategy(budget="much")
    with pytest.raises(TypeError, match="budgets"):
        MemOptFabricStrategy(budgets="1GiB")
    fabric = fabric_of(within())
    with pytest.raises(ConfigError, match="0 models"):
        fabric.strategy.run()  # type: ignore[attr-defined]
    evaluated = fabric.setup(small())
    with pytest.raises(ConfigError, match="no run of this"):
        fabric.strategy.run(evaluated)  # type: ignore[attr-defined]
    fabric = fabric_of(within(1000))
    model, optimizer = fabric.setup(module := small(), adam(module))
    with pytest.raises(InfeasibleError, match="below the bytes"):
        steps(fabric, model, optimizer)
    fabric = fabric_of(within(optimizer_in_backward="always"))
    with pytest.raises(UpdatesInBackwardError, match="LBFGS"):
        fabric.setup(module := small(), torch.optim.LBFGS(module.parameters()))
    with pytest.raises(ConfigError, match="0 models"):
        fabric.strategy.run()  # type: ignore[attr-defined]
    assert installed()[:2] == [None, []]


def test_strings_and_several_devices() -> None:
    """Several devices, or nodes, are never trained on as one: the strategy becomes DDP, as Fabric's "auto" does."""
    for strategy, options, cls in (
        ("memopt", {}, MemOptFabricStrategy),
        ("memopt", {"devices": 2}, MemOptFabricDDPStrategy),
        ("memopt_ddp", {"devices": 2}, MemOptFabricDDPStrategy),
        (MemOptFabricStrategy(**QUIET), {"devices": 1, "num_nodes": 2}, MemOptFabricDDPStrategy),
    ):
        fabric = fabric_of(strategy, **options)
        assert type(fabric.strategy) is cls
        assert fabric.world_size == options.get("devices", 1) * options.get("num_nodes", 1)
        assert type(pickle.loads(pickle.dumps(fabric.strategy))) is cls
    assert fabric.strategy.memopt_config.verbose is False

    class Own(MemOptFabricStrategy):
        pass

    for strategy, why in ((MemOptFabricStrategy(device="cpu"), "device='cpu' was given"), (Own(), "a class of your own")):
        with pytest.raises(MisconfigurationException, match=f"trains on one device, because .*{why}.*2 devices and 1 nodes"):
            fabric_of(strategy, devices=2)
    with pytest.raises(RuntimeError, match=r"you must call `\.launch\(\)`"):
        fabric.setup(small())
