"""Write files whole or not at all, and never over a device, a pipe or a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path


def check_target(path: Path) -> None:
    """Raise OSError, before long work rather than after it, if no file could be written at `path`. Follows symlinks."""
    folder = path.parent
    if not folder.is_dir():
        raise OSError(errno.ENOENT, f"there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise OSError(errno.EACCES, f"the folder {folder} may not be written to")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):  # renaming a file over /dev/null would remove it for all processes
        raise OSError(errno.EEXIST, "it exists and is not a regular file")


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all, readable only by the owner. If it raises OSError, `path` is unchanged.

    A symlink to a file is replaced, not followed.
    """
    check_target(path)
    # in the same directory, so that the replacement is one rename; with a random name, so that nobody can put a link there
    temporary = path.parent / f".memopt-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # makes the rename durable; not every file system can sync a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def reason(error: BaseException) -> str:
    """What went wrong, without the path, which may be that of a temporary file."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
