"""The smallest plans of language models with their loss head in tiles, beside those without, and the bits of both.

    python -m benchmarks tiled_models               # writes results/tiled_models.json, a model at a time: half an hour
    python -m benchmarks tiled_models gpt2 gemma2
    python -m benchmarks tiled_models --table       # what is recorded, as Markdown

The tiny text models of benchmarks/models/zoo with a vocabulary of 16,000 words, so that logits matter as they do at real size.
Bytes are those of the counter around torch's allocator, above what is there when a step begins. AdamW, float32, dropout on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from benchmarks.lib.paths import RESULTS
from benchmarks.models.zoo import ZOO
from benchmarks.models.zoo.base import tiny
from benchmarks.recompute.tiles import tiles_text
from lightning_memopt import optimize
from lightning_memopt.native import counting

FILE = RESULTS / "tiled_models.json"
WORDS = 16_000
STEPS = 10
"""Up to eight of them are observed."""
_MIB = 2**20
Row = dict[str, Any]


class Outcome(NamedTuple):
    """losses, parameters: of the training. peak_nbytes: of its last step. status: of the run; None without one."""

    losses: list[float]
    parameters: list[torch.Tensor]
    peak_nbytes: int
    status: Any

    def same(self, other: Outcome) -> bool:
        """Whether both have the same bits."""
        return self.losses == other.losses and all(map(torch.equal, self.parameters, other.parameters))


def language_models() -> list[str]:
    """The names of the models of the zoo that predict words of a vocabulary."""
    suffixes = "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"
    families = "encoder", "decoder", "seq2seq", "experts", "recurrent"
    return [name for name, a in ZOO.items() if a.family in families and a.model.endswith(suffixes)]


def trained(name: str, tile: str | None) -> Outcome:
    """A training of the model by its smallest plan with this value of `tile`; None: without a plan."""
    architecture = ZOO[name]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    cls = getattr(transformers, architecture.model)
    config = tiny(cls.config_class, **architecture.own() | {"vocab_size": WORDS})
    model = cls(config).train()
    batch = architecture.batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counts = counting.install()
    assert counts is not None, "needs a compiler"
    losses = list[float]()
    peak_nbytes, status = 0, None

    def steps() -> None:
        nonlocal peak_nbytes
        for _ in range(STEPS):
            window = counts.window()
            assert window is not None
            before = window.reset()
            loss = architecture.loss(model(**batch))
            loss.backward()
            losses.append(loss.item())
            del loss
            optimizer.step()
            optimizer.zero_grad()
            peak_nbytes = window.peak_nbytes - before
            window.close()

    if tile is None:
        steps()
    else:
        with optimize(model, optimizer, budget="min", tile=tile, max_slowdown=1e9, profile_steps=1, verbose=False) as run:
            steps()
            status = run.status()
    return Outcome(losses, [p.detach() for p in model.parameters()], peak_nbytes, status)


def examined(name: str) -> Row:
    """What the smallest plans with and without tiles take, and whether the bits are those of the plain training."""
    plain = trained(name, tile=None)
    whole = trained(name, tile="off")
    tiled = trained(name, tile="exact")
    assert whole.status is not None and tiled.status is not None
    plan = tiled.status.plan
    return {
        "plain_nbytes": plain.peak_nbytes,
        "whole_nbytes": whole.peak_nbytes,
        "tiled_nbytes": tiled.peak_nbytes,
        "same_bits": whole.same(plain) and tiled.same(plain),
        "tiles": "" if plan is None else tiles_text(plan.tiles),
    }


def table(results: dict[str, Row]) -> str:
    """A row for each model."""
    lines = [
        "| model | plain | smallest plan without tiles | with tiles | bits of *plain* | tiles |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        if "error" in row:
            lines.append(f"| {name} |  |  |  |  | {row['error']} |")
            continue
        peaks = " | ".join(f"{row[key] / _MIB:.1f}" for key in ("plain_nbytes", "whole_nbytes", "tiled_nbytes"))
        lines.append(f"| {name} | {peaks} | {'yes' if row['same_bits'] else 'no'} | {row['tiles']} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tiled_models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(language_models()))
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    args = parser.parse_args()
    results: dict[str, Row] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if args.table:
        print(table(results))
        return 0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in args.models or language_models():
        try:
            results[name] = examined(name)
        except Exception as error:  # a row says so, and the others go on
            results[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(table({name: results[name]}).splitlines()[-1], flush=True)
        FILE.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
