"""The versions of torch with which rebuilding was tested. With other versions nothing is patched or recorded."""

from __future__ import annotations

import re
import warnings
from functools import cache

import torch

TESTED = ((2, 11), (2, 15))
"""First and last tested (major, minor), inclusive. Rebuilding relies on internals below the dispatcher that may change."""


def supported() -> bool:
    """Whether the installed torch was tested; if not, warns once per process."""
    return _tested(str(torch.__version__))


@cache
def _tested(version: str) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and TESTED[0] <= (int(match[1]), int(match[2])) <= TESTED[1]:
        return True
    first, last = (".".join(map(str, v)) for v in TESTED)
    warnings.warn(
        f"MemOpt: torch {version} is outside of the versions that this package was tested on ({first} to {last}): nothing is "
        "recorded or planned, the run is the plain one. Install a torch in that range, or a newer lightning-memopt.",
        stacklevel=4,
    )
    return False
