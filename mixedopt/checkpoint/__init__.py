"""Checkpoints: the state dict of an optimizer, its format and its checks; files; other tools."""

from mixedopt.checkpoint.check import Place
from mixedopt.checkpoint.files import load, save
from mixedopt.checkpoint.foreign import Imported, import_state
from mixedopt.checkpoint.layout import Checkpoint, IncompatibleKeys, pack, unpack
from mixedopt.checkpoint.plain import export_state, save_fp32_safetensors
from mixedopt.checkpoint.restore import load_inner_, log_plain

__all__ = [
    "Checkpoint",
    "Imported",
    "IncompatibleKeys",
    "Place",
    "export_state",
    "import_state",
    "load",
    "load_inner_",
    "log_plain",
    "pack",
    "save",
    "save_fp32_safetensors",
    "unpack",
]
