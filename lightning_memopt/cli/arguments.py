"""The types of arguments of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from lightning_memopt.errors import BudgetError, ConfigError
from lightning_memopt.units import parse_budget

_NO_DEVICE = 1 << 62
"""Bytes of the device for budgets that are not checked against a real device."""


def nbytes_of(option: str, text: str, device: str = "") -> int:
    """The bytes that the text means. Raises ConfigError for other text, and for a share of a device of unknown size.

    device: the option that says how large the device is, if there is one.
    """
    try:
        nbytes, doubled = (parse_budget(text, most) for most in (_NO_DEVICE, 2 * _NO_DEVICE))
    except BudgetError:
        raise ConfigError(f"{option} is {text!r}. Give bytes, 1 or more and less than 4 EiB: 1048576, 11GiB") from None
    if nbytes != doubled:
        remedy = f", or say how large the device is with {device}" if device else ""
        raise ConfigError(f"{option} {text} is a share of a device. Give bytes: 1048576, 11GiB{remedy}")
    return nbytes


def seconds_of(text: str) -> float:
    """A time limit as an argument: seconds, 0 or more."""
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; give seconds, 0 or more")
    return seconds


def ending(suffix: str) -> Callable[[str], Path]:
    """A path with this suffix, as an argument."""

    def path(text: str) -> Path:
        if Path(text).suffix != suffix:
            raise argparse.ArgumentTypeError(f"{text!r}; give a path that ends with {suffix}")
        return Path(text)

    return path
