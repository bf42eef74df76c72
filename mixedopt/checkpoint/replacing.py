"""A file replaced as a whole, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mixedopt.errors import CheckpointError

NAME = 128  # characters of the file's name in that of the temporary file, which must not become too long


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the name of an empty file to write; on leaving it is flushed to the disk and becomes ``path``.

    An error, or the death of the process, leaves what was there. A symbolic
    link is followed, an existing file keeps its permissions.

    Raises:
        CheckpointError: if ``path`` is there and is not a regular file.
        OSError: with the name of ``path``.
    """
    target = os.path.realpath(os.fsdecode(path))
    mode = _mode(target)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:NAME]}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        with _telling(target):
            with open(temporary, "xb"):
                pass
            if mode is not None:
                os.chmod(temporary, mode)
            yield temporary
            with open(temporary, "r+b") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _flush_folder(folder, target)


def _mode(target: str) -> int | None:
    """Return the permissions of the file that is to be replaced, ``None`` if there is none."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{target}: not a regular file, so it cannot be replaced. Give the path of a file.")
    return stat.S_IMODE(mode)


@contextmanager
def _telling(target: str) -> Iterator[None]:
    """Say in every ``OSError`` which checkpoint was not written."""
    try:
        yield
    except OSError as error:
        text = f"{error.strerror or error}: the checkpoint was not written, what was there is as it was"
        raise OSError(error.errno or errno.EIO, text, target) from error


def _flush_folder(folder: str, target: str) -> None:
    """Make the new name durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):  # a system without it
            text = f"{error.strerror}: the new checkpoint is in place, but may not survive a power cut"
            raise OSError(error.errno, text, target) from error
