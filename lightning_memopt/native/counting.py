"""The counting allocator from Python. See counter.cpp for what it counts."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator

import torch

from lightning_memopt.native.build import BuildError, library

_SIGNATURES: dict[str, tuple[type[ctypes._SimpleCData] | None, tuple[type[ctypes._SimpleCData], ...]]] = {
    "installed": (ctypes.c_int, ()),
    "install": (ctypes.c_int, ()),
    "live": (ctypes.c_int64, (ctypes.c_int,)),
    "hide": (None, (ctypes.c_int,)),
    "open": (ctypes.c_int, (ctypes.c_int,)),
    "peak": (ctypes.c_int64, (ctypes.c_int, ctypes.c_int)),
    "reset": (ctypes.c_int64, (ctypes.c_int, ctypes.c_int)),
    "close": (None, (ctypes.c_int, ctypes.c_int)),
    "adopt": (ctypes.c_int, (ctypes.c_void_p,)),
    "nbytes": (ctypes.c_int64, (ctypes.c_void_p,)),
    "exercise": (None, (ctypes.c_int64, ctypes.c_int64, ctypes.c_int)),
}
"""What the library exports as `memopt_<name>`: result, arguments."""


_ALL, _PLAIN = 0, 1
_TRIES = 20
"""Of the check: other threads may allocate meanwhile."""


class Window:
    """The most bytes that were alive since it was opened, or reset. Close it: there are but a few."""

    _number = -1
    """Of the class, because a window whose making was interrupted is destroyed, too."""

    def __init__(self, counter: Counter, kind: int) -> None:
        self._counter, self._kind = counter, kind

    def opened(self) -> bool:
        """Open it; False where too many are open."""
        self._number = self._counter.open(self._kind)  # nobody but the window knows the number: it closes what it opened
        return self._number >= 0

    @property
    def peak_nbytes(self) -> int:
        return int(self._counter.peak(self._kind, self._number))

    def reset(self) -> int:
        """Begin again; bytes that are alive."""
        return int(self._counter.reset(self._kind, self._number))

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            self._counter.close(self._kind, number)

    def __del__(self) -> None:
        self.close()


class Counter:
    """Bytes of torch's CPU allocator, as they were requested. All threads count."""

    def __init__(self, path: str) -> None:
        found = ctypes.PyDLL(path)  # the calls are shorter than letting go of the interpreter's lock
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, f"memopt_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    install: Callable[[], int]
    installed: Callable[[], int]
    peak: Callable[[int, int], int]
    reset: Callable[[int, int], int]
    close: Callable[[int, int], None]
    open: Callable[[int], int]
    live: Callable[[int], int]
    hide: Callable[[int], None]
    exercise: Callable[[int, int, int], None]
    adopt: Callable[[int], int]
    nbytes: Callable[[int], int]

    @property
    def live_nbytes(self) -> int:
        """What is alive now of all that is counted."""
        return int(self.live(_ALL))

    @property
    def plain_nbytes(self) -> int:
        """Of this, what was not allocated while `hidden`."""
        return int(self.live(_PLAIN))

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether the bytes of a storage are counted, if need be from now on. Not so memory of others: numpy's, or shared."""
        return bool(self.adopt(storage._cdata))

    def window(self, plain: bool = False) -> Window | None:
        """A new window; None where too many are open. `plain`: what was allocated while `hidden` is left out."""
        window = Window(self, _PLAIN if plain else _ALL)
        return window if window.opened() else None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """What this thread allocates in here is our own: a plain run has none of it."""
        self.hide(1)
        try:
            yield
        finally:
            self.hide(-1)


class Process:
    """What there is one of in a process; `tried`: it is known whether there is a counter."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.counter: Counter | None = None


process = Process()


def counter() -> Counter | None:
    """The counter, where it is in place and torch allocates through it."""
    found = process.counter
    return found if found is not None and found.installed() else None


def install(say: Callable[[str], None] = lambda _: None) -> Counter | None:
    """Put the counter in place, once a process. Where that is not possible, one warning says why, and the result is None."""
    with process.lock:
        if not process.tried:
            process.tried = True
            try:
                process.counter = _installed(str(library(say)))
            except BuildError as error:
                warnings.warn(
                    f"MemOpt: the native memory meter is not there: {error}. torch's profiler measures instead: steps that "
                    "another profiler watches, and tensors that the loop or another model holds, are not measured.",
                    stacklevel=2,
                )
    return counter()


def _installed(path: str) -> Counter:
    try:
        found = Counter(path)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded ({error})") from None
    if not found.install():
        raise BuildError("torch has an allocator for the CPU that cannot be replaced")
    _check(found)
    return found


def _check(counter: Counter) -> None:
    """Raise BuildError where known allocations are not counted to the byte."""
    for _ in range(_TRIES):
        seen = _known_bytes(counter)
        if seen == ([1, 1000, 4097], 5000, [5098, 9098, 9098, 0], 10106):
            return
    raise BuildError(f"it counts otherwise than expected ({seen})")


def _known_bytes(counter: Counter) -> tuple[list[int], int, list[int], int]:
    """Of three tensors, one of which grows, and a hidden one: what is counted of each, of all, and the most of all."""
    window = counter.window()
    assert window is not None, "nobody else has a window yet"
    before, began = counter.plain_nbytes, window.reset()
    tensors = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in (1, 1000, 4097)]
    each = [counter.nbytes(t.untyped_storage()._cdata) for t in tensors]
    alive = [counter.live_nbytes - began]
    with counter.hidden():
        tensors.append(torch.empty(8, dtype=torch.uint8, device="cpu"))
    grows = tensors[1].untyped_storage()
    grows.resize_(5000)
    grown = counter.nbytes(grows._cdata)
    alive += [counter.live_nbytes - began - 8, counter.plain_nbytes - before]
    del grows
    tensors.clear()
    alive.append(counter.live_nbytes - began)
    most = window.peak_nbytes - began
    window.close()
    return each, grown, alive, most
