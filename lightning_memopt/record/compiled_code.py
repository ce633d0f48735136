"""Tell listeners when code that a compiler generated runs: a region's forward, or its backward.

Most of Inductor's code calls no ops. The rest, and code of other backends, calls ops on buffers that it allocates and frees
itself. A recorder that saw these ops would hold the buffers, and the step would take more memory than without a recorder.
So these ops are hidden from the recorder.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lightning_memopt.record.seams import Listening, Seams, listening_to
from lightning_memopt.record.uncompiled import uncompiled
from lightning_memopt.torch_private import INDUCTOR_CODE, generated_code_class

Listener = Callable[[], contextlib.AbstractContextManager[None]]
"""`listener()` is a context around a run of generated code."""


_LISTENERS: Seams[Listener] = Seams(tuple, stays=True)
"""The listeners. Code wrapped by `telling` tells them, and so does a wrapper around each call of Inductor's code."""


def told_of_compiled(listener: Listener) -> list[Listening]:
    """The (seams, listener) pairs to enter so that `listener` is told of generated code. If Inductor first compiles something
    while they are entered, its runs are seen from the next time on.
    """
    told: list[Listening] = [(_LISTENERS, listener)]
    if INDUCTOR_CODE in sys.modules:  # else nothing was generated yet in this process, and importing it takes seconds
        told.append((_seams, listener))
    return told


@contextlib.contextmanager
def around_compiled(listener: Listener) -> Iterator[None]:
    """Within, `listener` is told of generated code (`told_of_compiled`)."""
    with listening_to(told_of_compiled(listener)):
        yield


def telling(code: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap generated code so that it tells the listeners when it runs."""

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
