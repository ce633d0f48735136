"""A file of a fixed size without a name: the system deletes it with its last descriptor, even if the process is killed.

Linux: the file is made with `O_TMPFILE`, or unlinked at once on file systems that do not have that (`tempfile.TemporaryFile`
tries both); `posix_fallocate` reserves the space. macOS: the file is unlinked at once, and zeros are written to reserve the
space. Windows: the system deletes the file with its last handle (`O_TEMPORARY`). There are no positional reads on Windows, so a
lock keeps seek and read together.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref

from lightning_memopt.errors import OffloadError
from lightning_memopt.units import format_nbytes

_ZEROS_NBYTES = 1 << 20
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class Scratch:
    """`nbytes` of disk space in `directory` (None: the system's directory for temporary files), reserved when it is made.

    Raises OffloadError if the directory does not exist, cannot be written to, or has too little space.
    """

    def __init__(self, nbytes: int, directory: str | os.PathLike[str] | None = None) -> None:
        where = os.fspath(directory) if directory is not None else tempfile.gettempdir()
        self._lock = threading.Lock()
        try:
            self._file = tempfile.TemporaryFile(buffering=0, prefix="memopt-", dir=where)  # noqa: SIM115 (closed by close)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise OffloadError(
                f"the disk tier cannot make a file in {where!r}: {reason}; give it another directory: offload='disk:/that/one'"
            ) from error
        try:
            self._reserve(nbytes)
        except OSError as error:
            self._file.close()
            reason = error.strerror or type(error).__name__
            raise OffloadError(
                f"the disk tier cannot reserve {nbytes} bytes ({format_nbytes(nbytes)}) in {where!r}: {reason}; "
                "give it fewer bytes by a larger budget, or a directory on a larger disk: offload='disk:/that/one'"
            ) from error

    def _reserve(self, nbytes: int) -> None:
        reserve = getattr(os, "posix_fallocate", None)
        if reserve is not None and nbytes:
            try:
                reserve(self._file.fileno(), 0, nbytes)
                return
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
        zeros = memoryview(bytes(min(nbytes, _ZEROS_NBYTES)))
        for offset in range(0, nbytes, _ZEROS_NBYTES):
            self.write(zeros[: nbytes - offset], offset)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. Other threads run meanwhile. Raises OSError."""
        while data:
            n = self._pwrite(data, offset)
            if n <= 0:
                raise OSError(errno.EIO, f"a write of {len(data)} bytes at {offset} wrote none")
            data, offset = data[n:], offset + n  # the system may write less at once

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` with the bytes at `offset`. Other threads run meanwhile. Raises OSError."""
        while into:
            n = self._preadv(into, offset)
            if n <= 0:
                raise OSError(errno.EIO, f"the file ends {len(into)} bytes before what was written to it")
            into, offset = into[n:], offset + n

    def pages(self, nbytes: int, offset: int = 0) -> memoryview:
        """The file from `offset` on, a multiple of `mmap.ALLOCATIONGRANULARITY`, as memory, also after the file is closed. What
        is written to the file shows in the memory; who writes to the memory changes that page alone. Raises OffloadError.
        """
        try:
            if os.name == "posix":
                return _private(self._file.fileno(), nbytes, offset)
            return memoryview(mmap.mmap(self._file.fileno(), nbytes, access=mmap.ACCESS_COPY, offset=offset))
        except OSError as error:
            raise OffloadError(
                f"{nbytes} bytes of a file cannot be mapped: {error.strerror}; raise `ulimit -v`, or set offload='none'"
            ) from error

    def _pwrite(self, data: memoryview, offset: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), data, offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.write(data) or 0

    def _preadv(self, into: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [into], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(into) or 0

    def close(self) -> None:
        self._file.close()


def _private(file: int, nbytes: int, offset: int) -> memoryview:
    """Private pages of a file. `mmap.mmap` keeps a descriptor for each of them, of which a process has only 1024 on many
    systems, and the loop needs its own.
    """
    address = _LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(pages, _LIBC.munmap, address, nbytes).atexit = False  # tensors may be read until the process ends
    return memoryview(pages).cast("B")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    libc.mmap.restype, libc.mmap.argtypes = pointer, (pointer, size, number, number, number, offset)
    libc.munmap.argtypes = pointer, size
    return libc


if os.name == "posix":
    _LIBC = _libc()
