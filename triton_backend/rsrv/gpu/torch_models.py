"""The networks of part `models` in PyTorch. This program executes them without a server.

    python torch_models.py cuda|cpu

The program prints a line when PyTorch has the device. For each input line `MODEL eager|compiled ROWS SECONDS` it prints the
executions per second and the median duration in seconds. The networks have the architectures of bundles/examples and random
weights, because the time does not depend on the weights' values.
"""

import sys
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

#: Number of executions before the measured executions.
_WARM = 3


class _Residual(nn.Module):
    """Two convolutions of ResNet-18, and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.main(x) + self.shortcut(x))


def _resnet18() -> nn.Module:
    blocks = [
        block
        for channels, out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        for block in (_Residual(channels, out, stride), _Residual(out, out, 1))
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    )


class _ViT(nn.Module):
    """ViT-Ti for images of 64 x 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 8, stride=8)
        self.mark, self.places = nn.Parameter(torch.randn(1, 1, 192)), nn.Parameter(torch.randn(1, 65, 192))
        layer = nn.TransformerEncoderLayer(
            192, 3, 4 * 192, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 12, nn.LayerNorm(192), enable_nested_tensor=False)
        self.head = nn.Linear(192, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        x = torch.cat([self.mark.expand(len(x), -1, -1), x], dim=1) + self.places
        logits: Tensor = self.head(self.blocks(x)[:, 0])
        return logits


class _MiniLM(nn.Module):
    """The encoder of all-MiniLM-L6-v2."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30522, 384), nn.Parameter(torch.randn(1, 512, 384))
        self.norm = nn.LayerNorm(384)
        layer = nn.TransformerEncoderLayer(384, 12, 1536, dropout=0.0, activation="gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places[:, : ids.shape[1]])
        hidden: Tensor = self.blocks(x, src_key_padding_mask=mask == 0)
        return hidden


_NETWORKS = {"resnet18": _resnet18, "vit_tiny": _ViT, "minilm_encoder": _MiniLM}


def _inputs(name: str, rows: int) -> list[Tensor]:
    match name:
        case "resnet18":
            return [torch.randn(rows, 3, 96, 96)]
        case "vit_tiny":
            return [torch.randn(rows, 64, 64, 3)]
        case _:
            shape = (rows, 128)
            return [torch.randint(1000, 30000, shape), torch.ones(shape, dtype=torch.int64)]


def _measure(network: Any, inputs: list[Tensor], device: str, seconds: float) -> tuple[float, float]:
    """Return executions per second and the median of their seconds, with the copies to the device and back."""

    def execute() -> float:
        started = time.perf_counter()
        network(*(tensor.to(device) for tensor in inputs)).cpu()
        return time.perf_counter() - started

    for _ in range(_WARM):
        execute()
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not took:
        took.append(execute())
    return len(took) / sum(took), median(took)


def main(device: str) -> None:
    """Measure the network that each line of the input names, and print the results."""
    if device == "cuda":
        torch.zeros(1, device=device)
    # Use TF32 if the card has it, as XLA does by default.
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    print(torch.__version__, flush=True)
    networks: dict[tuple[str, str], Any] = {}
    with torch.inference_mode():
        for line in sys.stdin:
            name, how, rows, seconds = line.split()
            if (name, how) not in networks:
                network = networks.get((name, "eager")) or _NETWORKS[name]().eval().to(device)
                networks[name, how] = network if how == "eager" else torch.compile(network, dynamic=False)
            inputs = _inputs(name, int(rows))
            print(*_measure(networks[name, how], inputs, device, float(seconds)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
