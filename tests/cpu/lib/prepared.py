"""A loop of Accelerate as people write it, plainly and within a plan, with all that decides its bits at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memopt.integrations import accelerate as front
from lightning_memopt.integrations.plain import Run

STEPS, BATCH, VOCABULARY = 20, 4, 32
_TOKENS = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)


def gpt2() -> nn.Module:
    sizes = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=16)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **_TOKENS, use_cache=False))


def words(index: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (16,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids}


@dataclass
class Loop:
    """A training loop.

    precision: as of `Accelerator(mixed_precision=...)`.
    accumulate: batches between two updates; the data does not divide by it.
    clip: "norm", "value" or "" for no clipping.
    scaler: what the Accelerator scales losses by; None for no scaling.
    """

    precision: str = "no"
    accumulate: int = 1
    clip: str = ""
    scaler: Callable[[], Any] | None = None


@dataclass
class Outcome:
    """What a loop came to.

    end: losses, gradient norms, parameters, buffers, the optimizer's state, and what is drawn next.
    run: the run of the model; None where there was none.
    accelerator: the Accelerator.
    """

    end: list[Any] = field(default_factory=list)
    run: Run | None = None
    accelerator: Any = None


def fresh(**options: Any) -> Accelerator:
    """An Accelerator of a process that has had none."""
    front.end()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def run_of(accelerator: Any, model: nn.Module) -> Run | None:
    watched = front._process.find(accelerator)
    return None if watched is None else watched.runs.get(id(model))


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def trained(loop: Loop, **options: Any) -> Outcome:
    """The loop, within a plan where there are options of `MemOptConfig`."""
    accelerator = fresh(mixed_precision=loop.precision, gradient_accumulation_steps=loop.accumulate)
    if loop.scaler is not None:
        accelerator.scaler = loop.scaler()
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    loader = DataLoader([words(i) for i in range(7 * BATCH)], BATCH, shuffle=True)
    objects = [model, optimizer, loader]
    if options:
        options = {"verbose": False, "profile_steps": 1} | options
        model, optimizer, loader = front.prepare(accelerator, *objects, **options)
    else:
        model, optimizer, loader = accelerator.prepare(*objects)
    found: list[Any] = []
    torch.manual_seed(5)
    model.train()
    for i, batch in enumerate(_forever(loader), start=1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and loop.clip == "norm":
                found.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
            if accelerator.sync_gradients and loop.clip == "value":
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.detach())
        if i == STEPS:
            break
    state = [accelerator.unwrap_model(model).state_dict(), optimizer.state_dict(), torch.rand(3)]
    found += copy.deepcopy(state)
    return Outcome(found, run_of(accelerator, model), accelerator)
