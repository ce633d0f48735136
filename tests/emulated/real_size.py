"""Models at their real size on cards that their plain step does not fit, on the emulated device in bytes mode.

Usage: python -m tests.emulated.real_size [MODEL ...]

Each model is a process of its own, with the memory of its card. Weights are never touched, so a laptop has room for all of
them. As for the other tables (reserved.py): torch's own allocator, and no GPU.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor

from lightning_memopt import register_optimizer
from lightning_memopt.integrations.to_device import to_device
from lightning_memopt.runtime.tiers import streams
from tests.emulated import device, llama
from tests.emulated.float32_adamw import Float32AdamW
from tests.emulated.reserved import HEADER, MIB, Loss, Made, run
from tests.emulated.unet import DiffusionUNet

GIB = 1 << 30
_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, for which Python 3.11 has no name."""


def _made(model: Any, **batch: Tensor) -> Made:
    return Loss(model.train()), lambda: batch


def _words(batch: int, length: int) -> dict[str, Tensor]:
    words = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": words, "labels": words}


def _adapted(model: Any) -> Any:
    """With adapters of rank 16 at every linear layer of the blocks; nothing else is trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def gpt2_xl() -> Made:
    """GPT-2 XL, 1.6 billion parameters, float32, 4 x 1,024 tokens."""
    config = llama.configs.GPT2Config(n_layer=48, n_embd=1600, n_head=25, use_cache=False)
    return _made(transformers.GPT2LMHeadModel(config), **_words(4, 1024))


def llama_8b(lora: bool, length: int) -> Made:
    """Llama 3's 8 billion parameters, bfloat16."""
    model = llama.llama_8b(length)
    return _made(_adapted(model) if lora else model, **_words(1, length))


def llama_70b(length: int) -> Made:
    """Llama 3's 70 billion parameters: the linear layers of its blocks packed to 4 bits, with adapters; the rest bfloat16."""
    return _made(llama.llama_70b(), **_words(1, length))


def mixtral() -> Made:
    """Mixtral 8x7B, 47 billion parameters, bfloat16, with adapters; 4 x 4,096 tokens. Values are zeros, so that all tokens go
    to the same two experts.
    """
    config = llama.configs.MixtralConfig(vocab_size=32000, num_local_experts=8, num_experts_per_tok=2, **llama.BLOCKS)
    model = llama.in_bfloat16(lambda: transformers.MixtralForCausalLM(config))
    return _made(_adapted(model), **_words(4, 4096))


def vit_h() -> Made:
    """ViT-H/14, 630 million parameters, float32, 32 images of 224 x 224."""
    config = llama.configs.ViTConfig(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14, num_labels=1000
    )
    images = {"pixel_values": torch.zeros(32, 3, 224, 224), "labels": torch.zeros(32, dtype=torch.long)}
    return _made(transformers.ViTForImageClassification(config), **images)


def sdxl() -> Made:
    """A U-Net of the size of SDXL's, 2.6 billion parameters, bfloat16, 4 latents of 128 x 128."""
    noisy, words = torch.zeros(4, 4, 128, 128).bfloat16(), torch.zeros(4, 77, 2048).bfloat16()
    return _made(DiffusionUNet().bfloat16(), noisy=noisy, words=words)


@dataclass(frozen=True)
class Card:
    """A model on a card of some GiB, the budget in GiB, and whether the loss head runs in tiles.

    update: of torch's AdamW, "fused" or "foreach"; or "float32": AdamW with float32 state (float32_adamw.py).
    larger: the card has no room for the weights. They are in the host's memory from the beginning.
    offload: what rests may be there, too.
    """

    build: Callable[[], Made]
    gib: int
    budget: float
    update: str = "fused"
    tile: str = "off"
    larger: bool = False
    offload: str = "none"


register_optimizer(Float32AdamW)
UPDATES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "foreach": torch.optim.AdamW,
    "fused": partial(torch.optim.AdamW, fused=True),
    "float32": Float32AdamW,
}
CARDS = {
    "gpt2-xl": Card(gpt2_xl, 40, 36, "foreach"),
    "vit-h": Card(vit_h, 24, 20, "foreach"),
    "sdxl-like": Card(sdxl, 40, 34),
    "llama-8b-lora": Card(partial(llama_8b, True, 2048), 24, 22),
    "mixtral-lora": Card(mixtral, 141, 125),
    "llama-8b-lora-8k": Card(partial(llama_8b, True, 8192), 24, 22, tile="exact"),
    "llama-8b-lora-32k": Card(partial(llama_8b, True, 32768), 40, 37, tile="exact"),
    "llama-8b-lora-32k-24gib": Card(partial(llama_8b, True, 32768), 24, 22, tile="exact", larger=True, offload="host"),
    "llama-8b": Card(partial(llama_8b, False, 8192), 80, 75),
    "llama-8b-lora-12gib": Card(partial(llama_8b, True, 2048), 12, 10, larger=True, offload="host"),
    "llama-70b-lora-24gib": Card(partial(llama_70b, 2048), 24, 22, larger=True, offload="host"),
    "llama-8b-40gib": Card(partial(llama_8b, False, 4096), 40, 38, tile="exact", offload="host"),
    "llama-8b-24gib": Card(partial(llama_8b, False, 4096), 24, 22, tile="exact", offload="host"),
    "llama-8b-fp32-40gib": Card(partial(llama_8b, False, 4096), 40, 38, "float32", tile="exact", offload="host"),
    "llama-8b-fp32-24gib": Card(partial(llama_8b, False, 4096), 24, 22, "float32", tile="exact", offload="host"),
    "llama-8b-12gib": Card(partial(llama_8b, False, 4096), 12, 11, tile="exact", larger=True, offload="host"),
    "sdxl-like-16gib": Card(sdxl, 16, 15, offload="host"),
}


def fits(made: Made, optimizer: torch.optim.Optimizer) -> bool:
    """Whether two plain steps fit the card. Leaves neither gradients nor state."""
    module, batch = made
    try:
        for _ in range(2):
            module(batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        optimizer.zero_grad()
        optimizer.state.clear()


def measure(name: str) -> None:
    """Print the row of one model; the card is that of this process."""
    card = CARDS[name]
    with torch.device("meta" if card.larger else "cuda"):
        made = card.build()
    if card.larger:
        module, batch = made
        words = {key: torch.zeros_like(t, device="cuda") for key, t in batch().items()}
        made = to_device(module.to_empty(device="cpu"), "cuda", trained=True), lambda: words
    optimizer = UPDATES[card.update]([p for p in made[0].parameters() if p.requires_grad])
    if not card.larger and fits(made, optimizer):
        raise SystemExit(f"the plain step of {name} fits {card.gib} GiB: the row shows nothing")
    torch.cuda.empty_cache()
    steps = 6 if card.tile == "off" else 8  # two more are observed
    streams.left_nbytes = lambda: 1 << 40  # the host of such a card has room for all that rests, which nobody touches
    mmap.MAP_ANONYMOUS |= _NO_RESERVE
    row = run(
        f"{name}, {card.gib} GiB",
        *(made, optimizer, int(card.budget * GIB), card.update, steps),
        tile=card.tile,
        offload=card.offload,
    )
    print(row, flush=True)
    raise SystemExit(not row.holds)


def each_alone(
    doc: str | None, module: str, nbytes: Mapping[str, int], measure: Callable[[str], None], header: str
) -> NoReturn:
    """The command line of a module that measures each model in a process of its own, on a card of so many bytes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *nbytes], metavar="MODEL", help=" ".join(nbytes))
    parser.add_argument("--here", action="store_true", help="one model, in this process, on the card that it has")
    arguments = parser.parse_args()
    if device.is_bits():
        parser.error("this needs the emulated device in bytes mode: make emulated")
    if arguments.here:
        measure(*arguments.models)
        raise SystemExit
    print(header, flush=True)
    failed = 0
    for name in arguments.models or nbytes:
        environment = {**os.environ, "EMULATED_MEMORY": str(nbytes[name])}
        failed |= subprocess.run([sys.executable, "-m", module, name, "--here"], env=environment).returncode
    raise SystemExit(failed)


def main() -> None:
    what = f"MiB ({MIB} bytes); torch's own allocator on emulated cards that the plain step does not fit, not on a GPU"
    nbytes = {name: card.gib * GIB for name, card in CARDS.items()}
    each_alone(__doc__, __spec__.name, nbytes, measure, f"{what}\n{HEADER}")


if __name__ == "__main__":
    main()
