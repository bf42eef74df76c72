"""Convolutional nets in the manner of torchvision and of diffusion models, small enough for a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.down = None
        if stride != 1 or inside != outside:
            self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """A classifier of images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.fc(self.avgpool(self.blocks(self.stem(x))).flatten(1)), labels)


class Residual(nn.Module):
    """GroupNorm, SiLU, convolution, twice, with the time between."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inside), nn.Conv2d(inside, outside, 3, 1, 1)
        self.time = nn.Linear(time, outside)
        self.norm2, self.conv2 = nn.GroupNorm(4, outside), nn.Conv2d(outside, outside, 3, 1, 1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(out)))


class Attention(nn.Module):
    """Attention over pixels, by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(4, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).chunk(3, 1)
        weights = (q.transpose(1, 2) @ k / math.sqrt(x.shape[1])).softmax(-1)
        return x + self.out((v @ weights.transpose(1, 2)).view_as(x))


class UNet(nn.Module):
    """Predicts the noise in an image at a timestep, and computes its own loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.down = Residual(width, 2 * width, 32)
        self.middle = nn.ModuleList([Residual(2 * width, 2 * width, 32), Attention(2 * width)])
        self.up = Residual(3 * width, width, 32)
        self.leave = nn.Conv2d(width, 3, 3, 1, 1)
        self.seen = torch.empty(0)

    def forward(self, x: Tensor, timesteps: Tensor, target: Tensor) -> Tensor:
        self.seen = timesteps
        frequencies = torch.exp(-torch.arange(8, device=x.device) * 0.5)
        angles = timesteps.float()[:, None] * frequencies
        time = self.embed(torch.cat([angles.sin(), angles.cos()], -1))
        first = self.enter(x)
        out = self.down(F.avg_pool2d(first, 2), time)
        out = self.middle[1](self.middle[0](out, time))
        out = self.up(torch.cat([F.interpolate(out, scale_factor=2), first], 1), time)
        return F.mse_loss(self.leave(out), target)
