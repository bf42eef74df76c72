"""The library of C++ that saves the interpreter's time: made once on a machine, and kept.

It is made against torch's own headers, by a compiler as Triton needs one, too.
Where that fails, Python does the same, with the same bits; see ``module.cpp``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch

from mixedopt.cxx import compilers

NAME = "mixedopt_native"
SOURCE = Path(__file__).with_name("module.cpp")
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden")
STANDARDS = ("-std=c++20", "-std=c++17")
logger = logging.getLogger("mixedopt")


def loaded() -> ModuleType | None:
    """Return the library if somebody has asked for it before, else ``None``."""
    return sys.modules.get(NAME)


@functools.cache
def native() -> ModuleType | None:
    """Return the library, made if it must be; ``None`` where it cannot be, which is logged at INFO."""
    try:
        return _loaded(_made())
    except Exception as error:
        logger.info("no library of C++, so the host is slower: %s: %s", type(error).__name__, error)
        return None


def _made() -> Path:
    """Return where the library of this source, torch and Python lies.

    Raises:
        RuntimeError, OSError: it cannot be made or kept.
    """
    sources = [path.read_text() for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".cpp", ".h")]
    about = (*sources, torch.__version__, torch.__file__, sys.version, sys.prefix, *FLAGS)
    library = folder() / f"{NAME}-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    logger.warning("making a library of C++ in %s: once, about half a minute", library.parent)
    begin, said = time.monotonic(), ""
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        fresh = Path(place, library.name)
        for compiler in compilers():
            for standard in STANDARDS:
                command = [*compiler, standard, *FLAGS, *_where(), "-o", str(fresh), str(SOURCE)]
                ran = subprocess.run([*command, *_libraries()], capture_output=True, text=True, check=False)
                if ran.returncode == 0:
                    os.replace(fresh, library)  # another process may have been as fast
                    logger.info("made the library of C++ in %.0f s", time.monotonic() - begin)
                    return library
                said = said or f"{shlex.join(compiler)}: {ran.stderr.strip()}"
    raise RuntimeError(said[:300] or "there is no C++ compiler")


def folder() -> Path:
    """Return where libraries are kept: ``$TORCH_EXTENSIONS_DIR``, or a place in the user's cache."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named, "mixedopt")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mixedopt")


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
