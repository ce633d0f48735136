"""Predicted step times where optimizer state, gradients or frozen weights rest on the host, beside published measurements.

    python -m benchmarks offload_times              # writes results/offload_times.json, a case at a time: a quarter of an hour
    python -m benchmarks offload_times vit_g
    python -m benchmarks offload_times --table      # what is recorded, as Markdown

Nothing is measured: a step is recorded without being computed, as `memopt fit` does, and priced by a card's profile, whose FLOP
rates are peaks of data sheets. So steps take longer on a card. The cases: that of torchao's table of optimizer offload
(pytorch/ao, torchao/optim/README.md), within the bytes that were measured there, and models of tests/emulated/real_size.py.
Budgets are compared with reserved bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from benchmarks.lib.paths import RESULTS
from lightning_memopt.fitting.allowed import SEARCH_SECONDS, config_of
from lightning_memopt.fitting.cards import Card, cards_of
from lightning_memopt.fitting.options import Options
from lightning_memopt.fitting.resting import resting_text
from lightning_memopt.fitting.sources import source_of
from lightning_memopt.fitting.techniques import LIMIT_SECONDS, Techniques
from lightning_memopt.solvers import planner
from tests.emulated import llama

FILE = RESULTS / "offload_times.json"
GB, GIB = 10**9, 1 << 30
Training = tuple[nn.Module, optim.Optimizer, Callable[[], None]]
Row = dict[str, Any]


def _training(model: Any, loss: Callable[[Any], Any], **batch: torch.Tensor) -> Training:
    model.train()
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def step() -> None:
        loss(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _own_loss(output: Any) -> Any:
    return output.loss


def vit_g() -> Training:
    """DINOv2's ViT-g/14, 1.1 billion parameters, bfloat16, 32 images of 224 x 224, 45 classes: that of torchao's table."""
    config = llama.configs.Dinov2Config(
        hidden_size=1536, num_hidden_layers=40, num_attention_heads=24, use_swiglu_ffn=True, image_size=224, num_labels=45
    )
    model = llama.in_bfloat16(lambda: llama.configs.Dinov2ForImageClassification(config))
    images = torch.zeros(32, 3, 224, 224, dtype=torch.bfloat16)
    return _training(model, _own_loss, pixel_values=images, labels=torch.zeros(32, dtype=torch.long))


def llama_8b() -> Training:
    """Llama 3 8B, bfloat16, 4,096 tokens, all weights trained."""
    words = torch.zeros(1, 4096, dtype=torch.long)
    return _training(llama.llama_8b(4096), _own_loss, input_ids=words, labels=words)


def llama_70b() -> Training:
    """Llama 3 70B, bfloat16, 2,048 tokens: the linear layers of its blocks packed to 4 bits, with adapters of rank 16."""
    words = torch.zeros(1, 2048, dtype=torch.long)
    return _training(llama.llama_70b(), _own_loss, input_ids=words, labels=words)


def sdxl() -> Training:
    """A U-Net of the size of SDXL's, 2.6 billion parameters, bfloat16, 4 latents of 128 x 128."""
    from tests.emulated.unet import DiffusionUNet

    noisy, words = torch.zeros(4, 4, 128, 128).bfloat16(), torch.zeros(4, 77, 2048).bfloat16()
    return _training(DiffusionUNet().bfloat16(), _own_loss, noisy=noisy, words=words)


@dataclass(frozen=True)
class Case:
    """A model, the profile or file of its card, and budgets in bytes by name."""

    card: str
    budgets: dict[str, int]


CASES = {
    "vit_g": Case(
        "benchmarks/offload/rtx4070ti-super.json",
        {"9.82 GB": 9_820_000_000, "5.24 GB": 5_240_000_000, "4.01 GB": 4_010_000_000},
    ),
    "sdxl": Case("benchmarks/offload/rtx4070ti-super.json", {"15 GiB": 15 * GIB}),
    "llama_8b": Case("a100-40gb", {"38 GiB": 38 * GIB}),
    "llama_8b_24": Case("rtx4090-24gb", {"22 GiB": 22 * GIB}),
    "llama_70b": Case("rtx4090-24gb", {"22 GiB": 22 * GIB}),
}


def rows(name: str) -> list[Row]:
    """The predictions of a case, one for each of its budgets."""
    case = CASES[name]
    (whole,) = cards_of([case.card])
    beside = whole.context_nbytes + whole.device.workspace_nbytes
    cards = [replace(whole, device=replace(whole.device, nbytes=nbytes + beside)) for nbytes in case.budgets.values()]
    function = f"benchmarks.offload.offload_times:{name.removesuffix('_24')}"
    config = config_of("host", "never", "exact", budgets={})
    with contextlib.closing(source_of(function, Options(), (whole.name, whole.device.nbytes))) as source:
        recorded = source.record(1, 1)
        budgets = sorted(card.usable_nbytes for card in cards)
        timed = cards[0].timed(recorded.graph)
        solve = partial(planner.solve, timed, budgets=budgets, keep_nbytes=budgets[0])
        frontier = solve(search_seconds=SEARCH_SECONDS, limit_seconds=LIMIT_SECONDS)
        ways = Techniques(source, recorded.graph, frontier, cards, budgets, config, recorded.resting)
        return [_row(label, card, ways, timed.step_seconds) for label, card in zip(case.budgets, cards, strict=True)]


def _row(label: str, card: Card, ways: Techniques, step_seconds: float) -> Row:
    found = ways.best(card)
    predicted = found.plan.predicted
    row = {
        "card": card.name,
        "budget": label,
        "budget_nbytes": card.usable_nbytes,
        "fits": found.fits,
        "needed_nbytes": found.nbytes,
        "allocated_nbytes": predicted.peak_nbytes,
        "plain_seconds": step_seconds,
        "seconds": step_seconds + found.seconds,
        "moved_nbytes": predicted.moved_nbytes,
        "techniques": found.techniques,
        "at_rest": resting_text(found.plan.states, found.plan.weights),
    }
    print(json.dumps(row), flush=True)
    return row


def table(recorded: dict[str, list[Row]]) -> str:
    """The rows as Markdown."""
    lines = ["| model | card | budget | plain step, if it fitted | step, predicted | moved a step |", "|---" * 6 + "|"]
    for name, own in recorded.items():
        for row in own:
            took = f"{row['seconds']:.2f} s" if row["fits"] else "does not fit"
            moved = f"{row['moved_nbytes'] / GB:.1f} GB"
            lines.append(f"| {name} | {row['card']} | {row['budget']} | {row['plain_seconds']:.2f} s | {took} | {moved} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    recorded: dict[str, list[Row]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in () if args.table else args.cases or CASES:
        recorded[name] = rows(name)
        FILE.write_text(json.dumps({n: recorded[n] for n in CASES if n in recorded}, indent=1) + "\n")
    print(table(recorded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
