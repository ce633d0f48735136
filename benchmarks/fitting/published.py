"""What `memopt fit` predicts beside memory that others measured and published.

python -m benchmarks published     # ResNet-50 by torch's MemTracker (peft issue 2196), Qwen3 on an H100 (transformers 48444)
python -m benchmarks published --mlps mlp_data_step1.csv --rows 300        # measured MLPs (itu-rad/GPUMemNet, Datasets/MLP)

Nothing was fitted to these numbers. The MLPs' totals have the CUDA context and cuBLAS's workspaces in them, which are taken
to be what the smallest total has beyond what is predicted of it.
"""

from __future__ import annotations

import argparse
import ast
import csv
import random
import re
import statistics
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_memopt.bench.subject import Training
from lightning_memopt.fitting.recording import record
from lightning_memopt.graph import Graph
from lightning_memopt.plan.allocator import Settings, reserved
from lightning_memopt.plan.peak import Breakdown, at_peak
from lightning_memopt.solvers.rollout import keep_all

MIB = 1 << 20
RESNET = {
    "all weights": {"weights": 89.88, "gradients": 89.68, "activations": 1310.95, "temporary": 12.25, "optimizer": 179.37},
    "LoRA": {"weights": 91.10, "activations": 2618.32, "temporary": 12.25},
}
"""MiB in github.com/huggingface/peft/issues/2196: batch 16 on the CPU. "weights" are its parameters and buffers."""
RANK = 4
"""The rank whose adapters have as many parameters as the issue names: 317,772. Its dropout is not named; 0.1 is usual."""

QWEN3 = {"plain": 194.1, "offload": 66.1}
"""MiB in github.com/huggingface/transformers/pull/48444: after the forward of a Qwen3 of 8 layers and width 1,024 on 8,192
tokens in bfloat16, with each layer checkpointed, on an H100. "offload": the layers' inputs are on the host.
"""
HEADS = (64, 128)
"""The heads' width is not named: that of 16 heads, and Qwen3's default."""


def _peak(graph: Graph) -> Breakdown:
    return at_peak(graph, keep_all(graph))


def _resnet50(adapted: bool) -> Training:
    import peft
    import transformers

    model: Any = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1))
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_dropout=0.1, target_modules=["convolution"]))
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    images = torch.randn(16, 3, 224, 224)

    def step() -> None:
        model(pixel_values=images).logits.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return Training(model, optimizer, step)


def resnets() -> list[tuple[str, str, float, float]]:
    """(variant, purpose, MiB measured, MiB predicted)."""
    rows = []
    for name, measured in RESNET.items():
        at = {
            purpose: nbytes / MIB for purpose, nbytes in _peak(record(partial(_resnet50, name == "LoRA")).graph).by(1).items()
        }
        predicted = {
            "weights": at["weights"],
            "gradients": at["gradients"],
            "activations": at["feature maps"] + at["inputs"],
            "temporary": at["in use"],
            "optimizer": at["optimizer state"],
        }
        rows += [(name, purpose, mib, predicted[purpose]) for purpose, mib in measured.items()]
    return rows


def _qwen3(head: int) -> Training:
    """Without a language model's head, whose logits alone would be larger than what was measured."""
    import transformers

    config: Any = transformers.Qwen3Config  # takes keywords that its signature does not name
    model: Any = transformers.Qwen3Model(
        config(
            hidden_size=1024, num_hidden_layers=8, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
            head_dim=head, vocab_size=1000, use_cache=False,
        )
    ).bfloat16().train()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.zeros(1, 8192, dtype=torch.long)

    def step() -> None:
        hidden = model(words).last_hidden_state
        hidden.sum().backward()
        del hidden
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def qwen3s() -> list[tuple[int, str, float, float]]:
    """(width of a head, where the layers' inputs are, MiB measured, MiB predicted): what the recorded step has in memory when
    its forward ends, without what its layers have made, and with their inputs.
    """
    rows = []
    for head in HEADS:
        graph = record(partial(_qwen3, head), cuda=True).graph
        end = graph.forward[-1].at
        freed = {life.tensor: life.freed_at for life in keep_all(graph)}
        held = [t for t in graph.tensors if t.born_at <= end < max(t.freed_at, freed.get(t.id, 0))]
        own = [t for t in held if t.kind not in ("parameter", "buffer", "optimizer_state")]
        outside = sum(t.nbytes for t in own if not t.name.startswith("layers.")) / MIB
        inputs = 8 * 8192 * 1024 * 2 / MIB
        rows += [(head, how, mib, outside + inputs * (how == "plain")) for how, mib in QWEN3.items()]
    return rows


def _mlp(row: dict[str, str]) -> Training:
    """The network of a row of the data set, trained as by the authors' script (NeuroNetGen_scripts/MLP/mlp.py)."""
    sizes = re.match(r"input:(\d+)_", row["Filename"])
    assert sizes is not None
    width, samples = int(sizes[1]), int(row["Batch Size"])
    layers: list[nn.Module] = []
    inputs = width
    for kind, size, _ in ast.literal_eval(row["Activations-Params"]):
        layers.append(nn.Linear(width, size) if kind == "linear" else getattr(nn, kind)())
        width = size
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(samples, inputs), torch.zeros(samples, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return Training(model, optimizer, step)


def mlps(rows: Iterable[dict[str, str]]) -> list[tuple[int, float]]:
    """(MiB measured of the process, MiB that the allocator is predicted to reserve) for each network."""
    found = []
    for row in rows:
        graph = record(partial(_mlp, row), cuda=True).graph
        nbytes = reserved(graph, keep_all(graph), Settings()).peak_nbytes
        found.append((int(row["Max GPU Memory (MiB)"]), nbytes / MIB))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlps", help="the file of measured MLPs")
    parser.add_argument("--rows", type=int, default=300, help="number of MLPs, chosen at random (default: 300)")
    args = parser.parse_args()
    print("| ResNet-50, batch 16 | purpose | measured, MiB | predicted, MiB |\n|---|---|---|---|")
    for name, purpose, measured, predicted in resnets():
        print(f"| {name} | {purpose} | {measured:,.2f} | {predicted:,.2f} |")
    print("\n| Qwen3, width of a head | layers' inputs | measured, MiB | predicted, MiB |\n|---|---|---|---|")
    for head, how, measured, predicted in qwen3s():
        print(f"| {head} | {how} | {measured:,.1f} | {predicted:,.1f} |")
    if args.mlps:
        with open(args.mlps, newline="") as file:
            rows = list(csv.DictReader(file))
        ((smallest, own_mib),) = mlps([min(rows, key=lambda row: int(row["Max GPU Memory (MiB)"]))])
        context = smallest - own_mib
        pairs = [(measured, context + mib) for measured, mib in mlps(random.Random(0).sample(rows, args.rows))]
        errors = sorted((predicted - measured) / measured for measured, predicted in pairs)
        totals = f"{min(pairs)[0]:,} to {max(pairs)[0]:,} MiB"
        print(f"\n{len(pairs)} MLPs, {totals}, of which {context:,.0f} are taken to be the context and cuBLAS's workspaces:")
        print(f"error of the total: median {statistics.median(errors):+.1%}, {errors[0]:+.1%} to {errors[-1]:+.1%}")
        for measured, predicted in pairs:
            if predicted > 1.05 * measured:
                print(f"measured {measured:,}, predicted {predicted:,.0f}")
        own = [(predicted - measured) / (measured - context) for measured, predicted in pairs if measured >= context + 200]
        print(f"of what is not context, where that is 200 MiB or more ({len(own)} MLPs): median {statistics.median(own):+.1%}")


if __name__ == "__main__":
    main()
