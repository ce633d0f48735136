"""Training scripts, as people start them: stdout is the script's own, and lines of a run leave its progress bars whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.lib.scripts import Interpreter

COMMON = """
import warnings
import torch
from torch import nn
warnings.simplefilter("ignore")

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))

OPTIONS = dict(budget="min", profile_steps=1)
ROWS = torch.randn(6 * 64, 16)
"""
TQDM = """
from tqdm import tqdm
from lightning_memopt import optimize
model = Net()
optimizer = torch.optim.Adam(model.parameters())
with optimize(model, optimizer, **OPTIONS) as run:
    for batch in tqdm(ROWS.split(64), mininterval=0, ncols=60):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LIGHTNING = """
import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning_memopt import MemOptMonitor, MemOptStrategy

class Task(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, i):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

pl.Trainer(
    strategy=MemOptStrategy(**OPTIONS), callbacks=[BAR(), MemOptMonitor()], accelerator="cpu", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_model_summary=False,
).fit(Task(), torch.utils.data.DataLoader(ROWS, 64))
print()  # ends the line of Lightning's bar
"""
TRANSFORMERS = """
import transformers
from lightning_memopt import MemOptTrainerCallback

class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, x):
        return {"loss": self.net(x).square().mean()}

arguments = transformers.TrainingArguments(
    output_dir=".", per_device_train_batch_size=64, max_steps=6, report_to=[], save_strategy="no", use_cpu=True,
)
callback = MemOptTrainerCallback(**OPTIONS)
transformers.Trainer(Scored(), arguments, train_dataset=[{"x": row} for row in ROWS], callbacks=[callback]).train()
"""
ACCELERATE = """
import accelerate
from tqdm.auto import tqdm
from lightning_memopt.accelerate import prepare
accelerator = accelerate.Accelerator(cpu=True)
model = Net()
model, optimizer = prepare(accelerator, model, torch.optim.Adam(model.parameters()), **OPTIONS)
for batch in tqdm(ROWS.split(64), mininterval=0, ncols=60):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.free_memory()
"""
SCRIPTS = {
    "tqdm": ("tqdm", TQDM),
    "lightning, tqdm": ("lightning", LIGHTNING.replace("BAR", "TQDMProgressBar")),
    "lightning, rich": ("lightning", LIGHTNING.replace("BAR", "RichProgressBar")),
    "transformers": ("transformers", TRANSFORMERS),
    "accelerate": ("accelerate", ACCELERATE),
}


@pytest.mark.parametrize("name", [name if name == "tqdm" else pytest.param(name, marks=pytest.mark.long) for name in SCRIPTS])
def test_the_last_line_of_stdout_is_the_scripts(name: str, tmp_path: Path, interpreter: Interpreter) -> None:
    framework, code = SCRIPTS[name]
    pytest.importorskip(framework)
    script = tmp_path / "train.py"
    script.write_text(f"{COMMON}{code}\nprint('RESULT 1.5')\n")
    done = interpreter.run(str(script), cwd=tmp_path, needs=("torch._dynamo", framework))
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert out.splitlines()[-1] == "RESULT 1.5" and "MemOpt" not in out
    lines = [line for line in err.split("\n") if "MemOpt: " in line]
    assert sum("plan in force" in line for line in lines) == 1
    for line in lines:
        before = line.partition("MemOpt: ")[0]
        assert before.rpartition("\r")[2] == "", f"{line!r} is glued to something"
