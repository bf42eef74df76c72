"""An fp32 value as a half value and a 16-bit remainder: 2 + 2 bytes, and nothing lost.

The half value is the fp32 one rounded to nearest, ties to even, as the model
wants it; the remainder says how far the fp32 value lies from it, away from zero.

fp16: the remainder counts ``2**-16`` of the half value's ulp. Exact for
``2**-16 <= |x| <= 65504``; below, the error is at most ``2**-41``, and
``2**-40`` within that distance of a tie. A finite value that rounds to inf
stays one: it keeps the upper 16 bits of its pattern, and is at least 65536.

bf16: the remainder is the difference of the bit patterns. Exact for every
value but the tie above an even half value, which moves one fp32 ulp towards
it: 65537 fp32 values round to such a one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Not -32768: from an odd fp16 value that is the tie, which rounds to its neighbour.
LIMIT = 2**15 - 1
# Values at a time: what lies between two of the operations stays in a cache, or is small beside a model.
CHUNK_HOST = 2**17
CHUNK_DEVICE = 2**24

_INF = 0x7F800000  # its bits: all of the exponent
_BEYOND = 0x4780  # the upper half of the bits of 65536, beyond all that fp16 can hold


def remainder_of(master: Tensor, half: Tensor) -> Tensor:
    """Return what ``half`` lacks of ``master``; ``join`` puts them together.

    Args:
        master: fp32, any shape. Not modified.
        half: fp16 or bf16, that shape: ``master.to(half.dtype)``. Not modified.

    Returns:
        int16, that shape; of a NaN any.

    Syncs: none.
    """
    if half.dtype == torch.bfloat16:
        bits = half.view(torch.int16).to(torch.int32) << 16
        return (master.view(torch.int32) - bits).clamp_(-LIMIT - 1, LIMIT).to(torch.int16)
    sizes = master.abs()
    upper = (sizes.view(torch.int32) >> 16).to(torch.int16)
    beyond = upper.clamp_(min=_BEYOND).sub_(_BEYOND)  # 0, but of what becomes inf
    # By way of the bits: inductor leaves out a cast to half and back again, and with it the rounding.
    wide = (half.view(torch.int16) & LIMIT).view(torch.float16).float()
    per_unit = (_exponent(wide) ^ _INF).add_(25 << 23).view(torch.float32)  # 255 - e + 25: the reciprocal
    # Exact: the two are less than a factor of two apart, or half is 0; the factor is a power of two.
    units = sizes.sub_(wide).mul_(per_unit)
    return units.nan_to_num_(-LIMIT).round_().clamp_(-LIMIT, LIMIT).to(torch.int16).add_(beyond)


def join(half: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 values that ``remainder_of`` has split.

    Rounded to nearest they are ``half``, and split they are the same pair, for
    every remainder that ``remainder_of`` returns.

    Args:
        half: fp16 or bf16, any shape. Not modified.
        remainder: int16, that shape. Not modified.

    Returns:
        fp32, that shape; NaN where ``half`` is.

    Syncs: none.
    """
    # Without comparisons and ``where``, which take torch's CPU kernels ten times as long as all this.
    if half.dtype == torch.bfloat16:
        bits = half.view(torch.int16)
        # A weight set to zero by hand may have any remainder; downwards is across zero there, and NaN.
        lowest = (bits & LIMIT).clamp_(max=1).mul_(-LIMIT - 1)
        return (bits.to(torch.int32) << 16).add_(torch.maximum(remainder, lowest)).view(torch.float32)
    wide, units = half.float(), remainder.float()
    beyond = remainder.clamp(-LIMIT, (_INF >> 16) - _BEYOND - LIMIT).add_(LIMIT).add_(_BEYOND)
    beyond = (beyond.to(torch.int32) << 16).view(torch.float32)
    joined = units.mul_(_exponent(wide).sub_(26 << 23).view(torch.float32)).add_(wide.abs())
    return torch.minimum(joined, beyond).copysign_(wide)


def _exponent(wide: Tensor) -> Tensor:
    """Return the bits of the power of two below each value, of the least and the largest that is normal in fp16."""
    return (wide.view(torch.int32) & _INF).clamp_((127 - 14) << 23, (127 + 15) << 23)


def split_into_(remainder: Tensor, master: Tensor, half: Tensor) -> None:
    """Write ``remainder_of(master, half)`` into ``remainder``; flat tensors, part by part. Syncs: none."""
    for target, *parts in _parts(remainder, master, half):
        target.copy_(remainder_of(*parts))


def join_into_(master: Tensor, half: Tensor, remainder: Tensor) -> None:
    """Write ``join(half, remainder)`` into ``master``; flat tensors, part by part. Syncs: none."""
    for target, *parts in _parts(master, half, remainder):
        target.copy_(join(*parts))


def mend_(remainder: Tensor, half: Tensor) -> None:
    """Let remainders fit half values that were written by others. Syncs: none.

    A value takes its remainder along, in units of its own ulp, and zero where
    the two together would not round to it. What was not written stays.

    Args:
        remainder: int16, any shape. Modified in place.
        half: fp16 or bf16, that shape.
    """
    joined = join(half, remainder)
    remainder.copy_(torch.where(joined.to(half.dtype) == half, remainder_of(joined, half), 0))


class Curtain:
    """What masters show while they are split: NaN in their shapes, and nobody writes there unnoticed.

    A freed storage would be worse than NaN: to read it ends the process.

    Args:
        masters: fp32.
    """

    def __init__(self, masters: Sequence[nn.Parameter]) -> None:
        self._masters = masters
        self._shown: list[Tensor] = []
        self._versions: list[int] = []

    def open_(self, views: Sequence[Tensor]) -> None:
        """Let the masters show ``views``."""
        for master, view in zip(self._masters, views, strict=True):
            master.data = view

    def draw_(self, size: int) -> Tensor:
        """Let the masters show NaN, and return NaN in the place of the flat buffer of this size. Syncs: none."""
        nan = torch.full((), torch.nan, dtype=torch.float32, device=self._masters[0].device)
        if not self._shown:
            # Torch refuses to write where many values share one place; a single value gets its own.
            self._shown = [(nan if m.numel() > 1 else nan.clone()).expand(m.shape) for m in self._masters]
        self.open_(self._shown)
        self._versions = list(map(operator.attrgetter("_version"), self._masters))
        return nan.expand(size)

    def check(self) -> None:
        """Raise ``ValueError`` if masters were written behind the curtain: those values are lost."""
        before, self._versions = self._versions, list(map(operator.attrgetter("_version"), self._masters))
        if before != self._versions:
            for shown in self._shown:
                shown.fill_(torch.nan)
            raise ValueError(
                "masters of the inner optimizer were written while they were split, when nothing is there. Get them "
                "from named_masters(), edit them and call publish()."
            )


def _parts(*flats: Tensor) -> zip[tuple[Tensor, ...]]:
    size = CHUNK_HOST if flats[0].device.type == "cpu" else CHUNK_DEVICE
    return zip(*(torch.split(flat, size) for flat in flats), strict=True)
