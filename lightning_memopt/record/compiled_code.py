"""Learn of runs of the code that a compiler generated: a region's forward, or its backward.

Most of Inductor's code is no op at all. The rest, and code of other backends, calls ops on buffers of its own. These come and
go unseen. A recorder that saw these ops would hold the buffers, and the step would take more memory than without it.
So they are hidden from the recorder.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lightning_memopt.record.seams import Seams
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import INDUCTOR_CODE, generated_code_class

Listener = Callable[[], contextlib.AbstractContextManager[None]]
"""`listener()` is a context around a run of generated code."""


_LISTENERS: Seams[Listener] = Seams(tuple)
"""Who is told: by code that was compiled to tell (`telling`), and by Inductor's, whose calls are a seam."""


@contextlib.contextmanager
def around_compiled(listener: Listener) -> Iterator[None]:
    """Within, `listener` is told of generated code. What Inductor compiles first within is not seen before the next time."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_LISTENERS.listening(listener))
        if INDUCTOR_CODE in sys.modules:  # else nothing was generated yet in this process, and importing it takes seconds
            stack.enter_context(_seams.listening(listener))
        yield


def telling(code: Callable[..., Any]) -> Callable[..., Any]:
    """Code that tells the listeners when it runs."""

    @uncompiled
    def run(*args: Any) -> Any:
        if not _LISTENERS.listeners:
            return code(*args)
        with contextlib.ExitStack() as stack:
            for listener in tuple(_LISTENERS.listeners):
                stack.enter_context(listener())
            return code(*args)

    run._boxed_call = getattr(code, "_boxed_call", False)  # type: ignore[attr-defined]  # as AOT autograd marks it
    return run


_seams: Seams[Listener] = Seams(lambda: [(generated_code_class(), "__call__", telling)], stays=True)
