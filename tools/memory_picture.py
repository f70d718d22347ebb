"""Draw docs/images/memory.svg: the memory of 40 fine-tunes in two backends of Triton and in rsrv.

    python tools/memory_picture.py     # rewrites the picture

The memory of processes is the measured memory of one model, from docs/benchmark.md and docs/onnx.md, times 40. The memory of the
card is computed and not measured. The picture has colours for light mode and for dark mode.
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGE = DOCS / "images" / "memory.svg"

MODELS = 40
#: Bytes of the weights that fine-tunes of the example `resnet18` share.
SHARED = 44.8e6
#: Bytes of the last layer, which each fine-tune has separately.
OWN = 2e6
#: Bytes of the CUDA context of tritonserver on an H100 (docs/benchmark.md). The contexts of other processes were not measured.
CONTEXT = 0.6e9

PYTHON_BACKEND, ONNX_BACKEND = "Python backend", "ONNX Runtime backend"

#: Parts of a bar: the class of its colour and its bytes.
Bar = list[tuple[str, float]]

WIDTH, LEFT, RIGHT, BAR, STEP = 640, 190, 565, 26, 40
STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --grey: #59636e; --context: #8c959f; --weights: #0072b2; --process: #e69f00 }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #151b23; --ink: #f0f6fc; --grey: #9198a1; --context: #656c76; --weights: #56b4e9; --process: #e69f00 }
  }
  .paper { fill: var(--paper) } .context { fill: var(--context) } .weights { fill: var(--weights) } .process { fill: var(--process) }
  text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink) }
  .title { font-weight: 600 } .note { font-size: 12.5px; fill: var(--grey) }
"""


#: The page and the sentence with the measured memory of an added model: in the Python backend, with the Python front, with the native
#: front; and in the ONNX Runtime backend.
MEASURED = (
    (
        "benchmark.md",
        r"Each further model takes ([\d.]+) MB of memory \(USS\) if it is a plain model, ([\d.]+) MB with the Python front, and ([\d.]+) MB",
    ),
    ("onnx.md", r"A further MLP takes ([\d.]+) MB of memory \(USS\) in the ONNX Runtime backend"),
)


def process_bytes() -> tuple[float, ...]:
    """Return the measured bytes that an added model takes in processes, in the order of MEASURED."""
    numbers: list[float] = []
    for name, sentence in MEASURED:
        match = re.search(sentence, " ".join((DOCS / name).read_text(encoding="utf-8").split()))
        assert match is not None, f"docs/{name} has no sentence about the memory of an added model"
        numbers += (float(number) * 1e6 for number in match.groups())
    return tuple(numbers)


def panels() -> list[tuple[str, str, dict[str, Bar]]]:
    """Return the two halves of the picture: title, note, and bars by name.

    tritonserver has a CUDA context of its own. The ONNX Runtime backend uses this context. Each process of the Python backend, and
    the runtime of rsrv, have another one. Activations are left out.
    """
    plain, python, native, onnxruntime = process_bytes()
    weights = SHARED + MODELS * OWN
    card: dict[str, Bar] = {
        PYTHON_BACKEND: [("context", (1 + MODELS) * CONTEXT), ("weights", MODELS * (SHARED + OWN))],
        ONNX_BACKEND: [("context", CONTEXT), ("weights", MODELS * (SHARED + OWN))],
        "rsrv": [("context", 2 * CONTEXT), ("weights", weights)],
    }
    host: dict[str, Bar] = {
        PYTHON_BACKEND: [("process", MODELS * plain)],
        ONNX_BACKEND: [("process", MODELS * onnxruntime)],
        "rsrv, Python front": [("process", MODELS * python), ("weights", weights)],
        "rsrv, native front": [("process", MODELS * native), ("weights", weights)],
    }
    return [
        (
            "GPU memory: arithmetic",
            "weights, and a context of 0.6 GB for tritonserver and for each process that computes",
            card,
        ),
        (
            "Host memory: measured for one added tiny model, times 40",
            "with rsrv's copy of the weights, without the processes that a server has once (0.3 GB)",
            host,
        ),
    ]


def size(number: float) -> str:
    """Return bytes as text, such as 26.5 GB or 40 MB."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.0f} MB"


def draw() -> str:
    """Return the picture as SVG."""
    title = f"{MODELS} fine-tunes of a ResNet-18: 46.8 MB each, 44.8 MB of it shared"
    lines = [f'<text class="title" x="20" y="32" style="font-size: 16px">{title}</text>']
    x = 20
    for name, label in (("context", "CUDA contexts"), ("weights", "weights"), ("process", "processes")):
        lines.append(f'<rect class="{name}" x="{x}" y="46" width="12" height="12" rx="2"/>')
        lines.append(f'<text class="note" x="{x + 18}" y="57">{label}</text>')
        x += 120
    y = 92
    for title, note, bars in panels():
        lines.append(f'<text class="title" x="20" y="{y}">{title}</text>')
        lines.append(f'<text class="note" x="20" y="{y + 18}">{note}</text>')
        y += 32
        scale = (RIGHT - LEFT) / max(sum(part for _, part in bar) for bar in bars.values())
        for name, bar in bars.items():
            left = float(LEFT)
            for colour, part in bar:
                width = part * scale
                lines.append(
                    f'<rect class="{colour}" x="{left:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{BAR}"/>'
                )
                left += width
            lines.append(f'<text x="{LEFT - 12}" y="{y + 18}" text-anchor="end">{name}</text>')
            lines.append(f'<text x="{left + 8:.1f}" y="{y + 18}">{size(sum(part for _, part in bar))}</text>')
            y += STEP
        y += 28
    height = y - 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
            f'<title id="title">Memory of {MODELS} fine-tunes: {summary()}</title>',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def summary() -> str:
    """Return the figures of the picture in words, for readers who cannot see it."""
    return "; ".join(
        f"{title}: " + ", ".join(f"{name} {size(sum(part for _, part in bar))}" for name, bar in bars.items())
        for title, _, bars in panels()
    )


if __name__ == "__main__":
    IMAGE.write_text(draw(), encoding="utf-8")
