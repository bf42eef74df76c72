"""What a pass over gradients measures, in plain torch: the reference of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

# Values of one pair in the reference: longer rows lose accuracy in fp32.
ROW = 512
# The reciprocal of what lies between these two is a normal number.
LEAST_UNIT = 2.0**-126
MOST_UNIT = 2.0**126
# Under what the smallest fp32 number is in units of ``LEAST_UNIT``: only zero meets it.
LEAST_REST = 2.0**-24


def evidence_of(flat: Tensor) -> Tensor:
    """Return what a pass over a buffer measures, in rows of ``ROW`` values.

    Args:
        flat: fp32 or half, 1-d, any size. Not modified.

    Returns:
        ``(m, s)`` of every row: fp32, ``[2, rows]``, at least one row. m, in
        the unit of ``flat``, is inf or NaN iff a value is; s is then of no
        meaning.

    Syncs: none.
    """
    whole = flat.numel() // ROW * ROW
    tail = torch.nn.functional.pad(flat[whole:], (0, whole + ROW - flat.numel()))
    pairs = _measured(flat[:whole].view(-1, ROW)), _measured(tail.view(1, ROW))
    return torch.stack([torch.cat(row) for row in zip(*pairs, strict=True)])


def _measured(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return m and s of each row."""
    values = rows.float()
    largest = values.abs().amax(dim=1)
    near = largest.clamp(LEAST_UNIT, MOST_UNIT).reciprocal()
    rest = (largest * near).clamp(min=LEAST_REST).reciprocal()
    return largest, (values * near[:, None] * rest[:, None]).square().sum(dim=1)
