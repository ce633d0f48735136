"""Updates in backward: the parameters of the unmodified run, to the bit; refused by name where that cannot be (F, D5, D7, P19).

Each optimizer meets each feature, in two fits: one with none of them, one with all at once (not the cross product).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.errors import UpdatesInBackwardError
from tests.cpu.early import OPTIMIZERS, counted
from tests.cpu.fits import Manual, Task, assert_same_tree, fit, loader, memopt, outcome, session_of


class Net(nn.Module):
    """Matrices alone, which all optimizers take. The head is tied with the embedding; one matrix is used on some batches."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.seldom = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + nn.functional.dropout(nn.functional.gelu(layer(h)), 0.1)
        return self.head(h if len(x) > 16 else self.seldom(h))


class Learner(Task):
    """`name`: of the optimizer; two groups, one learning rate each; step hooks are counted."""

    def __init__(self, name: str, tied: bool = False, cycle: bool = False) -> None:
        super().__init__()
        self.net = Net(tied)  # type: ignore[assignment]
        self.name, self.cycle, self.steps = name, cycle, 0

    def configure_optimizers(self) -> Any:
        *most, last = self.parameters()
        optimizer = OPTIMIZERS[self.name]([{"params": most}, {"params": [last], "lr": 3e-3}])
        optimizer.register_step_post_hook(self.stepped)
        if not self.cycle:
            return optimizer
        beta = {"cycle_momentum": self.name in ("sgd", "adam", "adamw")}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 2e-2], total_steps=40, **beta)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def stepped(self, *_: Any) -> None:
        self.steps += 1


def ema() -> list[pl.Callback]:
    found = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging").EMAWeightAveraging
    return [found(decay=0.9)]


ALL: dict[str, Any] = {
    "precision": "bf16-mixed",
    "accumulate_grad_batches": 2,
    "task": {"cycle": True, "tied": True},
    "callbacks": ema,
    "resume": True,
}
ALWAYS: dict[str, Any] = dict(optimizer_in_backward="always", profile_steps=1)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return counted(monkeypatch)


def learn(strategy: Any, name: str, saved: Path, **options: Any) -> tuple[pl.Trainer, dict[str, Any]]:
    """The fit and what it leaves; `resume`: from what the plain Trainer saved after its first epoch."""
    options["task"] = {"name": name} | options.get("task", {})
    options |= dict(cls=Learner, data=lambda: loader(count=80, size=24))  # 3 batches and a smaller one, which uses `seldom`
    with torch.random.fork_rng():
        if options.pop("resume", False):
            if strategy == "auto":
                fit(strategy, max_epochs=1, **options).save_checkpoint(saved)
            options["resume"] = saved
        trainer = fit(strategy, max_epochs=3, **options)
        return trainer, outcome(trainer) | {"hooks": trainer.lightning_module.steps}  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "bf16, accumulating, cycle, ema, tied, resumed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p19_exact(name: str, options: dict[str, Any], tmp_path: Path, updates: list[Tensor]) -> None:
    """Weights, optimizer state, rates, metrics, steps and generator of the plain Trainer; with the smallest plan in force."""
    _, plain = learn("auto", name, tmp_path / "saved.ckpt", **options)
    trainer, found = learn(memopt(**ALWAYS), name, tmp_path / "saved.ckpt", **options)
    assert_same_tree(plain, found)
    session, params = session_of(trainer), dict(trainer.lightning_module.named_parameters())  # type: ignore[union-attr]
    assert session.plan is not None and session.plan.predicted.replayed_ops > 0
    assert not session._in_backward.late and len(updates) >= len(params)


class Hooked(Task):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = sum(p.grad is not None for p in self.parameters())


class Backward(Task):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Clipping(Task):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


class Looks(pl.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None: ...


class Scaled(pl.plugins.MixedPrecision):
    """16-mixed, as far as the CPU lets it be built."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def with_optimizer(make: Any) -> type[Task]:
    return type("Other", (Task,), {"configure_optimizers": lambda self: make(self.parameters())})


class Sub(torch.optim.SGD): ...


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "f2 clipping by norm": ({"gradient_clip_val": 0.1}, "gradient_clip_val=0.1"),
    "f2 own clipping": ({"cls": Clipping}, "configure_gradient_clipping"),
    "f3 GradScaler": ({"plugins": lambda: [Scaled()]}, "GradScaler"),
    "f6 own backward": ({"cls": Backward}, "Backward.backward"),
    "f8 module reads gradients": ({"cls": Hooked}, "Hooked.on_before_optimizer_step"),
    "f8 callback reads gradients": ({"callbacks": lambda: [Looks()]}, "Looks.on_after_backward"),
    "f9 LBFGS": ({"cls": with_optimizer(torch.optim.LBFGS)}, "LBFGS"),
    "f9 subclass": ({"cls": with_optimizer(lambda p: Sub(p, 0.1))}, "Sub is not known"),
    "f9 differentiable": ({"cls": with_optimizer(lambda p: torch.optim.Adam(p, differentiable=True))}, "differentiable"),
    "f9 several, manual": ({"cls": Manual}, "manual"),
    "f12 anomalies": ({"detect_anomaly": True}, "detect_anomaly"),
    "d7 SparseAdam": ({"cls": with_optimizer(torch.optim.SparseAdam)}, "SparseAdam"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """REFUSE: "always" raises before the first step and says what to change; "auto" says why not, once."""
    options, words = REFUSED[case]
    with torch.random.fork_rng(), pytest.raises(UpdatesInBackwardError, match=words) as raised:
        fit(memopt(**ALWAYS), max_epochs=1, **options)
    assert "or set optimizer_in_backward='never'" in str(raised.value)
    with torch.random.fork_rng(), caplog.at_level("INFO"), contextlib.suppress(Exception):
        fit(memopt(optimizer_in_backward="auto", verbose=True), max_epochs=1, limit_train_batches=0, **options)
    assert sum(words in line and "updated after backward, as usual" in line for line in caplog.messages) == 1


def test_f1_f9_user_skips_steps(updates: list[Tensor]) -> None:
    """EXACT: an own `optimizer_step` that runs the closure without a step, and 3 batches a step where 4 come."""

    class Skips(Task):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx == 2:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    ends = []
    for strategy in ("auto", memopt(**ALWAYS)):
        with torch.random.fork_rng():
            ends.append(outcome(fit(strategy, Skips, max_epochs=3, data=lambda: loader(count=80, size=16))))
    assert_same_tree(*ends)
    assert updates
