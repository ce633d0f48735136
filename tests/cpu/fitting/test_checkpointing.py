"""A step is recorded with gradient checkpointing, too: its peak is that of the same step in torch, computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lightning_memopt
from benchmarks.lib.graphs import peak_nbytes
from lightning_memopt.bench import zoo
from lightning_memopt.bench.subject import Training
from lightning_memopt.cli import main
from lightning_memopt.errors import ConfigError
from lightning_memopt.fitting.answer import Fit, answered
from lightning_memopt.fitting.checkpointing import Checkpointed, turned_on
from lightning_memopt.fitting.options import Options
from lightning_memopt.fitting.recording import record
from lightning_memopt.fitting.sources import of_training, source_of
from lightning_memopt.graph import unmodified_levels
from lightning_memopt.integrations.transformers_private import checkpointing_function
from lightning_memopt.native.counting import install
from lightning_memopt.session.solve.foresight import unmodified_peak
from tests.cpu.fitting.test_answer import card, config
from tests.cpu.lib.trainings import training_of

SMALL: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 3, "batch": 16, "length": 64},
    "llama": {"layers": 3, "batch": 16, "length": 64},
    "bert": {"batch": 32, "length": 64},
    "vit": {"batch": 8},
}


@pytest.mark.parametrize("name", SMALL)
def test_the_peak_is_that_of_torch(name: str) -> None:
    """To the byte, beside torch's own step without this package, measured by the counter of the allocator."""
    pytest.importorskip("transformers")
    counter = install()
    if counter is None:
        pytest.skip("no counter for this torch")

    def build() -> Training:
        torch.manual_seed(0)
        return zoo.training(zoo.MODELS[name](**SMALL[name]), torch.device("cpu"))

    plain, recorded = (peak_nbytes(record(build, checkpoints=on).graph) for on in (False, True))
    before_nbytes = counter.live_nbytes
    training = build()
    with turned_on(training.model):
        for _ in range(2):
            training.step()
        window = counter.window()
        assert window is not None
        training.step()
        measured = window.peak_nbytes - before_nbytes
        window.close()
    assert recorded == measured < 0.75 * plain


def test_checkpointing_is_off_again_afterwards() -> None:
    pytest.importorskip("transformers")
    model = zoo.training(zoo.MODELS["gpt2"](**SMALL["gpt2"]), torch.device("cpu")).model
    with turned_on(model):
        assert any(checkpointing_function(m) is not None for m in model.modules())
    assert not any(checkpointing_function(m) is not None for m in model.modules())
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True})
    own = [checkpointing_function(m) for m in model.modules()]
    with turned_on(model):
        assert [checkpointing_function(m) for m in model.modules()] == own, "the user's own stays"
    assert [checkpointing_function(m) for m in model.modules()] == own


class Layers(nn.Module):
    """Blocks with attention and dropout; each is checkpointed, or left out by chance."""

    def __init__(self, around: Callable[..., Any], leaves_out: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.around, self.leaves_out = around, leaves_out

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.leaves_out and torch.rand(()) < 0.5:
            return x * 2
        heads = block(x).view(256, 32, 2, 32).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return nn.functional.dropout(attended.transpose(1, 2).reshape(x.size()), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.around(partial(self.run, block), x)
        return x


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def layers(around: Callable[..., Any] = plainly, leaves_out: bool = False) -> Training:
    model = Layers(around, leaves_out).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    return training_of(model, optimizer, lambda: model(x).square().mean())


KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])


@KINDS
def test_what_runs_again_has_the_operators_of_cuda(reentrant: bool) -> None:
    graph = record(lambda: layers(partial(checkpoint, use_reentrant=reentrant)), cuda=True, checkpoints=True).graph
    for name in ("aten::_scaled_dot_product_flash_attention", "aten::native_dropout"):
        phases = [op.phase for op in graph.ops if op.name == name]
        assert phases == ["forward"] * 12 + ["backward"] * 12, name


@KINDS
def test_what_runs_again_draws_the_same_random_numbers(reentrant: bool) -> None:
    """Blocks that were left out are left out again."""
    around = partial(checkpoint, use_reentrant=reentrant)
    for seed in range(3):
        torch.manual_seed(seed)
        graph = record(lambda: layers(around, leaves_out=True), cuda=True, checkpoints=True).graph
        phases = [op.phase for op in graph.ops if op.name == "aten::_scaled_dot_product_flash_attention"]
        assert 0 < phases.count("forward") == phases.count("backward") < 12


@KINDS
def test_generator_states_are_in_the_memory_of_the_host(reentrant: bool) -> None:
    def peak(preserves: bool) -> int:
        around = partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=preserves)
        return max(unmodified_levels(record(lambda: layers(around), cuda=True, checkpoints=True).graph))

    assert peak(True) == peak(False) < max(unmodified_levels(record(layers, cuda=True).graph))


def test_what_the_user_keeps_is_kept() -> None:
    """Selective checkpointing."""

    def keeps(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = op == torch.ops.aten._scaled_dot_product_flash_attention.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, keeps)
    around = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    ops = record(lambda: layers(around), cuda=True, checkpoints=True).graph.ops
    assert {op.phase for op in ops if op.name == "aten::_scaled_dot_product_flash_attention"} == {"forward"}
    assert {op.phase for op in ops if op.name == "aten::native_dropout"} == {"forward", "backward"}


def test_a_step_without_checkpointing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nothing in this step is checkpointed.* Use torch\.utils\.checkpoint"):
        record(layers, checkpoints=True)


# -- the answer ----------------------------------------------------------------------------------


def on(answer: Fit) -> Checkpointed:
    found = answer.cards[0].checkpointed
    assert found is not None
    return found


def test_a_config_is_asked_about_with_checkpointing(tmp_path: Path) -> None:
    folder = str(config(tmp_path, n_layer=3))
    options = Options(batch=4, length=64, gradient_checkpointing=True)
    small, large = card(24 << 20), card(1 << 30)
    answer = answered(source_of(folder, options, ("card", 0)), [large, small])
    found, too_small = answer.cards[0].checkpointed, answer.cards[1].checkpointed
    assert found is not None and too_small is not None and found.fits and found.missing_nbytes == 0
    assert found.peak_nbytes < answer.peak_nbytes and 1 < found.slowdown < 1.6
    assert found.largest_batch is not None and answer.cards[0].largest_batch is not None and found.longest is not None
    assert found.largest_batch > answer.cards[0].largest_batch

    def peak(batch: int, length: int) -> int:
        source = source_of(folder, options, ("card", 0))
        assert source.checkpointed is not None
        return unmodified_peak(source.checkpointed(batch, length).graph)

    assert peak(found.largest_batch, 64) <= large.usable_nbytes < peak(ceil(1.03 * found.largest_batch), 64)
    assert "│ checkpointing: fits" in answer.table()
    assert too_small.fits == (found.peak_nbytes <= small.usable_nbytes)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", str(config(tmp_path)), "--length", "32", "--card", "1GiB", "--json"]
    assert main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "--gradient-checkpointing"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = answer["cards"][0].pop("checkpointed")
    assert found["fits"] and found["peak_nbytes"] <= answer["steps"][0]["peak_nbytes"] and found["longest"] > 32
    assert plain["cards"][0].pop("checkpointed") is None
    assert plain == answer, "all else is as without it"


@pytest.mark.parametrize("asks", [False, True])
def test_a_function_that_checkpoints_is_asked_about_both_ways(asks: bool) -> None:
    plain = answered(of_training("layers", lambda _: layers(), None), [card(1 << 40)])
    around = partial(checkpoint, use_reentrant=False)
    answer = answered(of_training("layers", lambda _: layers(around), None, asks=asks), [card(1 << 40)])
    assert answer.peak_nbytes == plain.peak_nbytes > on(answer).peak_nbytes and on(answer).largest_batch is None
    assert "gradient checkpointing is off but in the rows that name it, since a plan replaces it" in answer.table()
    assert plain.cards[0].checkpointed is None and not plain.not_checkpointed


def test_a_function_that_does_not_checkpoint_says_so() -> None:
    answer = answered(of_training("layers", lambda _: layers(), None, asks=True), [card(1 << 40)])
    assert answer.cards[0].checkpointed is None
    assert "No row has gradient checkpointing: nothing in this step is checkpointed" in answer.table()


SCRIPT = """
import sys, torch, transformers
sizes = dict(n_layer=2, n_embd=64, n_head=2, vocab_size=500, bos_token_id=0, eos_token_id=0, use_cache=False)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).cuda().train()
if "--checkpoint" in sys.argv:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    x = torch.zeros(8, 256, dtype=torch.long, device="cuda")
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script(tmp_path: Path) -> None:
    """Its own checkpointing, or that of its model of transformers, which is turned on for it."""
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["python", str(tmp_path / "train.py")]
    answer = lightning_memopt.fit(command, ["1GiB"], gradient_checkpointing=True)
    own = lightning_memopt.fit([*command, "--checkpoint"], ["1GiB"], gradient_checkpointing=True)
    assert on(own) == on(answer) and on(answer).peak_nbytes < answer.peak_nbytes == own.peak_nbytes
    silent = lightning_memopt.fit([*command, "--checkpoint"], ["1GiB"])
    assert silent.cards[0].checkpointed is None
    assert "is off, since a plan replaces it; --gradient-checkpointing asks about it, too" in silent.table()
