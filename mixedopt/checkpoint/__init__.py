"""Checkpoints: the state dict of an optimizer, its format and its checks; files; other tools."""

from mixedopt.checkpoint.check import Place
from mixedopt.checkpoint.foreign import Imported, import_state
from mixedopt.checkpoint.layout import Checkpoint, IncompatibleKeys, pack, unpack
from mixedopt.checkpoint.load import load_inner_, log_plain
from mixedopt.checkpoint.plain import export_state, save_fp32_safetensors

__all__ = [
    "Checkpoint",
    "Imported",
    "IncompatibleKeys",
    "Place",
    "export_state",
    "import_state",
    "load_inner_",
    "log_plain",
    "pack",
    "save_fp32_safetensors",
    "unpack",
]
