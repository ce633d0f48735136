"""The backwards that ask for saves of one forward: which of them have not come to their end, because something raised."""

from __future__ import annotations

from lightning_memopt.torch_private import backward_task, queue_callback

NO_BACKWARD = -1


def backward_runs() -> bool:
    """Whether autograd runs a backward in this thread."""
    return backward_task() != NO_BACKWARD


class Backwards:
    """Backwards by the number that autograd gives them. What it calls at the end of one, it does not call where that raised."""

    def __init__(self) -> None:
        self._last = NO_BACKWARD
        self._open: set[int] = set()

    def asks(self) -> None:
        """A backward asks for a save, or lets go of one."""
        task = backward_task()
        if task in (self._last, NO_BACKWARD):
            return
        self._last = task
        self._open.add(task)
        ended = self._open
        queue_callback(lambda: ended.discard(task))

    @property
    def failed(self) -> bool:
        """Whether a backward has begun that will not come to its end."""
        return bool(self._open) and not backward_runs()
