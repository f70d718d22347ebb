"""ResNet-18 (K. He et al., arXiv:1512.03385) in plain PyTorch, with torchvision's names of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

CLASSES = 1000


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x)
        x = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet18(nn.Module):
    """image: f32 [n, 3, h, w], normalised -> logits: f32 [n, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.fc = nn.Linear(512, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(image)))
        x = nn.functional.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def network(state_dict: Mapping[str, Tensor] | None = None) -> ResNet18:
    """Return the network in evaluation mode with these weights, or with random ones that are the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = ResNet18()
        if state_dict is None:
            _settle(made)
    if state_dict is not None:
        made.load_state_dict(state_dict)
    return made.eval()


def _settle(made: ResNet18) -> None:
    """Set the weights of the convolutions, and run random noise through the network to set the normalisations' statistics.

    With the initial statistics, the normalisations would change nothing, so no test would notice an error in them.
    """
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        made(torch.randn(16, 3, 64, 64))
