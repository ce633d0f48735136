"""Options as text: flags of launchers, a section of a YAML file, and environment variables.

A launcher hands options to the training processes in the environment: `ACCELERATE_USE_MEMOPT=1`, and `ACCELERATE_MEMOPT_BUDGET`
and so on, one for each option. Nothing here imports torch, because the script must be the first to import it.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from lightning_memopt.config import MemOptConfig
from lightning_memopt.errors import ConfigError

USE = "ACCELERATE_USE_MEMOPT"
PREFIX = "ACCELERATE_MEMOPT_"
DEFAULTS = {field.name: field.default for field in fields(MemOptConfig)}
"""Option -> its default."""
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def meanings() -> dict[str, str]:
    """Option -> its text in the docstring of `MemOptConfig`, on one line."""
    section = inspect.cleandoc(MemOptConfig.__doc__ or "").partition("Args:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def check_names(names: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first name that is not an option, with the most similar option. `where`: where the names
    are.
    """
    for name in names:
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, DEFAULTS, 1)
            meant = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{where} has {name!r}, which is not an option. {meant}Use {', '.join(DEFAULTS)}.")


def truth(name: str, text: str) -> bool:
    """The truth value of a text. Raises ConfigError if it is neither 'true' nor 'false'; `name`: the option or variable."""
    if text.strip().lower() not in _TRUTH:
        raise ConfigError(f"{name} is {text!r}; use 'true' or 'false'.")
    return _TRUTH[text.strip().lower()]


def options_of(texts: Mapping[str, str]) -> dict[str, Any]:
    """Options from their texts. Raises ConfigError or BudgetError for a text that the option does not accept."""
    options: dict[str, Any] = {}
    for name, text in texts.items():
        default = DEFAULTS[name]
        if isinstance(default, bool):
            options[name] = truth(name, text)
        elif isinstance(default, (int, float)):
            try:
                options[name] = type(default)(text)
            except ValueError:
                kind = "a whole number" if isinstance(default, int) else "a number"
                raise ConfigError(f"{name} is {text!r}; give {kind}.") from None
        else:
            options[name] = text
    MemOptConfig(**options)  # raises for bad values
    return options


def in_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The texts of the options in the environment; None if memopt is not switched on there. Raises ConfigError for a wrong
    name.
    """
    if not truth(USE, environment.get(USE) or "0"):
        return None
    texts = {name.removeprefix(PREFIX).lower(): text for name, text in environment.items() if name.startswith(PREFIX)}
    check_names(texts, f"The environment ({PREFIX}...)")
    return texts


def for_environment(texts: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that hold these options."""
    return {USE: "1"} | {PREFIX + name.upper(): text for name, text in texts.items()}


def add_flags(parser: Any, prefix: str) -> None:
    """Add `--PREFIXbudget` and so on to a parser or a group of one. A flag that is not given is None."""
    texts = meanings()
    for name, default in DEFAULTS.items():
        text = texts.get(name, "")  # `python -OO` leaves docstrings out
        said = f"{text[:1].upper()}{text[1:]} Default: {default!r}."
        parser.add_argument(f"--{prefix}{name}", default=None, metavar="VALUE", help=said.replace("%", "%%"))


def given_flags(arguments: argparse.Namespace, prefix: str) -> dict[str, str]:
    """The texts of the flags that were given."""
    flags = {name: getattr(arguments, prefix + name) for name in DEFAULTS}
    return {name: text for name, text in flags.items() if text is not None}
