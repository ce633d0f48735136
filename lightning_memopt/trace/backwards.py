"""Track the backwards that ask for saves of one forward, to know whether one of them raised an error before its end."""

from __future__ import annotations

from lightning_memopt.torch_private import backward_task, queue_callback

NO_BACKWARD = -1


def backward_runs() -> bool:
    """Whether autograd runs a backward in this thread."""
    return backward_task() != NO_BACKWARD


class Backwards:
    """Backwards by the numbers that autograd gives them. Autograd calls a callback at the end of each, unless that one
    raised.
    """

    def __init__(self) -> None:
        self._last = NO_BACKWARD
        self._open: set[int] = set()

    def asks(self) -> None:
        """A backward asks for a save, or releases one."""
        task = backward_task()
        if task in (self._last, NO_BACKWARD):
            return
        self._last = task
        self._open.add(task)
        ended = self._open
        queue_callback(lambda: ended.discard(task))

    @property
    def failed(self) -> bool:
        """Whether a backward has begun that will never end, because it raised an error."""
        return bool(self._open) and not backward_runs()
