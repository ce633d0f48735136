"""The Python side of the counting allocator. counter.cpp says what it counts."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator

import torch

from lightning_memopt.cxx import BuildError
from lightning_memopt.device.places import on_host
from lightning_memopt.native.build import library

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
    "allocations": (ctypes.c_int64, ()),
    "number": (ctypes.c_int64, (ctypes.c_void_p,)),
    "exercise": (None, (ctypes.c_int64, ctypes.c_int64, ctypes.c_int)),
}
"""Name of an exported function, without its prefix `memopt_` -> (type of its result, types of its arguments)."""


ALL, PLAIN, _OUTSIDE = 0, 1, 2
_TRIES = 20
"""Maximum number of attempts of the check, which fails when another thread allocates at the same time."""


class Window:
    """Measures the peak of live bytes since it was opened or reset. Close it, because only a few can be open at once."""

    _number = -1
    """A class attribute, because `__del__` also runs for a window whose constructor was interrupted."""

    def __init__(self, counter: Counter, kind: int) -> None:
        self._counter, self._kind = counter, kind
        self._number = counter.open(kind)  # stored at once, so that the window is closed whatever happens next

    @property
    def peak_nbytes(self) -> int:
        """Maximum bytes that were live since the window was opened or reset."""
        return int(self._counter.peak(self._kind, self._number))

    @property
    def functions(self) -> tuple[Callable[[int, int], int], Callable[[int, int], int], tuple[int, int]]:
        """The library's functions that `peak_nbytes` and `reset` call, and their arguments."""
        return self._counter.peak, self._counter.reset, (self._kind, self._number)

    def reset(self) -> int:
        """Begin a new measurement. Returns the bytes that are live now."""
        return int(self._counter.reset(self._kind, self._number))

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            self._counter.close(self._kind, number)

    def __del__(self) -> None:
        if self._number >= 0:
            self.close()


class Counter:
    """Counts the requested bytes of torch's CPU allocator, in all threads.

    Its functions are those of the library, see counter.cpp. library: the library itself.
    """

    def __init__(self, path: str) -> None:
        loaded = ctypes.PyDLL(path)  # keeps the interpreter's lock: releasing it would take longer than the calls
        self.library = loaded
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"memopt_{name}")
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
    allocations: Callable[[], int]
    number: Callable[[int], int]

    @property
    def live_nbytes(self) -> int:
        """All counted bytes that are live now."""
        return int(self.live(ALL))

    @property
    def plain_nbytes(self) -> int:
        """`live_nbytes` without bytes that were allocated while `hidden`."""
        return int(self.live(PLAIN))

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether the bytes of a storage are counted. If they were not, they are counted from now on if possible.

        Memory of other allocators (numpy's, shared memory) cannot be counted.
        """
        return bool(self.adopt(storage._cdata))

    def window(self, plain: bool = False, outside: bool = False) -> Window | None:
        """A new window; None if too many are open. `plain`: bytes that were allocated while `hidden` do not count. `outside`:
        bytes in the planned pool do not count.
        """
        window = Window(self, _OUTSIDE if outside else PLAIN if plain else ALL)
        return window if window._number >= 0 else None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Mark allocations of this thread inside this block as the package's own, which a plain run would not have."""
        self.hide(1)
        try:
            yield
        finally:
            self.hide(-1)


class Process:
    """The state of the process.

    lock: held while the counter is installed.
    tried: whether installing was tried; it is tried once.
    counter: the counter; None if it is not installed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.counter: Counter | None = None


process = Process()


def counter() -> Counter | None:
    """The counter, if it is installed and torch allocates through it; else None."""
    current = process.counter
    return current if current is not None and current.installed() else None


def counter_of(device: torch.device) -> Counter | None:
    """`counter` of the host's memory; None for other devices, whose allocators count."""
    return counter() if on_host(device) else None


def install(say: Callable[[str], None] = lambda _: None) -> Counter | None:
    """Install the counter, once per process. If that is impossible, one warning says why, and the result is None."""
    with process.lock:
        if not process.tried:
            process.tried = True
            try:
                process.counter = _installed(str(library(say)))
            except BuildError as error:
                warnings.warn(
                    f"MemOpt: the native memory meter is not there: {error}. torch's profiler measures instead. It cannot "
                    "measure steps in which another profiler runs, or tensors that the loop or another model holds.",
                    stacklevel=2,
                )
    return counter()


def _installed(path: str) -> Counter:
    """Load the library, install its allocator and check it. Raises BuildError."""
    try:
        loaded = Counter(path)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded ({error})") from None
    if not loaded.install():
        raise BuildError("torch has an allocator for the CPU that cannot be replaced")
    _check(loaded)
    return loaded


def _check(counter: Counter) -> None:
    """Raise BuildError if known allocations are not counted to the byte."""
    for _ in range(_TRIES):
        seen = _known_bytes(counter)
        if seen == ([1, 1000, 4097], 5000, [5098, 9098, 9098, 0], 10106):
            return
    raise BuildError(f"it counts other bytes than expected ({seen})")


def _known_bytes(counter: Counter) -> tuple[list[int], int, list[int], int]:
    """Allocate three tensors, one of which grows, and a hidden one.

    Returns the counted bytes: (of each tensor, of the tensor that grew, of all tensors at four moments, at the peak).
    """
    window = counter.window()
    assert window is not None, "no other window is open yet"
    before = counter.plain_nbytes
    began = window.reset()
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
    peak = window.peak_nbytes - began
    window.close()
    return each, grown, alive, peak
