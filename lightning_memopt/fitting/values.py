"""Values that steer a step, and that nobody computed: the user may know them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_memopt.bench import user_code
from lightning_memopt.errors import ConfigError

GIVEN = "given "
"""Before the names of ops whose values were given, where what was assumed is counted."""
_OWN = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
"""Folders of code that passes questions on."""


@dataclass(frozen=True)
class Unknown:
    """Values that a step asks for, and that were not computed.

    op: what asks: "item" (Python reads a number, or a tensor as numbers), "topk", "argmax" (for their indices), or an operator
        that makes true and false: "gt", "isnan", "all".
    size: of the tensor of values: `()` for one number.
    dtype: their type.
    choices: they are indices below this number; None: they are no indices.
    where: the file and the line that asks.
    """

    op: str
    size: torch.Size
    dtype: torch.dtype
    choices: int | None
    where: str


Values = Callable[[Unknown], "float | torch.Tensor | None"]
"""Gives values: a tensor of the size that is asked for, or a number, which all of them are. None: they are assumed."""


def values_of(given: str | Values | None) -> Values | None:
    """The function, which may be named: `package.module:function`. Raises ConfigError if there is none."""
    if not isinstance(given, str):
        return given
    if ":" not in given:
        raise ConfigError(f"values is {given!r}; give a function, or its name: package.module:function")
    function: Any = user_code.function_of(given)
    return function


def asked(values: Values, op: str, size: torch.Size, dtype: torch.dtype, choices: int | None = None) -> torch.Tensor | None:
    """The values that the user's function gives, of this size and type. None if it gives none.

    Raises ConfigError if they have another size or type, or if they are indices beyond the choices.
    """
    unknown = Unknown(op, size, dtype, choices, _where())
    with user_code.in_user_code(f"values({unknown})"):
        given: Any = values(unknown)
    if given is None:
        return None
    if isinstance(given, int) or (isinstance(given, float) and dtype.is_floating_point):
        given = torch.full((), given, dtype=dtype).expand(size)
    if not isinstance(given, torch.Tensor) or given.size() != size or not torch.can_cast(given.dtype, dtype):
        what = f"a {given.dtype} tensor of size {tuple(given.size())}" if isinstance(given, torch.Tensor) else repr(given)
        raise ConfigError(
            f"values({unknown}) returned {what}. Make it return a number, a tensor of that size and type, or None to have it "
            "assumed."
        )
    if choices is not None and given.numel() and not 0 <= int(given.min()) <= int(given.max()) < choices:
        found = f"{given.min()} to {given.max()}"
        raise ConfigError(f"values({unknown}) returned indices {found}. Make it return some of 0 to {choices - 1}.")
    return given.detach().to(dtype)


def _where() -> str:
    """The innermost line that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
