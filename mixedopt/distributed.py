"""What DistributedDataParallel must be told when its parameters change under it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` around ``model``, if there is one."""
    while not isinstance(model, DistributedDataParallel):
        if "_orig_mod" not in model._modules:
            return None
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def check_rebuildable(ddp: DistributedDataParallel) -> None:
    """Raise ``ValueError`` unless ``rebuild_`` can serve it."""
    try:
        ddp._check_default_group()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(
            "the model is inside a DistributedDataParallel with a process group of its own: its buckets, made for "
            "fp32, cannot be made anew. Wrap the optimizer around the bare model first, then the model in "
            "DistributedDataParallel."
        ) from error
    if ddp._comm_hooks:
        raise ValueError(
            "the model is inside a DistributedDataParallel with a communication hook, which would be lost. "
            "Call register_comm_hook() after wrapping."
        )


def rebuild_(ddp: DistributedDataParallel) -> None:
    """Make the buckets of ``ddp`` anew, after parameters changed their dtype.

    Changing a parameter's dtype gives it a new gradient accumulator, on which
    the old hooks do not hang: gradients would not be averaged any more. The
    way back from a pickle makes the buckets too, so it is taken here.

    Every rank must call it. Syncs: as building a ``DistributedDataParallel``.
    """
    state = ddp.__getstate__()  # type: ignore[no-untyped-call]
    del ddp.reducer, ddp.logger  # removes the old hooks
    ddp.__setstate__(state)  # type: ignore[no-untyped-call]


def several_ranks() -> bool:
    """True iff this process is one of several in ``torch.distributed``."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and (torch.distributed.get_world_size() > 1)
    )
