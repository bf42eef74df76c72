"""The models that ``benchmark_training.py`` trains, and the batches it trains them on."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its batch and its loss.

    Attributes:
        title: for the head of a table.
        unit: what ``items`` counts.
        items: how many of them one iteration sees.
        make: returns the model, fp32, on the CPU.
        batch: returns inputs and targets, on the CPU.
        loss: of the model (or what compiles it), the inputs and the targets.
        needs: a package beside torch.
    """

    title: str
    unit: str
    items: int
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Callable[..., Any], Tensor, Tensor], Tensor]
    needs: str | None = None

    def missing(self) -> str | None:
        """Return why this cannot run here, if it cannot."""
        if self.needs is None or importlib.util.find_spec(self.needs):
            return None
        return f"{self.needs} is not installed"


def workloads(*, tiny: bool) -> dict[str, Workload]:
    """Return name -> workload; ``tiny`` ones take no time on a CPU."""
    if tiny:
        return {
            "ffn": ffn(16, 32, 8),
            "unet": unet(4, 2, 16, 2, "batch"),
            "unet-groupnorm": unet(4, 2, 16, 2, "group"),
            "bert-base": bert(2, 8, vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2),
            "gpt-20m": gpt("tiny", 1, 16, 64, 16, 2),
            "gpt-124m": gpt("tiny", 2, 16, 64, 16, 2),
            "gpt-350m": gpt("tiny", 3, 16, 64, 16, 2),
        }
    return {
        "ffn": ffn(784, 1024, 512),
        "unet": unet(64, 4, 128, 8, "batch"),
        "unet-groupnorm": unet(64, 4, 128, 8, "group"),
        "bert-base": bert(32, 128),
        "gpt-20m": gpt("20 M", 6, 512, 8192, 256, 8),
        "gpt-124m": gpt("124 M", 12, 768, 50304, 1024, 8),
        "gpt-350m": gpt("350 M", 24, 1024, 50304, 1024, 4),
    }


CLASSIC = ("ffn", "unet", "bert-base", "gpt-20m", "gpt-124m", "gpt-350m")


def classify(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of what ``model`` says."""
    return F.cross_entropy(model(x), y)


# -- three layers ----------------------------------------------------------------------------------------------------


def ffn(inputs: int, width: int, batch: int) -> Workload:
    """Return a feed-forward net of three layers for ten classes."""
    return Workload(
        title=f"FFN {inputs}-{width}-{width}-10, batch {batch}",
        unit="samples",
        items=batch,
        make=lambda: nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        ),
        batch=lambda: (torch.randn(batch, inputs), torch.randint(10, (batch,))),
        loss=classify,
    )


# -- UNet ------------------------------------------------------------------------------------------------------------


def double_conv(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    """Return convolution, norm, ReLU, twice."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        layers.append(nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(min(32, outputs), outputs))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al., 2015, with padding and a norm after each convolution; two classes per pixel."""

    def __init__(self, base: int, levels: int, norm: str) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(levels + 1)]
        self.first = double_conv(3, base, norm)
        self.pool = nn.MaxPool2d(2)
        steps = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(double_conv(few, many, norm) for few, many in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(many, few, 2, stride=2) for few, many in reversed(steps))
        self.merge = nn.ModuleList(double_conv(many, few, norm) for few, many in reversed(steps))
        self.last = nn.Conv2d(base, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> logits [N, 2, H, W]."""
        skipped = [self.first(x)]
        for down in self.down:
            skipped.append(down(self.pool(skipped[-1])))
        x = skipped.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((skipped.pop(), up(x)), dim=1))
        return self.last(x)


def unet(base: int, levels: int, size: int, batch: int, norm: str) -> Workload:
    """Return a UNet that halves the image ``levels`` times."""
    return Workload(
        title=f"UNet, {base} channels, {levels} levels, {norm.capitalize()}Norm, {batch}x3x{size}x{size}",
        unit="images",
        items=batch,
        make=lambda: UNet(base, levels, norm),
        batch=lambda: (torch.randn(batch, 3, size, size), torch.randint(2, (batch, size, size))),
        loss=classify,
    )


# -- BERT ------------------------------------------------------------------------------------------------------------


def bert(batch: int, length: int, **changes: Any) -> Workload:
    """Return BERT-base with a head for two classes, from ``transformers``, with random weights."""

    def make() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        return BertForSequenceClassification(BertConfig(**changes))

    return Workload(
        title=f"BERT-{'tiny' if changes else 'base'} fine-tuning, {batch}x{length} tokens",
        unit="tokens",
        items=batch * length,
        make=make,
        batch=lambda: (
            torch.randint(changes.get("vocab_size", 30522), (batch, length)),
            torch.randint(2, (batch,)),
        ),
        loss=lambda model, x, y: model(input_ids=x, labels=y).loss,
        needs="transformers",
    )


# -- GPT -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm: attention, then four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, C] -> [N, T, C]."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    """Radford et al., 2019: learned positions, a head tied to the embedding; returns its loss."""

    def __init__(self, layers: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, max(width // 64, 2)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Ids and targets [N, T] -> the mean cross entropy."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(size: str, layers: int, width: int, vocabulary: int, context: int, batch: int) -> Workload:
    """Return a GPT and a batch of whole contexts."""

    def tokens() -> Batch:
        text = torch.randint(vocabulary, (batch, context + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Workload(
        title=f"GPT {size}, {layers} layers x {width}, {batch}x{context} tokens",
        unit="tokens",
        items=batch * context,
        make=lambda: GPT(layers, width, vocabulary, context),
        batch=tokens,
        loss=lambda model, x, y: model(x, y),
    )
