"""The C++ compilers of this machine."""

from __future__ import annotations

import os
import shlex
import shutil

COMPILERS = ("c++", "g++", "clang++")


def compilers() -> list[list[str]]:
    """Return the commands of the C++ compilers that there are, that of ``$CXX``, which may have arguments, first.

    Each program once, whatever its names.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    first = [named] if named and shutil.which(named[0]) else []
    programs: dict[str, list[str]] = {}
    for found in filter(None, map(shutil.which, COMPILERS)):
        programs.setdefault(os.path.realpath(found), [found])
    return first + list(programs.values())
