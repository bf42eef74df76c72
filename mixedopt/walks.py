"""What a step looks at, and does, for every parameter.

They are many and each is little, so beside a GPU, and in the compiled tier of a
CPU, C++ does it (``native``): the interpreter would cost more than the work. Here is what each function means.

Numbers of many parameters are bytes, int64 each, so that they are compared at
once; ``numbers`` reads them.
"""

from __future__ import annotations

import array
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mixedopt.native import loaded, native

NOWHERE = 16  # the address of a gradient of no values
# Mapped over many tensors: half the time of a comprehension.
POINTER: Any = Tensor.data_ptr
STRIDE: Any = Tensor.stride
CONTIGUOUS: Any = Tensor.is_contiguous
NUMEL: Any = Tensor.numel
VERSION, GRAD, DTYPE = map(operator.attrgetter, ("_version", "grad", "dtype"))


class Walks(Protocol):
    """Functions of a list of parameters; no syncs."""

    def pointers(self, params: Sequence[Tensor], /) -> bytes:
        """Return where each lies."""

    def versions(self, params: Sequence[Tensor], /) -> bytes:
        """Return each version counter."""

    def stand(self, params: Sequence[Tensor], pointers: bytes, versions: bytes | None, /) -> bool:
        """True iff each lies where it is said to, and has that version; ``None`` allows any."""

    def gradients(self, params: Sequence[Tensor], /) -> bytes | None:
        """Return where each ``.grad`` lies; ``None`` unless all are there, dense, laid out as their parameters."""

    def take(self, params: Collection[Tensor], /) -> object:
        """Set each ``.grad`` to ``None``; return what keeps them alive."""

    def bump(self, params: Sequence[Tensor], versions: bytes, /) -> bytes:
        """Move each version counter by one; return these numbers plus one."""

    def held(self, state: dict[Any, Any], /) -> bytes:
        """Return the identity of each value in the entries of optimizer state; what is no entry has none."""


class InPython:
    """``Walks`` where there is no library of C++."""

    def pointers(self, params: Sequence[Tensor], /) -> bytes:
        """As ``Walks``."""
        return _packed(map(POINTER, params))

    def versions(self, params: Sequence[Tensor], /) -> bytes:
        """As ``Walks``."""
        return _packed(map(VERSION, params))

    def stand(self, params: Sequence[Tensor], pointers: bytes, versions: bytes | None, /) -> bool:
        """As ``Walks``."""
        return self.pointers(params) == pointers and (versions is None or self.versions(params) == versions)

    def gradients(self, params: Sequence[Tensor], /) -> bytes | None:
        """As ``Walks``. Torch sees to it that shapes and devices are the parameters'."""
        grads = list(map(GRAD, params))
        try:
            addresses = _packed(map(POINTER, grads))
            alike = list(map(DTYPE, grads)) == list(map(DTYPE, params)) and (
                all(map(CONTIGUOUS, itertools.chain(grads, params)))
                or list(map(STRIDE, grads)) == list(map(STRIDE, params))
            )
            empty = not all(map(NUMEL, grads))
        except (TypeError, RuntimeError):  # some are absent, or sparse
            return None
        if alike and empty:
            pairs = zip(numbers(addresses), grads, strict=True)
            return _packed(address if grad.numel() else NOWHERE for address, grad in pairs)
        return addresses if alike else None

    def take(self, params: Collection[Tensor], /) -> object:
        """As ``Walks``."""
        grads = list(map(GRAD, params))
        for param in params:
            param.grad = None
        return grads

    def bump(self, params: Sequence[Tensor], versions: bytes, /) -> bytes:
        """As ``Walks``."""
        torch.autograd.graph.increment_version(params)
        return _packed(version + 1 for version in numbers(versions))

    def held(self, state: dict[Any, Any], /) -> bytes:
        """As ``Walks``."""
        entries = (entry.values() for entry in state.values() if isinstance(entry, dict))
        return _packed(map(id, itertools.chain.from_iterable(entries)))


IN_PYTHON = InPython()


def walks_for(devices: Iterable[torch.device]) -> Walks:
    """Return the faster way for parameters of these devices: for a CPU alone no library is made, but one is used."""
    library: Any = native() if any(device.type == "cuda" for device in devices) else loaded()
    return IN_PYTHON if library is None else library


def numbers(packed: bytes) -> list[int]:
    """Return what was packed."""
    return array.array("q", packed).tolist()


def number_at(packed: bytes, index: int) -> int:
    """Return one of what was packed, without reading the others."""
    return memoryview(packed).cast("q")[index]


def with_number(packed: bytes, index: int, number: int) -> bytes:
    """Return the same but for one of them."""
    changed = array.array("q", packed)
    changed[index] = number
    return changed.tobytes()


def _packed(values: Iterable[int]) -> bytes:
    return array.array("q", values).tobytes()
