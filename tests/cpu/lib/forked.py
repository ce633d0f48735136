"""Ranks as forked processes, which share the imports of the process that starts them."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterable
from typing import Any


def forked(target: Callable[..., None], arguments: Iterable[tuple[Any, ...]], seconds: float = 600.0) -> list[int | None]:
    """Run `target(*args)` for each of `arguments`, all at the same time, in processes of their own. Returns their exit codes;
    None for a process that hung: it was killed after `seconds`.
    """
    gc.freeze()  # each session collects garbage: not of all that was imported
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=args) for args in arguments]
    for process in processes:
        process.start()
    until = time.monotonic() + seconds
    codes: list[int | None] = []
    for process in processes:
        process.join(max(0.1, until - time.monotonic()))
        codes.append(process.exitcode)
        if process.is_alive():
            process.kill()
    return codes


def failed(codes: list[int | None]) -> bool:
    """Whether a process hung, or ended with an error."""
    return any(code != 0 for code in codes)
