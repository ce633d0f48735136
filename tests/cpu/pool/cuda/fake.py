"""The allocator of native/cuda.cpp around the caching allocator of fake_cuda.cpp, and what tests ask of both."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lightning_memopt import cxx
from lightning_memopt.native import CudaAllocator, StreamPool, build

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "on": (None, (ctypes.c_int, _INTEGER)),
    "allocate": (_POINTER, (_INTEGER,)),
    "data": (_POINTER, (_POINTER,)),
    "delete": (None, (_POINTER,)),
    "record_stream": (None, (_POINTER, _INTEGER)),
    "has_standard_deleter": (ctypes.c_int, (_POINTER,)),
    "checkpointed": (_POINTER, ()),
    "recorded": (_INTEGER, (_POINTER,)),
    "raw_alloc": (_POINTER, (_INTEGER,)),
    "raw_alloc_with_stream": (_POINTER, (_INTEGER, _INTEGER)),
    "raw_delete_of": (ctypes.c_int, (_POINTER,)),
    "base_of": (_POINTER, (_POINTER,)),
    "block_nbytes": (_INTEGER, (_POINTER,)),
    "ipc_offset": (_INTEGER, (_POINTER,)),
    "capture": (None, (ctypes.c_int, ctypes.c_int)),
    "give": (None, (_INTEGER,)),
    "given": (_INTEGER, (_INTEGER,)),
    "waits": (_INTEGER, (_INTEGER, _INTEGER)),
    "live": (_INTEGER, (ctypes.c_int,)),
    "reset_peak": (_INTEGER, ()),
    "blocks": (_INTEGER, ()),
    "events": (_INTEGER, ()),
    "trims": (_INTEGER, ()),
    "wrong": (_INTEGER, ()),
    "limit": (None, (_INTEGER,)),
    "fails": (None, (ctypes.c_int,)),
}


class Fake:
    """The fake, with the functions of its C interface, and the allocator around it.

    on(device, stream): what this thread's requests are for. allocate(nbytes): a handle, see fake_cuda.cpp.
    """

    def __init__(self) -> None:
        path = _fake_c10_cuda()
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"fake_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.path = build.cuda_library(lambda _: None, linked=path.parent)
        self.allocator = CudaAllocator(self.path)

    def pool(self, stream: int = 0, device: int = 0) -> StreamPool:
        return self.allocator.stream(device, stream)

    @contextmanager
    def nothing_left(self) -> Iterator[None]:
        """Afterwards the caching allocator has the blocks that it had, no event is left, and the runtime saw no error."""
        before = self.blocks(), self.live(0), self.live(1)
        try:
            yield
        finally:
            self.on(0, 0)
        for pool in self.allocator.streams(0) + self.allocator.streams(1):
            pool.end(free=True)
            pool.forget()
        assert (self.blocks(), self.live(0), self.live(1)) == before
        assert self.events() == 0 and self.wrong() == 0
        assert all(pool.arenas_nbytes() == (0, 0) for pool in self.allocator.streams(0))


@cache
def fake() -> Fake:
    """Raises BuildError where it cannot be built."""
    return Fake()


def _fake_c10_cuda() -> Path:
    headers = build.cuda_headers()
    home = Path(torch.__file__).parent

    def compiled(compiler: str, target: Path) -> None:
        cxx.run(
            [
                compiler,
                *("-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"),
                *(f"-I{home / 'include'}", f"-I{headers}", str(_SOURCE), "-o", str(target)),
                *(f"-L{home / 'lib'}", "-lc10", f"-Wl,-rpath,{home / 'lib'}", "-Wl,-soname,libc10_cuda.so"),
            ]
        )

    parts = [str(torch.__version__), str(home), str(headers), hashlib.sha256(_SOURCE.read_bytes()).hexdigest()]
    return cxx.library("libc10_cuda", "a CUDA of the tests", parts, compiled, lambda line: None)
