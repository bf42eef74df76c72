"""Checkpoints: the state dict of an optimizer, its format and its checks."""

from mixedopt.checkpoint.check import Place
from mixedopt.checkpoint.layout import Checkpoint, IncompatibleKeys, load_inner_, pack, unpack

__all__ = ["Checkpoint", "IncompatibleKeys", "Place", "load_inner_", "pack", "unpack"]
