"""Checkpoint files: written whole or not at all, and checked before anything of them is believed.

A file is what ``torch.save`` writes, a zip archive, with a seal in the archive's comment::

    mixedopt 1 sha256 <64 hex digits>

The digest covers every byte but those of the larger tensors and of its own comment: headers, padding, the pickle, the
directory. The directory holds a CRC-32 of each tensor, which ``torch.save`` computes anyway: so every byte is covered,
and a save costs nothing more. Damage is found by it, malice is not: against that there is ``weights_only``.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import struct
import threading
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.serialization import MAP_LOCATION

from mixedopt.checkpoint.replacing import replacing
from mixedopt.errors import CheckpointError, shown

SEAL = b"mixedopt 1 sha256 "
COMMENT = len(SEAL) + 2 * hashlib.sha256().digest_size
END = 22  # bytes of the last record of a zip; it ends with the length of the comment
LOCAL = struct.Struct("<26xHH")  # what stands before a record: the lengths of its name and of its padding
LARGE = 1 << 14  # bytes from which a tensor has its own checksum; a part of format 1
PIECE = 1 << 18  # bytes read at a time: a core's cache holds them
JOBS = 64  # for the checkers, together
OLDER = "Use an older file."
CHECKERS = 4  # threads at most; memory has no more to give

# What ``torch.load(weights_only=True)`` reads, by exact type: a subclass is another global.
LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray}
    | {torch.Size, torch.dtype, torch.device, torch.layout, torch.qscheme}
)
MAPPINGS = frozenset({dict, OrderedDict, Counter})
SEQUENCES = frozenset({list, tuple, set})

Path = str | os.PathLike[str]
Where = tuple[object, ...]


@runtime_checkable
class Stateful(Protocol):
    """What is saved by its state dict: a module, an optimizer, a scheduler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""


# -- the two public functions --------------------------------------------------------------------------------------


def save(path: Path, /, **items: Any) -> None:
    """Write a checkpoint file, whole or not at all.

    The file is written under another name in the same directory, flushed to the disk, and renamed. Whatever happens
    meanwhile, an error, Ctrl-C, SIGKILL or a power cut, ``path`` holds the old checkpoint or the new one. Call it on
    one rank.

    Args:
        path: where to. A symbolic link is followed; an existing file keeps its permissions.
        items: name -> anything with a ``state_dict()``, which is taken, or plain data: tensors, numbers, strings,
            ``None``, and dicts, lists, tuples and sets of them.

    Raises:
        TypeError: for no item, or for a value that ``torch.load(weights_only=True)`` would refuse to read. Nothing was
            written.
        CheckpointError: if ``path`` is there and is not a regular file.
        OSError: if the disk is full, the directory is missing, and so on. The old file is as it was.

    The file is a torch file too: ``torch.load(path, weights_only=True)`` returns the same dict. A killed writer leaves
    ``.<name>.<pid>-<random>.tmp`` behind, which nothing ever reads: delete it.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/run.pt", model=model, step=10)
        ...     load(f"{folder}/run.pt")["step"]
        10
    """
    if not items:
        raise TypeError(f"save({shown(os.fspath(path))}): nothing to save. Name the items: save(path, model=model).")
    stateful = {name for name, item in items.items() if isinstance(item, Stateful) and not isinstance(item, type)}
    states = {name: item.state_dict() if name in stateful else item for name, item in items.items()}
    _check(states)
    with replacing(path) as temporary, open(temporary, "r+b") as file:
        _write(states, file)
        _seal(file)


def load(path: Path, *, map_location: MAP_LOCATION = None, mmap: bool = False) -> dict[str, Any]:
    """Read what ``save`` wrote, after checking every byte of it.

    No byte is unpickled before its checksum matched, and only by ``torch.load(weights_only=True)``, which runs no code.
    The tensors are checked by other threads while they are read.

    Args:
        path: the file.
        map_location: where the tensors go, as in ``torch.load``.
        mmap: map the tensors instead of reading them: their pages are read again when they are first used, and are no
            memory of this process until written to. Such a file must not be written in place (``save`` never does).

    Returns:
        Name -> state dict or data, in the order in which they were saved.

    Raises:
        CheckpointError: if the file is empty, cut short, damaged, not of this library, or holds what ``weights_only``
            refuses. Nothing was loaded.
        FileNotFoundError: if there is none.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/run.pt", weights=torch.ones(2))
        ...     load(f"{folder}/run.pt")
        {'weights': tensor([1., 1.])}
    """
    place = os.fsdecode(path)
    with open(place, "rb") as file, open(place, "rb") as twin:
        if not os.path.sameopenfile(file.fileno(), twin.fileno()):
            return load(path, map_location=map_location, mmap=mmap)  # replaced between the two lines
        _recognise(place, file)
        source = _Bytes(file)
        records = _records(place, source)
        try:
            with _checking(place, source, records):
                given = place if mmap else twin
                items = torch.load(given, map_location=map_location, weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            text = "holds what torch.load(weights_only=True) does not read, so it was not written by mixedopt."
            raise _refused(place, text) from error
        if mmap and not os.path.samestat(os.fstat(file.fileno()), os.stat(place)):
            return load(path, map_location=map_location, mmap=mmap)  # replaced: another file was mapped
    if not isinstance(items, dict):
        raise _refused(place, f"holds a {type(items).__name__}, not a dict of items. Load it with torch.load.")
    return items


# -- what may be saved ---------------------------------------------------------------------------------------------


def _check(states: Mapping[str, Any]) -> None:
    """Raise at the first value that would not be read back."""
    safe = {entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()}
    todo: list[tuple[Where, Any]] = [((name,), state) for name, state in reversed(list(states.items()))]
    seen: set[int] = set()
    while todo:
        where, value = todo.pop()
        kind = type(value)
        if kind in LEAVES or id(value) in seen:
            continue
        seen.add(id(value))  # values may share parts, or hold themselves
        if kind in MAPPINGS:
            todo.extend(((*where, "a key"), key) for key in value)
            todo.extend(((*where, key), entry) for key, entry in value.items())
        elif kind in SEQUENCES:
            todo.extend(((*where, index), entry) for index, entry in enumerate(value))
        elif kind not in (Tensor, nn.Parameter) and kind not in safe:
            raise TypeError(_unreadable(where, value))
        if kind is OrderedDict or kind in (Tensor, nn.Parameter):
            todo.extend(((*where, name), entry) for name, entry in vars(value).items())  # saved with it


def _unreadable(where: Where, value: Any) -> str:
    """Return the message about a value of a foreign type."""
    name = f"{where[0]}{''.join(f'[{key!r}]' for key in where[1:])}"
    kind = type(value)
    remedy = "Save what it holds as tensors, numbers, strings, dicts or lists"
    if isinstance(value, Stateful):
        remedy = "Save its state_dict()"
    elif kind.__module__ == "numpy":
        remedy = "Save it as .item() or torch.from_numpy(...)"
    return (
        f"save: {name} is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) does "
        f"not read. Nothing was written. {remedy}."
    )


# -- writing -------------------------------------------------------------------------------------------------------


class _Memory:
    """A file that remembers its first error: torch's writer loses it, and raises about a position."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        try:
            return self.file.write(data)
        except BaseException as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write(states: Mapping[str, Any], file: BinaryIO) -> None:
    """Write what ``torch.save`` writes, with the checksums of the tensors."""
    memory = _Memory(file)
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(states, cast(IO[bytes], memory))
    except BaseException:
        if memory.error is not None:
            raise memory.error from None
        raise
    finally:
        torch.serialization.set_crc32_options(checksums)


def _seal(file: BinaryIO) -> None:
    """Append the digest of what was written, read back from the file."""
    file.seek(-2, os.SEEK_END)  # the length of the comment, 0 so far, ends the file
    file.write(struct.pack("<H", COMMENT) + SEAL.ljust(COMMENT, b"0"))
    file.flush()
    source = _Bytes(file)
    digest = _digest(source, _tensors(source))
    file.seek(-len(digest), os.SEEK_END)
    file.write(digest)


# -- the bytes of a file -------------------------------------------------------------------------------------------


class _Bytes:
    """The bytes of an open file, read by several threads."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self._lock = threading.Lock()

    def pieces(self, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes from ``start`` to ``end``, through a buffer: fresh memory costs more than the checksum."""
        while start < end:
            with self._lock:
                self.file.seek(start)
                count = self.file.readinto(buffer[: end - start])  # type: ignore[attr-defined]
            if not count:
                raise EOFError("the file became shorter while it was read")
            yield buffer[:count]
            start += count


@dataclass(frozen=True, slots=True)
class _Record:
    """One large tensor of an archive: where its bytes are, and their CRC-32."""

    start: int
    end: int
    crc: int


def _tensors(source: _Bytes) -> list[_Record]:
    """Return the large tensors of an archive, in the order of the file.

    Raises:
        Exception: of any kind, if the directory is damaged: it is read before it was checked.
    """
    with zipfile.ZipFile(source.file) as archive:
        directory = archive.start_dir
        infos = [info for info in archive.infolist() if info.file_size >= LARGE and "/data/" in info.filename]
    records = []
    buffer = memoryview(bytearray(LOCAL.size))
    for info in infos:
        (header,) = source.pieces(info.header_offset, info.header_offset + LOCAL.size, buffer)
        start = info.header_offset + LOCAL.size + sum(LOCAL.unpack(header))
        records.append(_Record(start, start + info.file_size, info.CRC))
    records.sort(key=lambda record: record.start)
    ends = [0, *(record.end for record in records)]
    starts = [*(record.start for record in records), directory]
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos) or any(map(int.__gt__, ends, starts)):
        raise zipfile.BadZipFile("records that are compressed or overlap")
    return records


def _digest(source: _Bytes, records: list[_Record]) -> bytes:
    """Return the hex digest of all that is neither a large tensor nor the text of the comment."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE))
    ends = [0, *(record.end for record in records)]
    starts = [*(record.start for record in records), source.size - COMMENT]
    for end, start in zip(ends, starts, strict=True):
        for piece in source.pieces(end, start, buffer):
            digest.update(piece)
    return digest.hexdigest().encode()


# -- reading -------------------------------------------------------------------------------------------------------


def _refused(place: str, what: str) -> CheckpointError:
    """Return the error about a file."""
    return CheckpointError(f"{place}: {what} Nothing was loaded.")


def _recognise(place: str, file: BinaryIO) -> None:
    """Raise unless the file ends with the seal of this version; say what it is instead."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        raise _refused(place, "is empty. Use an older file.")
    file.seek(max(size - END - COMMENT, 0))
    tail = file.read()
    if len(tail) == END + COMMENT and tail.startswith(b"PK\5\6"):
        if re.fullmatch(SEAL + rb"[0-9a-f]+", tail[END:]):
            return
        other = re.match(rb"mixedopt (?!1 )(\d{1,9}) ", tail[END:])
        if other:
            text = f"has format {other[1].decode()}, this version reads 1. Use the mixedopt version that wrote it."
            raise _refused(place, text)
        raise _refused(place, f"checksum mismatch: its seal, at the end of {size:,} bytes, is damaged. {OLDER}")
    file.seek(0)
    head = file.read(4)
    if head != b"PK\3\4":
        kind = "a pickle, which could run code: it was not opened" if head[:1] == b"\x80" else "not a checkpoint"
        raise _refused(place, f"is {kind}. (Or its first bytes are damaged.)")
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except Exception as error:  # whatever zipfile raises about bytes that are not a zip
        text = f"is cut short or damaged at its end: {size:,} bytes without a directory. {OLDER}"
        raise _refused(place, text) from error
    if not (tail[-END:].startswith(b"PK\5\6") and tail.endswith(b"\0\0")):
        raise _refused(place, f"is damaged: something follows the end of the archive, in {size:,} bytes. {OLDER}")
    if any(name.endswith("/data.pkl") for name in names):
        raise _refused(place, "has no checksum: written by torch.save? Load it with torch.load(weights_only=True).")
    raise _refused(place, "is a zip archive, but not one of torch's.")


def _records(place: str, source: _Bytes) -> list[_Record]:
    """Return the large tensors, after checking all the rest of the file."""
    try:
        records = _tensors(source)
        digest = _digest(source, records)
    except OSError:
        raise
    except Exception as error:  # whatever zipfile raises about a directory that is damaged
        raise _refused(place, f"its directory is damaged, in {source.size:,} bytes. {OLDER}") from error
    (seal,) = source.pieces(source.size - COMMENT, source.size, memoryview(bytearray(COMMENT)))
    if seal != SEAL + digest:
        raise _refused(place, f"checksum mismatch outside of the large tensors, in {source.size:,} bytes. {OLDER}")
    return records


@contextmanager
def _checking(place: str, source: _Bytes, records: list[_Record]) -> Iterator[None]:
    """Check the tensors in other threads while the body runs; raise after it if any differs."""
    pool = ThreadPoolExecutor(min(CHECKERS, os.cpu_count() or 1), "mixedopt-checksum")
    try:
        step = len(records) // JOBS + 1
        jobs = [pool.submit(_damaged, source, records[at : at + step]) for at in range(0, len(records), step)]
        yield
        try:
            damaged = [record for job in jobs for record in job.result()]
        except EOFError as error:
            raise _refused(place, f"{error}. Use an older file.") from error
    finally:
        pool.shutdown(cancel_futures=True)
    if damaged:
        size = sum(record.end - record.start for record in damaged)
        what = f"{len(damaged)} of {len(records)} large tensors, {size:,} of {source.size:,} bytes"
        raise _refused(place, f"checksum mismatch in {what}. {OLDER}")


def _damaged(source: _Bytes, records: list[_Record]) -> list[_Record]:
    """Return the tensors whose bytes are not those that were written."""
    buffer = memoryview(bytearray(PIECE))
    damaged = []
    for record in records:
        crc = 0
        for piece in source.pieces(record.start, record.end, buffer):
            crc = zlib.crc32(piece, crc)
        if crc != record.crc:
            damaged.append(record)
    return damaged
