"""The pictures of docs/gallery.md: answers of example models, from one server.

python -m tests.e2e.gallery docs/images      # makes the pictures
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import example_bundles
import native_front
from examples.build import DETECTOR, MINILM
from examples.detector_scenes import CLASSES, SIDE, scenes
from examples.forecast import series
from examples.glossary import definitions
from rsrv.sim.plots import save
from tests.e2e.bundles import with_sizes
from tests.e2e.calls import Array, Caller, caller
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.stateful import Stream

SENTENCES = (
    "A cat sleeps on the sofa.",
    "The kitten is napping.",
    "My dog barks at the postman.",
    "The bank raised its interest rate.",
    "Loans became more expensive.",
    "Stock prices fell on Monday.",
    "It will rain tomorrow.",
    "Take an umbrella with you.",
)
TERMS = ("Licensor", "License", "Contributor")
#: Colours of classes and of terms. Colour-blind readers can distinguish them.
COLOURS = ("#0072B2", "#E69F00", "#009E73")
#: Number of sentences in a request. It is the only compiled batch size of the encoder here.
ROWS = 4
#: Number of values of the series in the picture.
STEPS = 96


def figure(width: float, height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure, whose size is in inches, and its axes row by row."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    axes = np.atleast_1d(made.subplots(rows, columns, **options)).reshape(-1)
    return made, list(axes)


def bare(axes: Axes, image: Array, **options: Any) -> None:
    """Show an image without ticks."""
    axes.imshow(image, interpolation="nearest", **options)
    axes.set_xticks([])
    axes.set_yticks([])


def boxes(server: RunningTriton, call: Caller) -> Figure:
    """Draw scenes with the shapes that the detector finds."""
    images = scenes(4, seed=12, fewest=3).images
    answer = call("detector", {"image": images})
    made, axes = figure(9, 2.5, 1, 4)
    for row, image in enumerate(images):
        bare(axes[row], image)
        for index in range(answer["count"][row, 0]):
            left, top, right, bottom = answer["boxes"][row, index]
            kind = answer["classes"][row, index]
            axes[row].add_patch(
                Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="white", linewidth=2)
            )
            axes[row].text(
                left,
                max(top - 2, 5),
                f"{CLASSES[kind]} {answer['scores'][row, index]:.2f}",
                color="white",
                fontsize=7,
                bbox={"facecolor": COLOURS[kind], "edgecolor": "none", "pad": 1},
            )
        axes[row].set_xlim(0, SIDE - 1)
        axes[row].set_ylim(SIDE - 1, 0)
    return made


def masks(server: RunningTriton, call: Caller) -> Figure:
    """Draw scenes, and the pixels at which the U-Net sees a shape."""
    images = scenes(4, seed=0).images
    predicted = call("unet", {"image": images})["logits"] > 0
    made, axes = figure(9, 4.6, 2, 4)
    for row, image in enumerate(images):
        bare(axes[row], image)
        bare(axes[4 + row], predicted[row], cmap="gray")
    axes[0].set_ylabel("picture")
    axes[4].set_ylabel("mask")
    return made


def embeddings(server: RunningTriton, call: Caller) -> Figure:
    """Draw the cosine similarities of sentences."""
    texts = np.array([[text.encode()] for text in SENTENCES], object)
    answers = [call("minilm", {"text": texts[start : start + ROWS]}) for start in range(0, len(texts), ROWS)]
    vectors = np.concatenate([answer["embedding"] for answer in answers])
    likeness = vectors @ vectors.T
    made, (axes,) = figure(8, 4.6, 1, 1)
    axes.imshow(likeness, cmap="cividis", vmin=0, vmax=1)
    axes.set_yticks(range(len(SENTENCES)), SENTENCES)
    axes.set_xticks(range(len(SENTENCES)), [str(number + 1) for number in range(len(SENTENCES))])
    for (row, column), value in np.ndenumerate(likeness):
        colour = "black" if value > 0.6 else "white"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    return made


def texts(server: RunningTriton, call: Caller) -> Figure:
    """Ask for three texts at the same time, and draw when each piece of a text arrives."""
    begin = time.monotonic()

    def listen(term: str) -> list[tuple[float, str]]:
        with Stream(server, "glossary", text_input=term, max_tokens=120) as stream:
            return [(time.monotonic() - begin, piece["text_output"]) for piece in stream]

    with ThreadPoolExecutor(len(TERMS)) as pool:
        answers = list(pool.map(listen, TERMS))
    made, (axes,) = figure(9, 2.2, 1, 1)
    for row, (term, answer) in enumerate(zip(TERMS, answers, strict=True)):
        axes.plot(
            [at * 1000 for at, _ in answer], [row] * len(answer), "|", color=COLOURS[row], markersize=14
        )
        text = "".join(piece for _, piece in answer)
        assert definitions()[term].startswith(text)
        axes.text(0, row - 0.3, f"{text[:100]}…", fontsize=8)
    axes.set_yticks(range(len(TERMS)), TERMS)
    axes.set_ylim(len(TERMS) - 0.5, -0.6)
    axes.set_xlabel("ms since the requests; each mark is a piece of text that comes")
    return made


def forecasts(server: RunningTriton, call: Caller) -> Figure:
    """Draw a series, and the forecast of each next value. A request has one value."""
    values = series(1, STEPS)[0]
    predicted = []
    for step, value in enumerate(values):
        answer = call(
            "forecast",
            {"value": np.full((1, 1), value, np.float32)},
            sequence_id=1,
            sequence_start=step == 0,
            sequence_end=step == len(values) - 1,
        )
        predicted.append(answer["forecast"][0, 0])
    made, (axes,) = figure(9, 2.6, 1, 1)
    axes.plot(values, color="#333333", linewidth=1.2, label="values that clients send")
    axes.plot(
        range(1, STEPS + 1),
        predicted,
        "o",
        color=COLOURS[1],
        markersize=3,
        label="forecast before each value",
    )
    axes.set_xlabel("request")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=8)
    return made


PICTURES: dict[str, Callable[[RunningTriton, Caller], Figure]] = {
    "gallery-boxes.png": boxes,
    "gallery-masks.png": masks,
    "gallery-embeddings.png": embeddings,
    "gallery-texts.png": texts,
    "gallery-forecasts.png": forecasts,
}


def main(out: Path) -> None:
    names = (*DETECTOR, *MINILM, "unet", "glossary", "forecast")
    native_front.ensure()
    built = example_bundles.ensure(names)
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        folder = Path(made)
        # Compiling all twelve modules of the encoder would take most of the server's start.
        fewer = {name: with_sizes(built / name, folder / name, [ROWS]) for name in MINILM[1:]}
        repository = make_repository(folder, *(fewer.get(name, built / name) for name in names))
        with running_triton(repository, folder / "server.log", timeout=600) as server, caller(server) as call:
            for name, draw in PICTURES.items():
                print(save(draw(server, call), out / name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
