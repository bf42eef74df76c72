"""Triton kernels: compiled once, launched without Triton's own handling of arguments.

Imported by the rooms that hold kernels, for CUDA tensors only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from mixedopt.native import native

# A count that is 1 or a multiple of 16 would otherwise be compiled anew.
jit: Callable[[Callable[..., None]], Any] = triton.jit(do_not_specialize=["rows", "programs", "units", "samples"])


LETTERS = {"*": "*", "i32": "i", "fp32": "f"}
MOST_ARGUMENTS = 64
# What a launch by C++ does not give.
SPECIAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")


class Launcher:
    """A kernel and its constants on one device, launched without Triton's handling of arguments.

    That handling costs more host time than all else in a launch. It looks at
    types, which are constant here, and at alignment, which is checked here. If
    there is a library of C++, that calls the driver.

    Attributes:
        direct_kernel: what C++ launches; ``None`` before the first launch, and where it cannot.
        takes: a letter for each argument of it: ``*`` for a pointer, ``i`` for int32, ``f`` for fp32.
    """

    __slots__ = ("_direct", "_library", "_run", "constants", "device", "direct_kernel", "kernel", "takes", "warps")

    def __init__(self, kernel: Any, device: int, constants: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.device, self.constants, self.warps = kernel, device, constants, warps
        self._run: tuple[Callable[..., None], Any, Any] | None = None
        self._direct: Callable[..., bool] = _never
        self._library: Any = None
        self.direct_kernel: Any = None
        self.takes = ""

    def __call__(self, programs: int, tensors: Sequence[Tensor], *scalars: float) -> None:
        """Launch ``programs`` programs on the current stream of the device, the current one, without a sync."""
        if self._direct(self.direct_kernel, programs, tensors, scalars):
            return
        pointers, bits = [], 0
        for tensor in tensors:  # a loop calls less than a map and a reduction do, and launches are many
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            bits |= pointer
        if self._run is not None and not bits & 15:
            run, function, metadata = self._run
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *scalars, *self.constants)
            return
        # The first launch, or a view at an odd place, for which Triton compiles and keeps what fits.
        compiled = self.kernel[(programs,)](*tensors, *scalars, *self.constants, num_warps=self.warps)
        if not bits & 15:
            self._run = compiled.run, compiled.function, compiled.packed_metadata
            with contextlib.suppress(AttributeError, KeyError, OSError):  # another Triton tells other things
                self._learn_(compiled)

    def again(self, programs: int, tensors: Sequence[Tensor | None], *scalars: float) -> Again:
        """Return this launch, to be made as often as it is called; see ``Again``."""
        return Again(self, programs, tensors, *scalars)

    def ready(self, programs: int, tensors: Sequence[Tensor | None], scalars: Sequence[float]) -> Callable[..., bool]:
        """Return what launches without looking at these arguments again, by C++, and says whether it has.

        It is given the tensor in whose place ``None`` stands, if it does.
        """
        ready = self._library and self._library.ready(self.direct_kernel, programs, tensors, scalars)
        return _never if ready is None else functools.partial(self._library.relaunch, ready)

    def _learn_(self, compiled: Any) -> None:
        """Hand over to C++ a kernel that asks for nothing special."""
        library: Any = native() if torch.version.hip is None and compiled.function else None
        about = compiled.metadata._asdict()
        kinds = ["*" if kind[0] == "*" else kind for kind in compiled.src.signature.values() if kind != "constexpr"]
        common = about["num_ctas"] == 1 and not any(map(about.get, SPECIAL))
        if library is None or not common or not set(kinds) <= set(LETTERS) or len(kinds) > MOST_ARGUMENTS:
            return
        takes = "".join([LETTERS[kind] for kind in kinds])
        of_launch = self.device, about["num_warps"] * 32, about["shared"]
        kernel = library.kernel(_driver(), compiled.function, *of_launch, takes)
        self.direct_kernel, self.takes, self._direct, self._library = kernel, takes, library.launch, library


class Again:
    """A launch that is made again and again, of the same memory; it keeps the tensors.

    Args:
        launcher: of the kernel.
        programs: as for the launcher.
        tensors: likewise; ``None`` stands for one that is given at each launch.
        scalars: likewise.
    """

    __slots__ = ("_arguments", "_launcher", "_ready")

    def __init__(self, launcher: Launcher, programs: int, tensors: Sequence[Tensor | None], *scalars: float) -> None:
        self._launcher, self._arguments = launcher, (programs, tensors, scalars)
        self._ready: Callable[..., bool] = _never

    def __call__(self, *given: Tensor) -> None:
        """Launch, as the launcher does."""
        if self._ready(*given):
            return
        programs, tensors, scalars = self._arguments
        self._launcher(programs, [given[0] if tensor is None else tensor for tensor in tensors], *scalars)
        if self._ready is _never:
            self._ready = self._launcher.ready(programs, tensors, scalars)


def _never(*args: Any) -> bool:
    """Launch nothing."""
    return False


@functools.cache
def _driver() -> int:
    """Return the address of ``cuLaunchKernel``."""
    return int(ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value or 0)


@jit
def nothing_kernel(target: tl.tensor) -> None:
    """Write a zero."""
    tl.store(target, 0.0)


def try_one(device: int) -> None:
    """Make and launch a kernel.

    Raises:
        Exception: whatever Triton or the compiler says.
    """
    with torch.cuda.device(device):
        nothing_kernel[(1,)](torch.empty(1, dtype=torch.float32, device=torch.device("cuda", device)))


@functools.cache
def processors(device: int) -> int:
    """Return the number of multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (least - 1).bit_length()


def warps_for(values: int, a_thread: int) -> int:
    """Return how many warps give each thread ``a_thread`` of the values of a tile."""
    return min(max(values // (32 * a_thread), 1), 16)
