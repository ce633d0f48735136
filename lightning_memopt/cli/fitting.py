"""`memopt fit`: whether a training step fits on cards that are not here."""

from __future__ import annotations

import argparse
import json
from typing import Any

_OPTIONS = ("task", "batch", "length", "dtype", "optimizer", "lora")


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    fit = commands.add_parser("fit", help="whether a training step fits on cards that are not here, by a plan or as it is")
    fit.add_argument(
        "source",
        help="package.module:function returning (model, optimizer, step), a config.json of transformers, its folder, or the "
        "id of a model",
    )
    fit.add_argument("--card", action="append", default=[], metavar="CARD", help="24GiB, a profile, or a file of rates; repeat")
    fit.add_argument(
        "--task", help="of a config: causal-lm, masked-lm, seq2seq-lm, sequence-classification, image-classification"
    )
    fit.add_argument("--batch", type=int, default=1, help="samples of a step (default: 1)")
    fit.add_argument("--length", type=int, default=1024, help="tokens of a sample (default: 1024)")
    fit.add_argument("--dtype", default="bf16", help="fp32, bf16 (default), fp16, or mixed-bf16: autocast with fp32 weights")
    fit.add_argument("--optimizer", default="adamw", help="adamw (default), adam, sgd, adafactor")
    fit.add_argument("--lora", type=int, default=None, metavar="RANK", help="train adapters of this rank on all linear layers")
    fit.add_argument("--json", action="store_true", help="print the answer as JSON")
    fit.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answer. Returns 0 if the step fits on every card, 3 if not."""
    from lightning_memopt.fitting.answer import fit

    answer = fit(args.source, args.card, **{name: getattr(args, name) for name in _OPTIONS})
    print(json.dumps(answer.to_json()) if args.json else answer.table())
    return 0 if answer.fits else 3
