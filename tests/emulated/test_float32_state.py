"""An optimizer of the user's own, registered, with float32 state for bfloat16 weights: bits, bytes and checkpoints."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lightning_memopt import optimize, register_optimizer
from lightning_memopt.plan.allocator import reserved
from tests.emulated import device
from tests.emulated.float32_adamw import STATE, Float32AdamW
from tests.emulated.llama import in_bfloat16

is_judged = device.is_emulated() and device.is_bits()
pytestmark = pytest.mark.skipif(not is_judged, reason="the emulated device in bits mode: make emulated")
configs: Any = transformers
register_optimizer(Float32AdamW)


def train(budget: Any, early: Any = "never", checkpoint_at: int | None = None) -> tuple[list[Tensor], Any, int]:
    """Weights and state after some steps of a small Llama, the run's status, and the bytes that the last step had allocated. At
    one step, the optimizer's state may be saved and loaded.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_key_value_heads": 2}
    config = configs.LlamaConfig(vocab_size=1000, num_attention_heads=4, use_cache=False, **sizes)
    model = in_bfloat16(lambda: transformers.LlamaForCausalLM(config)).cuda().train()
    optimizer = Float32AdamW(model.parameters())
    words = torch.randint(1000, (2, 64), device="cuda")
    status = None
    with contextlib.ExitStack() as stack:
        run: Any = None
        if budget is not None:
            options: Any = {"offload": "host", "max_slowdown": 1e6, "optimizer_in_backward": early, "verbose": False}
            run = stack.enter_context(optimize(model, optimizer, budget=budget, **options))
        for step in range(12):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=words, labels=words).loss
            with run.last_backward() if run and early != "never" else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            if step == checkpoint_at:
                optimizer.load_state_dict(optimizer.state_dict())
        torch.cuda.synchronize()
        allocated_nbytes = torch.cuda.max_memory_allocated()
        status = None if run is None else run.status()
    state = [optimizer.state[p][name] for p in model.parameters() for name in STATE]
    return [t.detach().cpu() for t in (*model.parameters(), *state)], status, allocated_nbytes


@pytest.mark.parametrize("early", ["never", "always"])
def test_float32_state_of_bfloat16_weights_is_parked(early: str) -> None:
    """Once from update to update, with gradients, and once for updates in backward."""
    plain, _, _ = train(None)
    before = device.races()
    found, status, allocated_nbytes = train("min", early)
    assert all(map(torch.equal, found, plain)) and device.races() == before
    of = {what: [each for each in status.plan.states if each.what == what] for what in ("state", "gradient")}
    weights_nbytes = sum(t.nbytes for t in plain if t.dtype == torch.bfloat16)
    assert 0.99 < sum(each.nbytes for each in of["state"]) / (4 * weights_nbytes) <= 1  # norms have too little
    assert len(of["gradient"]) == (0 if early == "always" else len(of["state"]))
    assert bool(status.plan.updates) == (early == "always")
    assert status.measured_peak_nbytes == status.predicted_peak_nbytes
    machine = status.frontier.machine
    predicted = reserved(status.graph, status.plan.lives, machine.allocator, beginning=machine.beginning)
    assert predicted.allocated_nbytes == pytest.approx(allocated_nbytes, rel=1e-3)


def test_a_checkpoint_in_the_middle_keeps_float32_state() -> None:
    """Torch rounds state that it loads to the type of the weight, which later steps would show."""
    plain, _, _ = train(None)
    assert all(map(torch.equal, train(None, checkpoint_at=7)[0], plain))
    found, status, _ = train("min", checkpoint_at=7)
    assert all(map(torch.equal, found, plain)) and status.plan.states
