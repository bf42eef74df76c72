"""Wrote ``tests/data/checkpoint_v1.pt``, which every later version must read. Not to be run again.

python tests/make_checkpoint_v1.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from resume import Run, Script

from mixedopt import checkpoint

SCRIPT = Script(
    inner="adamw_foreach",
    dtype="fp16",
    scale="dynamic",
    gradients="autograd",
    with_model=True,
    clip=True,
    events=("overflow", "without branch", "without branch", "overflow", "overflow", "without branch"),
    cut=6,
)
FILE = Path(__file__).parent / "data" / "checkpoint_v1.pt"


def main() -> None:
    """Write the file, unless it is there."""
    torch.set_num_threads(1)
    run = Run(SCRIPT)
    run.play(0, SCRIPT.cut)
    if FILE.exists():
        raise SystemExit(f"{FILE} is there: a version's file is written once.")
    checkpoint.save(FILE, model=run.model, optimizer=run.optimizer, step=SCRIPT.cut)


if __name__ == "__main__":
    main()
