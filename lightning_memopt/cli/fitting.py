"""`memopt fit`: whether a training step fits on cards that are not here."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import fields
from functools import partial
from typing import Any

from lightning_memopt.cli.arguments import nbytes_of
from lightning_memopt.fitting.options import DEVICES, DTYPES, OPTIMIZERS, TASKS, Options
from lightning_memopt.solvers.collector import collector_paused


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    fit = commands.add_parser("fit", help="whether a training step fits on cards that are not here, by a plan or as it is")
    fit.add_argument(
        "source",
        nargs="+",
        help="package.module:function returning (model, optimizer, step); a config.json of transformers, its folder, or the "
        "id of a model; or, after --, a command that runs a training script: python train.py --lr 0.1",
    )
    fit.add_argument("--card", action="append", default=[], metavar="CARD", help="24GiB, a profile, or a file of rates; repeat")
    fit.add_argument(
        "--ranks",
        type=_numbers,
        default=(1,),
        metavar="N,N",
        help="numbers of cards over which FSDP2 shards the model of a config: 1,2,4,8 (default: 1); sizes are of one card",
    )
    default = Options()
    fit.add_argument("--task", help=f"of a config: {', '.join(TASKS)}")
    fit.add_argument("--batch", type=int, default=default.batch, help=f"samples of a step (default: {default.batch})")
    fit.add_argument("--length", type=int, default=default.length, help=f"tokens of a sample (default: {default.length})")
    fit.add_argument(
        "--dtype",
        default=default.dtype,
        help=f"{', '.join(DTYPES)} (default: {default.dtype}); mixed-bf16 is autocast with fp32 weights",
    )
    fit.add_argument("--optimizer", default=default.optimizer, help=f"{', '.join(OPTIMIZERS)} (default: {default.optimizer})")
    fit.add_argument("--lora", type=int, default=None, metavar="RANK", help="train adapters of this rank on all linear layers")
    fit.add_argument(
        "--device", default=default.device, help=f"whose operators run: {', '.join(DEVICES)} (default: {default.device})"
    )
    fit.add_argument(
        "--values",
        metavar="MODULE:FUNCTION",
        help="a function that is asked for values that steer the step (docs/fit.md); without it, they are assumed",
    )
    fit.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="ask about the step with gradient checkpointing, too: that of the model of a config, or what a function or a "
        "script checkpoints itself",
    )
    fit.add_argument(
        "--time-limit",
        type=float,
        default=default.time_limit,
        metavar="SECONDS",
        help=f"how long a script may run until its fourth update (default: {default.time_limit:.0f})",
    )
    fit.add_argument(
        "--offload",
        default="none",
        help="none, host, disk or auto: where a plan may park saved tensors until backward, as for a run (default: none)",
    )
    for tier, what in (("host", "of the host's memory"), ("disk", "of files")):
        fit.add_argument(
            f"--{tier}-budget",
            default=None,
            type=partial(nbytes_of, f"--{tier}-budget"),
            metavar="BYTES",
            help=f"the most bytes {what} that a plan may take for what it parks, as for a run: 64GiB (default: no limit)",
        )
    fit.add_argument(
        "--optimizer-in-backward",
        default="never",
        metavar="WHEN",
        help="never, auto or always: whether a plan may update parameters in backward, as for a run (default: never)",
    )
    fit.add_argument(
        "--tile",
        default="exact",
        help="off, exact or rounding: whether a plan may run the loss head in tiles, so that logits are never whole, as for "
        "a run (default: exact)",
    )
    fit.add_argument("-o", "--output", metavar="PLAN", help="write the plan for the card, which a run takes by plan=PLAN")
    fit.add_argument("--json", action="store_true", help="print the answer as JSON")
    fit.set_defaults(run=run)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def run(args: argparse.Namespace) -> int:
    """Print the answer. Returns 0 if the step fits on every card, 3 if not."""
    source = args.source[0] if len(args.source) == 1 else args.source
    with collector_paused():
        from lightning_memopt.fitting import plans
        from lightning_memopt.fitting.answer import fit
        from lightning_memopt.fitting.sources import import_libraries

        import_libraries(source)
    if args.output is not None:
        plans.check(args.card, args.output, args.ranks)
    names = "offload", "host_budget", "disk_budget", "optimizer_in_backward", "tile"
    techniques = {name: getattr(args, name) for name in names}
    options = {field.name: getattr(args, field.name) for field in fields(Options)}
    freezes = not gc.get_freeze_count()  # what a caller has frozen stays frozen
    if freezes:
        gc.freeze()  # what is imported stays: no collection needs to walk it
    try:
        answer = fit(source, args.card, args.ranks, **techniques, **options)
    finally:
        if freezes:
            gc.unfreeze()
    print(json.dumps(answer.to_json()) if args.json else answer.table())
    if args.output is not None:
        said = answer.save_plan(args.output) if answer.fits else f"{args.output} is not written: no plan fits."
        print(said, file=sys.stderr if args.json else sys.stdout)
    return 0 if answer.fits else 3
