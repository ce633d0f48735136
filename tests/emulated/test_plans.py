"""Planned steps on a device that is not the host, with a backward in the device's thread: their bits, and their bytes."""

from __future__ import annotations

import gc
import importlib
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_memopt import fit, optimize, register_op
from lightning_memopt.fitting.cards import CONTEXT_NBYTES
from lightning_memopt.runtime.engine.observing import ObservingEngine
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import Drawn, given
from tests.emulated import device, recorded, reserved
from tests.emulated.reserved import WORKSPACE_NBYTES, steady
from tests.emulated.training import CUDA, MODELS, Attention, train

SPARE_NBYTES = 16 << 20
"""Of the budget: what the allocator has in whole segments."""
SPACIOUS_NBYTES = 48 << 20
"""Workspace of the op `spacious`."""
pytestmark = pytest.mark.skipif(not device.is_emulated(), reason="the emulated device: make emulated")


@pytest.mark.skipif(not device.is_bits(), reason="memory has no values in bytes mode")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("model", MODELS)
def test_bits_and_bytes_of_the_smallest_plan(model: str, autocast: bool) -> None:
    plain, found = train(model, None, autocast), train(model, "min", autocast)
    assert found.status.phase == "planned" and not found.status.deviates
    assert found.same(plain)
    plan = found.status.plan
    assert found.requested < plain.requested or not any(life.how == "rebuild" for life in plan.lives)
    assert plan.predicted.peak_nbytes == found.allocated


@pytest.mark.skipif(device.is_bits(), reason="sizes of GPUs are for bytes mode")
@pytest.mark.parametrize("update", ["fused", "for-loop"])
@pytest.mark.parametrize("model", ["mlp", "bert"])
def test_reserved_bytes_within_3_percent(model: str, update: str) -> None:
    """More models, budgets and settings, and torch's default update: `python -m tests.emulated.reserved`."""
    for _, row in reserved.rows(model, update, (0.0, 0.5)):
        assert row.holds, row


@pytest.mark.skipif(device.is_bits(), reason="attention is not fused in bits mode")
@pytest.mark.parametrize("model", ["gpt2", "resnet50", "nmt"])
def test_the_step_that_fit_records_is_the_one_that_runs(model: str) -> None:
    """Op by op. All models: `python -m tests.emulated.recorded`."""
    _, predicted, ran, said = recorded.compare(model)
    assert said == "" and predicted == ran


@pytest.mark.skipif(device.is_bits(), reason="attention is not fused in bits mode")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_attention_leaves_unwritten_is_kept_and_predicted(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do not write all of their results, which are kept where attention runs again. 512 bytes can cost a segment."""
    for seed in range(3):
        given(monkeypatch, Drawn(seed))
        model = Attention().to(CUDA, dtype)
        batch = torch.zeros(16, 100, 256, device=CUDA, dtype=dtype)
        row = reserved.run(
            "attention", (model, lambda batch=batch: batch), torch.optim.AdamW(model.parameters()), "min", "foreach"
        )
        assert (row.predicted_reserved, row.predicted_allocated) == (row.measured_reserved, row.measured_allocated), (seed, row)
        assert row.measured_reserved < row.unmodified


@pytest.mark.skipif(device.is_bits(), reason="sizes of GPUs are for bytes mode")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_plan_of_memopt_fit_is_in_force_and_kept(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was made on the CPU, without the step: torch's allocator needs what it said, within 1 %. All values on the device are
    zero, as if all was padding, so there is no mask.
    """
    import transformers

    small = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "use_cache": False}
    made = {"gpt2": transformers.GPT2Config, "llama": partial(transformers.LlamaConfig, intermediate_size=1408)}
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    monkeypatch.setattr(module, "create_causal_mask", lambda *args, **kwargs: None)
    config = made[family](**small)
    config.architectures = [{"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[family]]
    config.save_pretrained(tmp_path)
    # a card proves tiles of other sizes than those that `fit` counts on, and then the plan is the start of a search
    file, asked = str(tmp_path / "plan.json"), {"batch": 8, "length": 512, "dtype": "fp32", "tile": "off"}
    peaks = fit(str(tmp_path), ["80GiB"], **asked)
    beside_nbytes = CONTEXT_NBYTES + WORKSPACE_NBYTES
    answer = fit(str(tmp_path), [str((peaks.peak_nbytes + peaks.smallest_nbytes) // 2 + beside_nbytes)], **asked)
    answer.save_plan(file)
    (on,) = answer.cards
    assert on.verdict == "plan"
    budget_nbytes = on.usable_nbytes + WORKSPACE_NBYTES + SPARE_NBYTES
    gc.collect()  # models of transformers are in cycles: that of the case before would be in memory
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.zeros(8, 512, dtype=torch.long, device="cuda")

    def step() -> None:
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with listening() as said, optimize(model, optimizer, budget=budget_nbytes, plan=file, tile="off") as run:
        measured, _ = steady(step, 4)
        assert run.status().phase == "planned"
    assert "is the plan of this step; nothing is solved" in said.taken()
    assert measured <= budget_nbytes
    assert measured == pytest.approx(on.peak_nbytes + WORKSPACE_NBYTES, rel=0.01)


@torch.library.custom_op("memopt_test::spacious", mutates_args=())
def spacious(x: torch.Tensor) -> torch.Tensor:
    torch.empty(SPACIOUS_NBYTES, dtype=torch.uint8, device=x.device)
    return x * 2


spacious.register_fake(torch.empty_like)
spacious.register_autograd(lambda ctx, grad: grad * 2)


class Spacious(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return spacious(x).square().mean()


def test_what_is_freed_to_make_room_for_an_op_is_no_workspace_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gave: list[bool] = []
    original = ObservingEngine.gives_way
    monkeypatch.setattr(ObservingEngine, "gives_way", lambda self: gave.append(original(self)) or gave[-1])
    register_op(torch.ops.memopt_test.spacious.default, "pure")
    model = Spacious().to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1 << 16, 64, device=CUDA)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def workspace_nbytes(most: float) -> int:
        """The observed step has this part of the device's memory."""
        with optimize(model, optimizer, budget="100%", profile_steps=1, verbose=False) as run:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(most)
            try:
                step()
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            most_nbytes.append(torch.cuda.max_memory_reserved())
            step()
            return next(op.workspace_nbytes for op in run.status().graph.ops if "spacious" in op.name)

    most_nbytes: list[int] = []
    torch.cuda.reset_peak_memory_stats()
    expected_nbytes = workspace_nbytes(1.0)
    assert expected_nbytes > 0 and not gave
    total_nbytes = torch.cuda.get_device_properties(0).total_memory
    assert workspace_nbytes((most_nbytes[0] - 2 * SPACIOUS_NBYTES) / total_nbytes) == expected_nbytes
    assert any(gave)
