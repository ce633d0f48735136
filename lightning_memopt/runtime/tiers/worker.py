"""One thread that carries out copies in the order in which they were submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any
from weakref import ReferenceType, ref

Around = Callable[[], AbstractContextManager[Any]]
_PATIENCE_SECONDS = 1.0


class Copy:
    """A copy that a worker carries out. Any thread may wait for it, and repeat a wait that was interrupted (T7).

    An interrupt inside the Python code of `threading.Event` may leave its lock taken. Then the worker waits for ever, and so
    does everything that waits for it. So only a lock implemented in C is used, and `ended` holds the state.

    ended: whether the copy is over.
    error: the exception that the copy raised, or None.
    """

    __slots__ = ("_running", "_work", "ended", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self.ended = False
        self._running = threading.Lock()
        self._running.acquire()
        self.error: BaseException | None = None

    def run(self, around: Around = nullcontext) -> None:
        """Carry the copy out, in the context that `around` gives."""
        try:
            if self._work is not None:
                with around():
                    self._work()
        except BaseException as error:  # a thread has no caller, so `wait` raises it
            self.error = error.with_traceback(None)  # frames would keep the tensor alive
        finally:
            self._work = None
            self.ended = True
            self._running.release()

    def wait(self) -> None:
        while not self.ended:
            # the timeout is for a waiting thread that was interrupted in the next line and still has the lock
            if self._running.acquire(timeout=_PATIENCE_SECONDS):
                self._running.release()


class Worker:
    """A daemon thread called `name`. `close` waits until all submitted copies have ended. A worker that is freed without it
    ends after them, too.

    around: gives the context in which each copy is carried out.
    """

    def __init__(self, name: str, around: Around = nullcontext) -> None:
        self._copies: SimpleQueue[Copy | ReferenceType[Worker] | None] = SimpleQueue()
        # its callback runs no Python code: no interrupt keeps the thread alive, neither here nor in a finalizer
        freed = ref(self, self._copies.put)
        self._thread = threading.Thread(target=_work, args=(self._copies, around, freed), name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        self._copies.put(copy)

    def close(self) -> None:
        self._copies.put(None)  # nothing reads it after a second `close`
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _work(copies: SimpleQueue[Copy | ReferenceType[Worker] | None], around: Around, freed: ReferenceType[Worker]) -> None:
    """Carry out copies until something else comes. `freed`: must live as long as the worker."""
    while isinstance(copy := copies.get(), Copy):
        copy.run(around)
