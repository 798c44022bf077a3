# SPDX-License-Identifier: Apache-2.0
"""The models of the zoo in PyTorch's own layers, under the names of their published weights.

They need torch, which the suite doesn't: make_data.py runs them and stores what they give.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F


def conv(before: int, after: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride, padding=(size - 1) // 2, groups=groups, bias=False)


class Residual(nn.Module):
    """A block of a ResNet: convolutions of ``sizes`` with ``widths`` after each, and the projection it may need."""

    def __init__(self, before: int, widths: list[int], sizes: list[int], stride: int, groups: int = 1):
        super().__init__()
        self.count = len(sizes)
        into = [before, *widths]
        for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
            strided = size == 3 and not any(s == 3 for s in sizes[:i])  # the stride is on the first 3x3
            middle = groups if len(sizes) == 3 and i == 1 else 1
            setattr(self, f"conv{i + 1}", conv(into[i], width, size, stride if strided else 1, middle))
            setattr(self, f"bn{i + 1}", nn.BatchNorm2d(width))
        self.downsample = None
        if stride != 1 or before != widths[-1]:
            self.downsample = nn.Sequential(conv(before, widths[-1], 1, stride), nn.BatchNorm2d(widths[-1]))

    def forward(self, x: Any) -> Any:
        h = x
        for i in range(1, self.count + 1):
            h = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(h))
            h = F.relu(h) if i < self.count else h
        return F.relu(h + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(
        self,
        depths: tuple[int, ...],
        block: str,
        num_classes: int,
        in_channels: int = 3,
        width: int = 64,
        groups: int = 1,
        base_width: int = 64,
    ):
        super().__init__()
        self.conv1, self.bn1 = conv(in_channels, width, 7, 2), nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = width
        for stage, depth in enumerate(depths):
            planes, blocks = width * 2**stage, []
            inner = int(planes * (base_width / 64.0)) * groups
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                if block == "basic":
                    blocks.append(Residual(before, [planes, planes], [3, 3], stride))
                else:
                    blocks.append(Residual(before, [inner, inner, 4 * planes], [1, 3, 1], stride, groups))
                before = planes if block == "basic" else 4 * planes
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(before, num_classes)

    def forward(self, x: Any) -> Any:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Wide(nn.Module):
    """A block of a WideResNet."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(before), conv(before, after, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(after), conv(after, after, 3)
        self.convShortcut = None if before == after else conv(before, after, 1, stride)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.bn1(x))
        y = self.conv2(F.relu(self.bn2(self.conv1(h))))
        return y + (x if self.convShortcut is None else self.convShortcut(h))


class Stage(nn.Module):
    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class WideResNet(nn.Module):
    def __init__(self, depth: int, width: int, num_classes: int, in_channels: int = 3, base_width: int = 16):
        super().__init__()
        self.conv1 = conv(in_channels, base_width, 3)
        before = base_width
        for stage in range(3):
            after, blocks = base_width * width * 2**stage, []
            for i in range((depth - 4) // 6):
                blocks.append(Wide(before, after, 2 if stage > 0 and i == 0 else 1))
                before = after
            setattr(self, f"block{stage + 1}", Stage(blocks))
        self.bn1, self.fc = nn.BatchNorm2d(before), nn.Linear(before, num_classes)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.bn1(self.block3(self.block2(self.block1(self.conv1(x))))))
        return self.fc(F.avg_pool2d(h, h.shape[-1]).flatten(1))


class ConvNet(nn.Module):
    def __init__(self, channels: tuple[int, ...], num_classes: int, in_channels: int = 3):
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((in_channels, *channels), channels, strict=False):
            layers += [conv(before, after, 3), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.features, self.classifier = nn.Sequential(*layers), nn.Linear(channels[-1], num_classes)

    def forward(self, x: Any) -> Any:
        return self.classifier(self.features(x).mean((2, 3)))


class CharRNN(nn.Module):
    def __init__(
        self, vocab_size: int, hidden_size: int, num_layers: int, cell: str = "lstm", tie_weights: bool = False
    ):
        super().__init__()
        self.encoder = nn.Embedding(vocab_size, hidden_size)
        self.rnn = getattr(nn, cell.upper())(hidden_size, hidden_size, num_layers, batch_first=True)
        self.decoder = nn.Linear(hidden_size, vocab_size)
        if tie_weights:
            self.decoder.weight = self.encoder.weight

    def forward(self, ids: Any) -> Any:
        return self.decoder(self.rnn(self.encoder(ids))[0])
