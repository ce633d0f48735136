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
    "live": (ctypes.c_int64, ()),
    "own": (ctypes.c_int64, ()),
    "hide": (None, (ctypes.c_int,)),
    "open": (ctypes.c_int, ()),
    "peak": (ctypes.c_int64, (ctypes.c_int,)),
    "reset": (ctypes.c_int64, (ctypes.c_int,)),
    "close": (None, (ctypes.c_int,)),
    "adopt": (ctypes.c_int, (ctypes.c_void_p,)),
    "exercise": (None, (ctypes.c_int64, ctypes.c_int64, ctypes.c_int)),
}
"""What the library exports as `memopt_<name>`: result, arguments."""


class Window:
    """The most bytes that were alive since it was opened, or reset. Close it: there are but a few."""

    def __init__(self, counter: Counter, number: int) -> None:
        self._counter, self._number = counter, number

    @property
    def peak_nbytes(self) -> int:
        return int(self._counter.peak(self._number))

    def reset(self) -> int:
        """Begin again; bytes that are alive."""
        return int(self._counter.reset(self._number))

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            self._counter.close(number)

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
    peak: Callable[[int], int]
    reset: Callable[[int], int]
    close: Callable[[int], None]
    open: Callable[[], int]
    live: Callable[[], int]
    own: Callable[[], int]
    hide: Callable[[int], None]
    exercise: Callable[[int, int, int], None]
    adopt: Callable[[int], int]

    @property
    def live_nbytes(self) -> int:
        """What is alive now of all that is counted."""
        return int(self.live())

    @property
    def own_nbytes(self) -> int:
        """Of this, what was allocated while `hidden`: what a plain run does not have."""
        return int(self.own())

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether the bytes of a storage are counted, if need be from now on. Not so memory of others: numpy's, or shared."""
        return bool(self.adopt(storage._cdata))

    def window(self) -> Window | None:
        """A new window; None where too many are open."""
        number = self.open()
        return Window(self, number) if number >= 0 else None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """What this thread allocates in here is ours."""
        self.hide(1)
        try:
            yield
        finally:
            self.hide(-1)


class _Process:
    """What there is one of in a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.counter: Counter | None = None


_process = _Process()


def counter() -> Counter | None:
    """The counter, where it is in place and torch allocates through it."""
    found = _process.counter
    return found if found is not None and found.installed() else None


def install(say: Callable[[str], None] = lambda _: None) -> Counter | None:
    """Put the counter in place, once a process. Where that is not possible, one warning says why, and the result is None."""
    with _process.lock:
        if not _process.tried:
            _process.tried = True
            try:
                _process.counter = _installed(str(library(say)))
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
    """Raise BuildError where known allocations are not counted to the byte. Other threads may allocate meanwhile."""
    window = counter.window()
    assert window is not None, "nobody else has a window yet"
    began, seen = window.reset(), []
    with counter.hidden():
        tensors = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in (1, 1000, 4097)]
        seen.append(counter.own_nbytes)
        tensors[1].untyped_storage().resize_(5000)
        seen.append(counter.own_nbytes)
        tensors.clear()
        seen.append(counter.own_nbytes)
    rose = window.peak_nbytes > began
    window.close()
    if seen != [5098, 9098, 0] or not rose:
        raise BuildError(f"it counts otherwise than expected ({seen})")
