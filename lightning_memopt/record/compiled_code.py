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

from lightning_memopt.record.seams import Listening, Seams
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import INDUCTOR_CODE, generated_code_class

Listener = Callable[[], contextlib.AbstractContextManager[None]]
"""`listener()` is a context around a run of generated code."""


_LISTENERS: Seams[Listener] = Seams(tuple, stays=True)
"""Who is told: by code that was compiled to tell (`telling`), and by Inductor's, whose calls are a seam."""


def told_of_compiled(listener: Listener) -> list[Listening]:
    """What listens in order that `listener` is told of generated code. What Inductor compiles first meanwhile is not seen
    before the next time.
    """
    told: list[Listening] = [(_LISTENERS, listener)]
    if INDUCTOR_CODE in sys.modules:  # else nothing was generated yet in this process, and importing it takes seconds
        told.append((_seams, listener))
    return told


@contextlib.contextmanager
def around_compiled(listener: Listener) -> Iterator[None]:
    """Within, `listener` is told of generated code (`told_of_compiled`)."""
    with contextlib.ExitStack() as stack:
        for seams, told in told_of_compiled(listener):
            stack.enter_context(seams.listening(told))
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
