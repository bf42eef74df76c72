"""Whether our kernels run on a device, and making it the current one."""

from __future__ import annotations

import contextlib
import functools
import logging
from contextlib import AbstractContextManager

import torch

log = logging.getLogger("mixedopt")

HALF = frozenset({torch.float16, torch.bfloat16})  # what kernels beside a model read and write


@functools.cache
def served(device: int) -> bool:
    """True iff kernels can be made for a CUDA device: Triton is there, finds its compiler, and the device knows bf16.

    The answer is remembered; one that is no is logged at INFO.
    """
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from mixedopt.launching import try_one

        try_one(device)
    except Exception as error:
        log.info("norm layers and losses run as operations of torch: %s: %s", type(error).__name__, error)
        return False
    return True


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a CUDA device is the current one. To look is faster than to make it what it is already."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
