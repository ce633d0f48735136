"""`fabric run` that knows the strategies "memopt" and "memopt_ddp": the same command, and a flag for each option.

    python -m lightning_memopt.fabric run --strategy memopt --memopt_budget 8GiB --devices 2 train.py

Fabric's own command reads its registry of strategies before any script runs, and cannot add to it. The script needs no change:
each of its processes imports this package first (script.py). The default of --strategy is "memopt".
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import MemOptError
from lightning_memopt.fabric import fabric_private
from lightning_memopt.integrations import wire


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name (default: those of the command line)."""
    given_arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m lightning_memopt.fabric",
        usage="%(prog)s run [--memopt_OPTION VALUE...] [flags of `fabric run`] SCRIPT [arguments of the script]",
        description="Flags that are not listed are those of `fabric run`: see `fabric run --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=["run"])
    wire.add_flags(parser.add_argument_group("options of MemOpt"), "memopt_")
    given, rest = parser.parse_known_args(given_arguments)
    try:
        texts = wire.given_flags(given, "memopt_")
        MemOptConfig(**wire.options_of(texts))
    except MemOptError as error:
        parser.error(str(error))
    os.environ |= wire.for_environment(texts)
    fabric_private.run_module(rest, "lightning_memopt.fabric.script", strategy="memopt")


if __name__ == "__main__":
    main()
