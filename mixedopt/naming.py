"""Canonical names: those of the bare model, wherever a part of it is compiled or data-parallel."""

from __future__ import annotations

from torch import nn


def wrappers(root: nn.Module) -> frozenset[str]:
    """Return the paths in ``root`` that wrappers add: ``_orig_mod`` of compiled parts, ``module`` of parallel ones."""
    added = set()
    for name, module in root.named_modules():
        if "_orig_mod" in module._modules:
            added.add(f"{name}._orig_mod".removeprefix("."))
        elif isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            added.add(f"{name}.module".removeprefix("."))
    return frozenset(added)


def canonical(name: str, added: frozenset[str]) -> str:
    """Return a dotted name without the parts that wrappers have added."""
    if not added:
        return name
    parts = name.split(".")
    return ".".join(part for index, part in enumerate(parts) if ".".join(parts[: index + 1]) not in added)
