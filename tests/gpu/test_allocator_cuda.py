"""The allocator's model beside the real one: the trace of a training run, recorded from the first allocation on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from lightning_memopt.plan.allocator import Settings
from tests.allocator_trace import compare

ROOT = Path(__file__).parent.parent.parent
# In a process of its own: the settings are read once, and the trace must begin before anything is allocated.
SCRIPT = """
import json, sys, torch
torch.cuda.init()
torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=2_000_000)
from benchmarks.models.registry import MODELS
torch.manual_seed(0)
model, batch, _ = MODELS[sys.argv[1]]()
model, batch = model.cuda(), {k: t.cuda() for k, t in batch.items()}
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
torch.cuda.synchronize()
trace = torch.cuda.memory._snapshot()["device_traces"][0]
keep = [{k: e[k] for k in ("action", "addr", "size", "stream")} for e in trace]
json.dump({"trace": keep, "reserved": torch.cuda.max_memory_reserved()}, open(sys.argv[2], "w"))
"""


@pytest.mark.parametrize("model", ["gpt2", "resnet50"])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"])
def test_reserved_bytes_of_a_recorded_trace(model: str, conf: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC"))}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {})
    path = tmp_path / "trace.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model, str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    recorded = json.loads(path.read_text())
    found = compare(recorded["trace"], Settings.parse(conf))
    assert len(found.steps) > 1000 and found.recorded_peak == recorded["reserved"]
    print(f"{model} {conf or 'defaults'}: {len(found.steps)} steps, recorded {found.recorded_peak}, "
          f"predicted {found.predicted_peak}, first difference {found.first_difference}")  # fmt: skip
    assert abs(found.error) <= 0.03
    worst = max(abs(predicted - reserved) / found.recorded_peak for _, reserved, predicted in found.steps)
    assert worst <= 0.03
