"""Learn of runs of the code that Inductor generated: a region's forward, or its backward.

Most of that code is no op at all. The rest calls ops on buffers of its own, which come and go unseen. A recorder that saw these
ops would hold the buffers, and the step would take more memory than without it. So they are hidden from the recorder.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from lightning_memopt.record.seams import Seams
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import INDUCTOR_CODE, generated_code_class

Listener = Callable[[], contextlib.AbstractContextManager[None]]
"""`listener()` is a context around a run of generated code."""


def around_compiled(listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Within, `listener` is told of generated code. What is compiled first within is not seen before the next time."""
    if INDUCTOR_CODE not in sys.modules:  # nothing was generated yet in this process, and importing it takes seconds
        return contextlib.nullcontext()
    return _seams().listening(listener)


@cache
def _seams() -> Seams[Listener]:
    return Seams((generated_code_class(), "__call__", _telling))


def _telling(original: Any) -> Any:
    @uncompiled
    def call(code: Any, inputs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for listener in tuple(_seams().listeners):
                stack.enter_context(listener())
            return original(code, inputs)

    return call
