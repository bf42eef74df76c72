"""The C++ compilers of this machine."""

from __future__ import annotations

import os
import shlex
import shutil

COMPILERS = ("c++", "g++", "clang++")


def compilers() -> list[list[str]]:
    """Return the commands of the C++ compilers that there are, that of ``$CXX``, which may have arguments, first."""
    named = shlex.split(os.environ.get("CXX", ""))
    first = [named] if named and shutil.which(named[0]) else []
    return first + [[found] for found in map(shutil.which, COMPILERS) if found]
