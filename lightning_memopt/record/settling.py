"""Wait until gloo has let go of the buffers of a collective that is over.

A thread of gloo runs a collective, tells the caller that it is over, and only then frees its tensors. One of them is a copy of
what is reduced, as large as the gradients of a unit. On a busy machine the thread may be descheduled at that moment for several
milliseconds, and the peak of a step would depend on that. A thread that has finished sleeps until there is other work; one that
has not is runnable. Linux shows which it is (`/proc/self/task`).
"""

from __future__ import annotations

import contextlib
import os

from lightning_memopt.clocks import perf_counter
from lightning_memopt.torch_private import GLOO_THREADS

_TASKS = "/proc/self/task"
_MOST_SECONDS = 0.2
"""Maximum wait, because a collective that was begun and not waited for also keeps a thread busy."""
_RUNNABLE = b"R"

_threads: list[str] = []
_process = 0


def can_settle() -> bool:
    """Whether there are threads of gloo whose state the system shows."""
    if _process != os.getpid():  # a fork has none of its parent's threads
        find_threads()
    return bool(_threads)


def settle() -> None:
    """Return when no thread of gloo has work, or after `_MOST_SECONDS`. If the threads cannot be seen, return at once."""
    if not can_settle():
        return
    until = perf_counter() + _MOST_SECONDS
    asleep = 0
    while asleep < 2:  # twice: a thread may wait for the lock of another one that has just finished
        asleep = 0 if _runnable() else asleep + 1
        if not asleep:
            if perf_counter() > until:
                return
            os.sched_yield()


def find_threads() -> None:
    """Look for the threads of the process groups that exist now."""
    global _threads, _process
    threads = []
    with contextlib.suppress(OSError):
        for task in os.listdir(_TASKS):
            with contextlib.suppress(OSError), open(f"{_TASKS}/{task}/comm") as file:
                if file.read().strip() == GLOO_THREADS:
                    threads.append(f"{_TASKS}/{task}/stat")
    _threads, _process = threads, os.getpid()


def _runnable() -> bool:
    """Whether one of the threads runs, or would run if it had a core."""
    for path in _threads:
        try:
            with open(path, "rb", buffering=0) as file:
                # the state follows the name, which is in parentheses
                if file.read(128).rpartition(b")")[2][1:2] == _RUNNABLE:
                    return True
        except OSError:  # the thread's group was destroyed
            find_threads()
            return True
    return False
