"""`lightning` and `pytorch_lightning` are the same code under two names: each gets strategies and callbacks that it accepts."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pytorch_lightning")
pytest.importorskip("lightning_fabric")
pytest.importorskip("lightning")

FIT = """
import copy, pickle, sys, torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)

class Task(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU())))
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

def fit(strategy, *callbacks, **options):
    pl.seed_everything(0)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    options |= dict(accelerator="cpu", devices=1, max_epochs=1, callbacks=list(callbacks))
    trainer = pl.Trainer(strategy=strategy, **quiet, **options)
    trainer.fit(Task(), torch.utils.data.DataLoader(torch.randn(256, 32), 32))
    return trainer

def same(one, other):
    return all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))

plain, strategy = fit("auto"), MemOptStrategy(budget="min", profile_steps=2, verbose=False)
planned = fit(strategy, MemOptMonitor(verbose=False), gradient_clip_val=None)
assert same(plain, planned) and strategy.status().plan.predicted.rebuilt_ops > 0
assert type(pickle.loads(pickle.dumps(planned)).strategy) is MemOptStrategy
trainer = fit(MemOptStrategy(verbose=False), MemOptBatchScaler(max_size=64, keep_effective=False, verbose=False))
assert trainer.callbacks[0].result.size == 64
trainer = fit(MemOptStrategy(budget="min", profile_steps=2, verbose=False, optimizer_in_backward="always"))
assert same(plain, trainer)
assert type(pl.Trainer(strategy="memopt", accelerator="cpu", devices=1, logger=False).strategy) is MemOptStrategy

fabric = Fabric(strategy="memopt", accelerator="cpu", devices=1)
assert type(fabric.strategy) is MemOptFabricStrategy
fabric = Fabric(strategy=MemOptFabricStrategy(budget="min", profile_steps=2, verbose=False), accelerator="cpu", devices=1)
pl.seed_everything(0)
task = Task()
model, optimizer = fabric.setup(task, task.configure_optimizers())
for batch in torch.utils.data.DataLoader(torch.randn(256, 32), 32):
    fabric.backward(model.training_step(batch, 0))
    optimizer.step()
    optimizer.zero_grad()
assert fabric.strategy.run().plan.predicted.rebuilt_ops > 0
fabric.strategy.close()
"""
IMPORTS = """
import pytorch_lightning as pl
from lightning_fabric import Fabric
from lightning_memopt import MemOptBatchScaler, MemOptFabricStrategy, MemOptMonitor, MemOptStrategy
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=200)


@pytest.mark.long
def test_pytorch_lightning_is_exact_within_a_plan() -> None:
    """Trainer and Fabric, strings and classes, the callbacks, early updates, a pickled Trainer. The same import as for
    `lightning` gives the classes, and `lightning` itself is not imported.
    """
    done = run(f"{IMPORTS}\n{FIT}\nassert 'lightning' not in sys.modules")
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_strategy_of_the_other_is_refused_with_the_import_to_use() -> None:
    """Where both are imported, a string works in each, and the classes are those of `lightning`. Lightning's refusal shows the
    strategy, and so the line that works.
    """
    code = """
import sys, lightning.pytorch, lightning.fabric, pytorch_lightning, lightning_fabric
import lightning_memopt, lightning_memopt.pytorch_lightning as other
for name, cls in (("pytorch_lightning", other.MemOptStrategy), ("lightning.pytorch", lightning_memopt.MemOptStrategy)):
    Trainer = sys.modules[name].Trainer
    assert type(Trainer(strategy="memopt", accelerator="cpu", devices=1, logger=False).strategy) is cls
    Trainer(strategy=cls(), accelerator="cpu", devices=1, logger=False)
for call in (
    lambda: pytorch_lightning.Trainer(strategy=lightning_memopt.MemOptStrategy()),
    lambda: lightning_fabric.Fabric(strategy=lightning_memopt.MemOptFabricStrategy()),
    lambda: lightning.pytorch.Trainer(strategy=other.MemOptStrategy()),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    done = run(code)
    assert "from lightning_memopt.pytorch_lightning import MemOptStrategy)" in done.stdout, done.stdout + done.stderr
    assert "for lightning_fabric: from lightning_memopt.pytorch_lightning import MemOptFabricStrategy)" in done.stdout
    assert "for lightning.pytorch: from lightning_memopt import MemOptStrategy)" in done.stdout
