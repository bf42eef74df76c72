"""The library of C++ that saves the interpreter's time: made once on a machine, and kept.

It is made against torch's own headers, by a compiler as Triton needs one, too.
Where that fails, Python does the same, with the same bits; see ``module.cpp``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from mixedopt.cxx import compilers

NAME = "mixedopt_native"
SOURCE = Path(__file__).with_name("module.cpp")
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden")
STANDARDS = ("-std=c++20", "-std=c++17")
TOO_LONG = 600  # seconds for one run of a compiler
BUILDING = threading.Lock()
logger = logging.getLogger("mixedopt")


def loaded() -> ModuleType | None:
    """Return the library if somebody has asked for it before, else ``None``."""
    return sys.modules.get(NAME)


def native() -> ModuleType | None:
    """Return the library, made if it must be; ``None`` where it cannot be, which is logged once."""
    with BUILDING:
        return _native()


@functools.cache
def _native() -> ModuleType | None:
    try:
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise RuntimeError("this Python has no global lock, on which the library relies")
        return _loaded(_made())
    except Exception as error:
        logger.info("no library of C++, so the host is slower: %s: %s", type(error).__name__, error)
        return None


def _made() -> Path:
    """Return where the library of this source, torch, Python and machine lies, made if it is not there or damaged.

    Raises:
        RuntimeError, OSError, subprocess.SubprocessError: it cannot be made or kept.
    """
    sources = [path.read_text() for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".cpp", ".h")]
    machine = platform.machine(), *platform.libc_ver()
    about = (*sources, torch.__version__, torch.__file__, sys.version, sys.prefix, *machine, *FLAGS)
    library = folder() / f"{NAME}-{_digest(repr(about).encode())[:16]}.so"
    if not _is_whole(library):
        library.parent.mkdir(parents=True, exist_ok=True)
        with _alone(library.with_suffix(".lock")):
            if not _is_whole(library):  # another process may have made it
                _make(library)
    return library


def folder() -> Path:
    """Return where libraries are kept: ``$TORCH_EXTENSIONS_DIR``, or a place in the user's cache."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named, "mixedopt")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mixedopt")


def _make(library: Path) -> None:
    if not compilers() or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise RuntimeError("there is no C++ compiler, or there are no headers of Python")
    logger.warning("making a library of C++ in %s: once, about half a minute", library.parent)
    begin, said = time.monotonic(), ""
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        fresh = Path(place, library.name)
        for compiler in compilers():
            for standard in STANDARDS:
                command = [*compiler, standard, *FLAGS, *_where(), "-o", str(fresh), str(SOURCE), *_libraries()]
                ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TOO_LONG)
                if ran.returncode == 0:
                    made = fresh.read_bytes()
                    _note(library).unlink(missing_ok=True)
                    os.replace(fresh, library)
                    _note(library).write_text(_digest(made))
                    logger.info("made the library of C++ in %.0f s", time.monotonic() - begin)
                    return
                said = said or f"{shlex.join(compiler)}: {ran.stderr.strip()}"
    logger.warning("the library of C++ cannot be made, so the host stays slower")
    raise RuntimeError(said[:300])


def _note(library: Path) -> Path:
    """Return where the digest of a library stands: to load a damaged one would end the process."""
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    note = _note(library)
    return library.exists() and note.exists() and note.read_text() == _digest(library.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process makes the same library: the ranks of a training would, all at once."""
    import fcntl  # there is none on Windows

    with lock.open("w") as held:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _where() -> list[str]:
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    return [f"-I{header}" for header in headers]


def _libraries() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


def _loaded(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_loader(NAME, loader)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    loader.exec_module(module)
    sys.modules[NAME] = module
    return module
