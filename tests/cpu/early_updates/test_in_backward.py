"""Updates in backward in a Trainer: refused by name where they cannot be exact (F, D7); test_in_backward_matrix.py has where
they are."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_memopt.errors import UpdatesInBackwardError
from lightning_memopt.strategies.mixin import CHECKPOINT_KEY
from tests.cpu.lib.early import ALWAYS
from tests.cpu.lib.fits import Manual, Task, assert_same_tree, fit, loader, memopt, outcome


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
    "f2 clipping by value": (
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        "gradient_clip_val=0.1",
    ),
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


class Fails(Task):
    """Raises in the backward of one step, when the gradient of a layer is there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 5:
            self.net.layers[1].weight.register_hook(self.fails)
        return self.loss(batch)

    def fails(self, _: Tensor) -> None:
        raise MemoryError("in backward")


def test_f7_a_checkpoint_of_half_a_step_says_so(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """What is saved on an exception is marked where parameters had been updated, and who resumes from it is told."""
    for raises, marked in (({"cls": Task, "task": {"fault": MemoryError}}, False), ({"cls": Fails}, True)):
        saved = tmp_path / str(marked) / "on_exception.ckpt"  # each its own: a Trainer goes on from what it finds
        with torch.random.fork_rng(), pytest.raises(MemoryError):
            saves = partial(lambda folder: [pl.callbacks.OnExceptionCheckpoint(folder)], saved.parent)
            fit(memopt(**ALWAYS), callbacks=saves, enable_checkpointing=True, **raises)
        mark = torch.load(saved, weights_only=True)[CHECKPOINT_KEY]
        assert mark["fingerprint"] and ("mid_step" in mark) is marked
        if marked:
            assert 0 < mark["mid_step"] < len(list(Task().parameters()))
        recwarn.clear()
        with torch.random.fork_rng():
            fit(memopt(), max_epochs=1, resume=saved)
        assert any("in the middle" in str(w.message) for w in recwarn) is marked
