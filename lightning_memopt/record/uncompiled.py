"""Keep torch.compile away from the functions through which torch and users' code call this package.

If a compiled region runs something eagerly (a graph break, a torch layer that is compiled by itself), dynamo inspects every
Python frame that begins below, including frames of dispatch modes, hooks and destructors. It would compile them again and
again, and fail if they use features that it cannot trace.

A function is marked on its code object, in C, where dynamo keeps its own marks. A mark costs no time if nothing is compiled,
does not need dynamo to be imported, and survives `torch._dynamo.reset()`. (`torch.compiler.disable` wraps every call, and
imports dynamo, which takes seconds.) The mark does not affect code that dynamo traces into.
"""

from __future__ import annotations

from types import CodeType
from typing import Any, TypeVar

from lightning_memopt.torch_private import EVAL_FRAME

F = TypeVar("F")
_dynamo: Any = EVAL_FRAME
_SKIP, _DEFAULT = _dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT


MARKED: dict[CodeType, bool] = {}
"""Marked code -> whether the functions that it calls are left uncompiled, too. Dynamo has no function that tells this."""


def _marked(function: F, below: Any) -> F:
    MARKED[function.__code__] = below is _SKIP  # type: ignore[attr-defined]
    _dynamo.set_code_exec_strategy(function.__code__, _dynamo._FrameExecStrategy(_SKIP, below))  # type: ignore[attr-defined]
    return function


def uncompiled(function: F) -> F:
    """Decorator: if the function is called eagerly, neither it nor the functions that it calls are compiled."""
    return _marked(function, _SKIP)


def uncompiled_itself(function: F) -> F:
    """Decorator for a function that calls users' code: the function is not compiled; for users' code nothing changes."""
    return _marked(function, _DEFAULT)
