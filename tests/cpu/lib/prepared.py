"""A loop of Accelerate as people write it, plainly and within a plan, with all that decides its bits at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
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


def t5() -> nn.Module:
    sizes = dict(d_model=32, d_ff=64, d_kv=16, num_heads=2, num_layers=1, vocab_size=VOCABULARY, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **_TOKENS, use_cache=False))


def lora_llama() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **_TOKENS, use_cache=False))
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def vit() -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=4, hidden_dropout_prob=0.1))


class ResNet(nn.Module):
    """Convolutions with batch norm and in-place ReLUs, called as the models of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))  # noqa: E731
        self.stem, self.blocks, self.head = nn.Conv2d(3, 8, 3), nn.ModuleList(block() for _ in range(3)), nn.Linear(8, 4)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        h = self.stem(pixel_values)
        for block in self.blocks:
            h = h + block(h)
        logits = self.head(h.mean((2, 3)))
        return transformers.modeling_outputs.ImageClassifierOutput(loss=nn.functional.cross_entropy(logits, labels))


def words(index: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (16,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids}


def images(index: int) -> dict[str, Tensor]:
    pixels = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
    return {"pixel_values": pixels, "labels": torch.tensor(index % 4)}


@dataclass
class Loop:
    """A training loop.

    precision: as of `Accelerator(mixed_precision=...)`.
    accumulate: batches between two updates; the data does not divide by it.
    clip: "norm", "value" or "" for no clipping.
    schedule: whether the learning rate changes.
    ema: whether a copy of the model follows it, and is evaluated.
    save_at, load_at: the number of batches after which the state is written to `folder`, or read from there; 0 for never.
    scaler: what the Accelerator scales losses by; None for no scaling.
    """

    model: Callable[[], nn.Module] = gpt2
    sample: Callable[[int], dict[str, Tensor]] = words
    precision: str = "no"
    accumulate: int = 1
    clip: str = ""
    schedule: bool = False
    ema: bool = False
    save_at: int = 0
    load_at: int = 0
    folder: Path = Path()
    scaler: Callable[[], Any] | None = None
    steps: int = STEPS


@dataclass
class Outcome:
    """What a loop came to.

    end: losses, gradient norms, parameters, buffers, the optimizer's state, copies of the model, and what is drawn next.
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
    model = loop.model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if loop.schedule else None
    loader = DataLoader([loop.sample(i) for i in range(7 * BATCH)], BATCH, shuffle=True)
    objects = [model, optimizer, loader, *([schedule] if schedule is not None else [])]
    if options:
        options = {"verbose": False, "profile_steps": 1} | options
        model, optimizer, loader, *rest = front.prepare(accelerator, *objects, **options)
    else:
        model, optimizer, loader, *rest = accelerator.prepare(*objects)
    found: list[Any] = []
    ema = copy.deepcopy(accelerator.unwrap_model(model)).requires_grad_(False) if loop.ema else None
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
            for scheduler in rest:
                scheduler.step()
            optimizer.zero_grad()
        found.append(loss.detach())
        if ema is not None and accelerator.sync_gradients:
            with torch.no_grad():
                for own, other in zip(ema.parameters(), model.parameters(), strict=True):
                    own.lerp_(other, 0.1)
                found.append(ema(**batch).loss)
        if i == loop.save_at:
            accelerator.save_state(str(loop.folder))
        if i == loop.load_at:
            accelerator.load_state(str(loop.folder))
        if i == loop.steps:
            break
    state = [accelerator.unwrap_model(model).state_dict(), optimizer.state_dict(), torch.rand(3)]
    found += copy.deepcopy([*state, [] if ema is None else ema.state_dict()])
    return Outcome(found, run_of(accelerator, model), accelerator)
