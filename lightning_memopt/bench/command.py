"""The command `memopt bench` and its arguments. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_memopt.bench import user_code
from lightning_memopt.device.kinds import kind_of
from lightning_memopt.errors import ConfigError, needing


class _Defaults(NamedTuple):
    """Default arguments. On a GPU a run takes less than eight minutes, including the row that runs when time is up."""

    budgets: str
    solver_seconds: float
    limit_seconds: float | None


_CPU, _CUDA = _Defaults("60%,40%,25%", 30.0, None), _Defaults("50%,25%", 5.0, 420.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="package.module:function returning (model, optimizer, step), or one of the zoo: gpt2, llama, resnet50, t5, bert, "
        "vit, whisper, mixtral (needs transformers)",
    )
    parser.add_argument(
        "--budgets", default=None, help="shares of the unmodified peak above what is resident: 60%%,40%%,25%% (default)"
    )
    parser.add_argument("--methods", default=None, help="names, with commas between them (default: all)")
    parser.add_argument("--rounds", type=int, default=None, help="pairs of steps that are timed for a row (default: 25)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default: 1, for steady times)")
    parser.add_argument(
        "--solver-seconds", type=float, default=None, help=f"limit of a solver (default: {_CPU.solver_seconds:.0f})"
    )
    parser.add_argument(
        "--limit-seconds", type=float, default=None, help=f"no row begins later (default: {_CUDA.limit_seconds:.0f} on cuda)"
    )
    parser.add_argument("--quick", action="store_true", help="one budget, two rounds, and few methods")
    parser.add_argument("--again", action="store_true", help="measure everything once more")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder of the results (default: bench)")


_QUICK = "per-block,selective,ours,ours-flops"


def run(args: argparse.Namespace, more: dict[str, Callable[..., Any]] | None = None) -> int:
    """Compare, and print the page of Markdown.

    Args:
        more: builders of models in addition to the zoo.

    Returns 0, or 1 if the unmodified step of a model fails. Raises ConfigError or MissingExtraError before anything is
    measured, or, if a user's function does not return a training, before its model is measured.
    """
    import torch

    from lightning_memopt.bench import compare, tables
    from lightning_memopt.device.places import is_here

    names = tuple(dict.fromkeys(args.models))
    if not is_here(torch.device(args.device)):
        raise ConfigError(f"--device {args.device}: torch sees no such device here. Use --device cpu.")
    default = _CPU if kind_of(args.device).is_host else _CUDA
    rounds = (2 if args.quick else 25) if args.rounds is None else args.rounds
    asked = compare.Asked(
        models=names,
        methods=_methods(args.methods or (_QUICK if args.quick else None)),
        budgets=_budgets(args.budgets or ("40%" if args.quick else default.budgets)),
        rounds=_least("--rounds", rounds, 1),
        device=args.device,
        threads=_least("--threads", args.threads, 0),
        solver_seconds=default.solver_seconds if args.solver_seconds is None else args.solver_seconds,
    )
    builders = {name: _builder(name, torch.device(args.device), more or {}) for name in names}
    limit = default.limit_seconds if args.limit_seconds is None else args.limit_seconds
    results = compare.run(asked, builders, args.out, args.again, limit, _progress)
    print(tables.page(results.data))
    return int(any(results.rows(name)["unmodified"]["state"] != "measured" for name in names))


def _progress(line: str) -> None:
    import sys

    print(line, file=sys.stderr, flush=True)


def _least(option: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{option} is {value}; give {least} or more.")
    return value


def _methods(text: str | None) -> tuple[str, ...]:
    from lightning_memopt.bench import catalogue

    names = catalogue.DEFAULT if text is None else tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in catalogue.TITLES]:
        raise ConfigError(f"--methods: there is no {', '.join(unknown)}. Give some of {', '.join(catalogue.TITLES)}.")
    return names


def _budgets(text: str) -> tuple[str, ...]:
    from lightning_memopt.bench.catalogue import share_of

    budgets = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for budget in budgets:
        try:
            share_of(budget)
        except ValueError:
            raise ConfigError(
                f"--budgets: {budget!r} is not a share. Give shares of what the step takes above what is resident: 60%,40%"
            ) from None
    return budgets


def _builder(name: str, device: Any, more: dict[str, Callable[..., Any]]) -> Callable[[], Any]:
    """Builds the training of this name."""
    if ":" in name:
        return user_code.builder(name)
    with needing("bench", "The zoo needs"):
        from lightning_memopt.bench import zoo
    models = {**zoo.MODELS, **more}
    if name not in models:
        raise ConfigError(f"there is no model {name!r}; there are {', '.join(models)}, or give package.module:function.")
    return partial(_of_zoo, zoo.training, models[name], device)


def _of_zoo(training: Callable[..., Any], build: Callable[[], Any], device: Any) -> Any:
    return training(build(), device)
