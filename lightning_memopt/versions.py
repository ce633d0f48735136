"""The versions of torch that replay was tested on. On others nothing is patched or recorded: the run is the plain one."""

from __future__ import annotations

import re
import warnings
from functools import cache

import torch

TESTED = ((2, 11), (2, 15))
"""The first and the last (major, minor), both included. What replay stands on below the dispatcher is no public interface."""


def supported() -> bool:
    """Whether this torch is one of those; where it is not, one warning a process says so."""
    return _tested(str(torch.__version__))


@cache
def _tested(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and TESTED[0] <= (int(found[1]), int(found[2])) <= TESTED[1]:
        return True
    first, last = (".".join(map(str, v)) for v in TESTED)
    warnings.warn(
        f"MemOpt: torch {version} is outside of the versions that this package was tested on ({first} to {last}): nothing is "
        "recorded or planned, the run is the plain one. Install a torch in that range, or a newer lightning-memopt.",
        stacklevel=4,
    )
    return False
