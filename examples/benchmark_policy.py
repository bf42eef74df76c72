"""What does a cast policy cost? Forward and backward of real models, several ways of keeping parts in fp32.

Every arm trains the same model from ``transformers``, which computes its own loss, without the optimizer's step:

- ``all half``: ``CastPolicy.none()``, the reference; norms and the loss in half, as ``model.half()`` does;
- ``norms``: norm layers with fp32 weights (``mixedopt.norms``), no function rule;
- ``norms + losses``: ``CastPolicy.default()``, so the loss is fp32 too;
- ``mode everywhere``: the same function rule, in force over the whole forward instead of where it is needed;
- ``norms cast``: norm layers cast up and down around torch's fp32 kernel, as a hook would do it;
- ``norms rounded``: torch's half kernel on norm weights that are rounded to half in every forward;
- ``autocast``: the half model under ``torch.autocast``.

The arms run in turn; every ratio is the median of paired ratios. Needs ``pip install -e ".[transformers,examples]"``.

    python examples/benchmark_policy.py                    # BERT-base 32x128 and a GPT of 350 M, on a GPU
    python examples/benchmark_policy.py --tiny             # seconds on a CPU
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from mixedopt import CastPolicy, convert
from mixedopt.functions import LOSS_FUNCTIONS, FunctionCasts

BASE = "all half"
LOSS_SCALE = 1024.0
NORMS = replace(CastPolicy.default(), functions=())


@dataclass(frozen=True)
class Setup:
    """A model and its batch."""

    name: str
    make: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    length: int


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds of one arm."""

    seconds: list[float]
    host: list[float]
    saved: float
    peak: float


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Print a table for each model; return name of the model -> arm -> time as a ratio to all half."""
    args = parse(argv)
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "cpu"
    print(f"{device}, {dtype}, torch {torch.__version__}, {args.rounds} rounds\n")
    return {setup.name: report(setup, dtype, args) for setup in (tiny() if args.tiny else full())}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default))
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds over the arms")
    parser.add_argument("--bf16", action="store_true", help="bf16 instead of fp16")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, help="which ways; the first is the base")
    parser.add_argument("--tiny", action="store_true", help="models that take no time")
    return parser.parse_args(argv)


def full() -> tuple[Setup, ...]:
    """Return the two models the README speaks of."""
    bert = BertConfig()
    gpt = GPT2Config(n_layer=24, n_embd=1024, n_head=16, vocab_size=50304)
    return (
        Setup("BERT-base, 32x128", lambda: BertForMaskedLM(bert), bert.vocab_size, 32, 128),
        Setup("GPT, 350 M, 8x1024", lambda: GPT2LMHeadModel(gpt), gpt.vocab_size, 8, 1024),
    )


def tiny() -> tuple[Setup, ...]:
    """Return two models of a few thousand parameters."""
    bert = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    gpt = GPT2Config(vocab_size=64, n_layer=2, n_embd=16, n_head=2, n_positions=16)
    return (
        Setup("BERT", lambda: BertForMaskedLM(bert), 64, 2, 8),
        Setup("GPT", lambda: GPT2LMHeadModel(gpt), 64, 2, 8),
    )


ARMS = (BASE, "norms", "norms + losses", "mode everywhere", "norms cast", "norms rounded", "autocast")

# -- the arms --------------------------------------------------------------------------------------------------------


class CastNorm(nn.LayerNorm):
    """The naive way: two more kernels, and an fp32 activation that is saved."""

    def forward(self, x: Tensor) -> Tensor:
        """Cast up, normalise, cast down."""
        return super().forward(x.float()).to(x.dtype)


class RoundedNorm(nn.LayerNorm):
    """The fast way that rounds the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in half."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Arm:
    """One way, on a model of its own."""

    def __init__(self, name: str, setup: Setup, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = setup.make().to(device).train()
        policies = {BASE: CastPolicy.none(), "autocast": CastPolicy.none(), "norms + losses": CastPolicy.default()}
        convert(self.model, dtype, policies.get(name, NORMS))
        kinds = {"norms cast": CastNorm, "norms rounded": RoundedNorm}
        for module in self.model.modules():
            if isinstance(module, nn.LayerNorm) and name in kinds:
                module.__class__ = kinds[name]
        self._context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        if name == "mode everywhere":
            self._context = lambda: FunctionCasts(frozenset(LOSS_FUNCTIONS), dtype)
        elif name == "autocast":
            self._context = lambda: torch.autocast(device.type, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss that the model computes."""
        with self._context():
            loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def forget(self) -> None:
        """Drop the gradients."""
        for param in self.model.parameters():
            param.grad = None


# -- measuring -------------------------------------------------------------------------------------------------------


def report(setup: Setup, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, float]:
    """Measure and print one model."""
    ids = torch.randint(setup.vocabulary, (setup.batch, setup.length), device=args.device)
    arms = {name: Arm(name, setup, args.device, dtype) for name in args.arms}
    found = {name: Figures([], [], *memory(arm, ids)) for name, arm in arms.items()}
    for round_ in tqdm(range(args.rounds + 5), desc=setup.name, leave=False):
        for name, arm in arms.items():
            seconds, host = timed(arm, ids)
            if round_ >= 5:
                found[name].seconds.append(seconds)
                found[name].host.append(host)
    base = found[args.arms[0]]
    print(f"{setup.name:<22} {'ms':>8} {'x first':>8} {'host ms':>8} {'x first':>8} {'saved MB':>9} {'peak MB':>9}")
    ratios = {}
    for name, figures in found.items():
        ratios[name] = paired(figures.seconds, base.seconds)
        ms, host_ms = (1e3 * statistics.median(values) for values in (figures.seconds, figures.host))
        host = paired(figures.host, base.host)
        memory_mb = f"{figures.saved / 1e6:9.1f} {figures.peak / 1e6:9.1f}"
        print(f"{name:<22} {ms:8.2f} {ratios[name]:8.3f} {host_ms:8.2f} {host:8.3f} {memory_mb}")
    print()
    return ratios


def paired(these: Sequence[float], those: Sequence[float]) -> float:
    """Return the median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def memory(arm: Arm, ids: Tensor) -> tuple[float, float]:
    """Return the bytes that forward leaves behind, and the peak of both; 0 on a CPU. The first run warms up."""
    for _ in range(2):
        (arm.forward(ids).float() * LOSS_SCALE).backward()
        arm.forget()
    if not ids.is_cuda:
        return 0.0, 0.0
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = arm.forward(ids)
    saved = torch.cuda.memory_allocated() - before
    (loss.float() * LOSS_SCALE).backward()
    peak = torch.cuda.max_memory_allocated() - before
    arm.forget()
    return float(saved), float(peak)


def timed(arm: Arm, ids: Tensor) -> tuple[float, float]:
    """Return the seconds of forward and backward, and those until the host was done."""
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    begin = time.perf_counter()
    (arm.forward(ids).float() * LOSS_SCALE).backward()
    host = time.perf_counter() - begin
    wait()
    seconds = time.perf_counter() - begin
    arm.forget()
    return seconds, host


if __name__ == "__main__":
    main()
