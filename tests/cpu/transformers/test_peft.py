"""PEFT under the Trainer: nothing is saved for what is frozen, and adapters that are merged or switched give the plain bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft

from benchmarks.robustness.front_models import WORDS, built
from lightning_memopt import MemOptTrainerCallback
from lightning_memopt.graph import Graph
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.trainers import Ends, agrees, assert_same, callback, ends, kept, train, trainer


def llama(**options: Any) -> nn.Module:
    """A Llama with adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, vocab_size=WORDS, **heads)
    adapters = peft.LoraConfig(r=4, lora_dropout=0.1, **({"target_modules": ["q_proj", "v_proj"]} | options))
    return peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), adapters)


def saved_nbytes(graph: Graph) -> int:
    return sum(graph.tensors[t].nbytes for t in graph.saves_of if t in graph.producers)


def test_frozen() -> None:
    """Less is saved than for a Llama that is trained as a whole, and only adapters have optimizer state."""
    frozen, whole = agrees("lora_llama"), callback()
    model = built("lora_llama")
    model.requires_grad_(True)
    train([whole], model)
    one, other = frozen.status().graph, whole.status().graph
    assert saved_nbytes(one) < 0.8 * saved_nbytes(other)
    adapters = sum(p.nbytes for name, p in model.named_parameters() if "lora" in name)
    assert sum(t.nbytes for t in one.tensors if t.kind == "optimizer_state") <= 2.1 * adapters


def both(use: Callable[[list[Any]], Ends]) -> MemOptTrainerCallback:
    mine = callback()
    assert_same(use([]), use([mine]))
    kept(mine)
    return mine


def test_modules_to_save() -> None:
    """A module that is trained as a whole beside the adapters."""
    both(lambda callbacks: train(callbacks, llama(modules_to_save=["lm_head"])))


def test_merged_and_switched() -> None:
    """Adapters are merged and unmerged, and another one is trained by a second Trainer."""

    def use(callbacks: list[Any]) -> Ends:
        model = llama()
        train(callbacks, model, max_steps=4)
        model.merge_adapter()
        model.unmerge_adapter()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"]))
        model.set_adapter("other")
        return train(callbacks, model)

    both(use)


class Switching:
    """Makes a callback that trains the other adapter from step 4 on."""

    def __new__(cls) -> Any:
        from transformers import TrainerCallback

        class Switch(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                if state.global_step == 4:
                    model.set_adapter("other")

        return Switch()


def test_switched_while_training() -> None:
    """Both adapters are in the optimizer; from the fourth step on the other one is active, and has a plan of its own."""

    def use(callbacks: list[Any]) -> Ends:
        model = llama()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"]))
        optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "lora" in name], 1e-2)
        used = trainer([*callbacks, Switching()], model, optimizers=(optimizer, None), max_steps=12)
        used.train()
        return ends(used)

    mine = callback()
    assert_same(use([]), use([mine]))
    states = [s for s in mine.run.session._plan_cache.values() if isinstance(s, Running)]
    assert len(states) == 2 and all(s.plan.predicted.rebuilt_ops and s.peaks.measured_nbytes for s in states)
    for s in states:
        assert abs((s.peaks.measured_nbytes or 0) - s.plan.predicted.needed_nbytes) <= 0.01 * s.plan.predicted.needed_nbytes


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_checkpointing_with_adapters() -> None:
    """The hook that PEFT puts on the embedding, so that checkpointed layers get gradients, stays, and the bits are the same."""
    options = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, bf16=True)
    mine = callback()

    def use(callbacks: list[Any]) -> Ends:
        model = llama()
        model.enable_input_require_grads()
        return train(callbacks, model, **options)

    assert_same(use([]), use([mine]))
    kept(mine)
    assert len(mine.status().checkpointed) == 3
