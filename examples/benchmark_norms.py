"""What does a norm with fp32 weights and half activations cost? Three ways beside torch's all-half kernel.

- ``half``: the reference, ``F.layer_norm`` and its kin with weights and activations in half;
- ``casts``: fp32 weights, the activations cast up and the result cast down around the fp32 kernel;
- ``two passes``: the half kernel without weights, then weight and bias in fp32 (this rounds twice);
- ``mixedopt``: ``mixedopt.norms``, half in, fp32 weights, half out.

Device time is that of forward and backward as one CUDA graph over several inputs, more than the cache holds; the ways
run in turn, every ratio is the median of paired ratios. Host time is what Python needs for a call and its share of
``backward`` in a chain of norms so small that the device waits. Memory is in bytes for a value of the input: what is
left after forward, its result included, and the peak of forward and backward.

    python examples/benchmark_norms.py                     # the four shapes, on a GPU if there is one
    python examples/benchmark_norms.py --tiny              # seconds on a CPU
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mixedopt import norms

BASE = "half"
CHAIN = 16  # norms in a row, for the host time
INPUT_BYTES = 200e6  # in all, several times what the cache holds

Call = Callable[[Tensor, list[Tensor]], Tensor]
Ways = dict[str, Call]


@dataclass(frozen=True)
class Setup:
    """One norm on one shape."""

    name: str
    kind: str
    shape: tuple[int, ...]
    groups: int = 0

    @property
    def size(self) -> int:
        """How many weights there are."""
        return self.shape[1] if self.kind == "group" else self.shape[-1]


SETUPS = (
    Setup("BERT-base, LayerNorm", "layer", (32 * 128, 768)),
    Setup("GPT, LayerNorm", "layer", (8192, 1024)),
    Setup("GPT, RMSNorm", "rms", (16384, 4096)),
    Setup("UNet, GroupNorm", "group", (8, 320, 64, 64), 32),
    Setup("UNet, GroupNorm, deep", "group", (8, 1280, 16, 16), 32),
)
TINY = (
    Setup("LayerNorm", "layer", (8, 32)),
    Setup("RMSNorm", "rms", (8, 32)),
    Setup("GroupNorm", "group", (2, 8, 4, 4), 2),
)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Print a table for each shape; return name of the shape -> way -> time as a ratio to the half kernel."""
    args = parse(argv)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "cpu"
    print(f"{name}, {dtype}, torch {torch.__version__}, {args.rounds} rounds\n")
    return {setup.name: report(setup, dtype, args) for setup in (TINY if args.tiny else SETUPS)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default))
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds over the four ways")
    parser.add_argument("--bf16", action="store_true", help="bf16 instead of fp16")
    parser.add_argument("--tiny", action="store_true", help="shapes that take no time")
    return parser.parse_args(argv)


# -- the ways --------------------------------------------------------------------------------------------------------


def torch_norm(setup: Setup) -> Callable[[Tensor, Sequence[Tensor | None]], Tensor]:
    """Return torch's function of the kind, of x and the weights."""
    if setup.kind == "group":
        return lambda x, params: F.group_norm(x, setup.groups, *params)
    if setup.kind == "rms":
        return lambda x, params: F.rms_norm(x, (setup.size,), *params)
    return lambda x, params: F.layer_norm(x, (setup.size,), *params)


def mixed_norm(setup: Setup) -> Call:
    """Return this package's function of the kind."""
    if setup.kind == "group":
        return lambda x, params: norms.group_norm(x, setup.groups, *params)
    if setup.kind == "rms":
        return lambda x, params: norms.rms_norm(x, (setup.size,), *params)
    return lambda x, params: norms.layer_norm(x, (setup.size,), *params)


def make_ways(setup: Setup) -> Ways:
    """Return name -> function of x and the weights."""
    norm = torch_norm(setup)
    shape = (-1, *[1] * (len(setup.shape) - 2)) if setup.kind == "group" else (-1,)

    def casts(x: Tensor, params: list[Tensor]) -> Tensor:
        return norm(x.float(), params).to(x.dtype)

    def two_passes(x: Tensor, params: list[Tensor]) -> Tensor:
        hat = norm(x, ())
        weight, *bias = (param.view(shape) for param in params)
        return (torch.addcmul(bias[0], hat, weight) if bias else hat * weight).to(x.dtype)

    return {BASE: norm, "casts": casts, "two passes": two_passes, "mixedopt": mixed_norm(setup)}


def make_params(setup: Setup, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return weight and, but for RMSNorm, bias."""
    count = 1 if setup.kind == "rms" else 2
    return [torch.randn(setup.size, device=device).to(dtype).requires_grad_() for _ in range(count)]


# -- measuring -------------------------------------------------------------------------------------------------------


class Bench:
    """Inputs and weights for the ways of one setup."""

    def __init__(self, setup: Setup, device: torch.device, dtype: torch.dtype) -> None:
        self.ways, self.device, self.dtype = make_ways(setup), device, dtype
        self.params = {name: make_params(setup, device, self.weight_dtype(name)) for name in self.ways}
        self.chains = {
            name: [make_params(setup, device, self.weight_dtype(name)) for _ in range(CHAIN)] for name in self.ways
        }
        values = torch.Size(setup.shape).numel()
        count = max(2, min(16, int(INPUT_BYTES / (4 * values)))) if device.type == "cuda" else 1
        self.pairs = [(self.draw(setup.shape).requires_grad_(), self.draw(setup.shape)) for _ in range(count)]
        small = (4, *setup.shape[1:]) if setup.kind != "group" else (2, *setup.shape[1:2], 4, 4)
        self.small = self.draw(small).requires_grad_(), self.draw(small)

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """Return half values."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def weight_dtype(self, name: str) -> torch.dtype:
        """Return what the weights of a way are kept in."""
        return self.dtype if name == BASE else torch.float32

    def run(self, name: str) -> None:
        """Do forward and backward over all inputs."""
        for x, dy in self.pairs:
            torch.autograd.grad(self.ways[name](x, self.params[name]), [x, *self.params[name]], dy)

    def chain(self, name: str) -> None:
        """Do forward and backward through ``CHAIN`` norms in a row."""
        x, dy = self.small
        y = x
        for params in self.chains[name]:
            y = self.ways[name](y, params)
        torch.autograd.grad(y, [x, *(param for params in self.chains[name] for param in params)], dy)

    def times(self, rounds: int) -> dict[str, list[float]]:
        """Return name -> seconds of each round of ``run``, an input."""
        call = self.graphed if self.device.type == "cuda" else self.clocked
        timers = {name: call(name) for name in self.ways}
        seconds: dict[str, list[float]] = {name: [] for name in self.ways}
        for index in range(rounds + 2):
            for name, timer in timers.items():
                taken = timer() / len(self.pairs)
                if index >= 2:  # the first rounds warm up
                    seconds[name].append(taken)
        return seconds

    def clocked(self, name: str) -> Callable[[], float]:
        """Return a timer by the host's clock."""

        def timer() -> float:
            start = time.perf_counter()
            self.run(name)
            return time.perf_counter() - start

        return timer

    def graphed(self, name: str) -> Callable[[], float]:
        """Return a timer of a CUDA graph by the device's clock."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.run(name)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(name)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def timer() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return timer

    def host_times(self, rounds: int) -> dict[str, list[float]]:
        """Return name -> seconds of the host for a norm in a chain, round by round."""
        seconds: dict[str, list[float]] = {name: [] for name in self.ways}
        for index in range(rounds + 2):
            for name in self.ways:
                synchronize(self.device)
                start = time.perf_counter()
                self.chain(name)
                if index >= 2:
                    seconds[name].append((time.perf_counter() - start) / CHAIN)
        return seconds

    def memory(self, name: str) -> tuple[float, float]:
        """Return bytes a value: left after forward, and the peak of forward and backward. On a GPU only."""
        if self.device.type != "cuda":
            return float("nan"), float("nan")
        x, dy = self.pairs[0]
        synchronize(self.device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = self.ways[name](x, self.params[name])
        left = torch.cuda.memory_allocated() - before
        torch.autograd.grad(y, [x, *self.params[name]], dy)
        return left / x.numel(), (torch.cuda.max_memory_allocated() - before) / x.numel()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Return the median over rounds of a way's time as a multiple of the half kernel's."""
    return statistics.median(mine / base for mine, base in zip(seconds[name], seconds[BASE], strict=True))


def report(setup: Setup, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, float]:
    """Print the table of one setup; return way -> ratio of device times."""
    bench = Bench(setup, args.device, dtype)
    memory = {name: bench.memory(name) for name in bench.ways for _ in range(2)}  # the first call compiles
    host = bench.host_times(args.rounds)
    seconds = bench.times(args.rounds)
    print(f"{setup.name}, {'x'.join(map(str, setup.shape))}")
    print(f"{'':12}{'us':>10}{'x half':>9}{'host us':>10}{'x half':>9}{'left B':>10}{'peak B':>10}")
    for name, times in seconds.items():
        device_us, host_us = (statistics.median(values) * 1e6 for values in (times, host[name]))
        left, peak = memory[name]
        print(
            f"{name:12}{device_us:10.1f}{ratio(seconds, name):9.2f}"
            f"{host_us:10.1f}{ratio(host, name):9.2f}{left:10.2f}{peak:10.2f}"
        )
    print()
    return {name: ratio(seconds, name) for name in seconds}


if __name__ == "__main__":
    main()
