"""detector: a meta model that finds squares, discs and triangles with detector_backbone and detector_head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples import detector_run
from examples.detector_networks import backbone, head
from examples.detector_run import MOST_FOUND
from examples.detector_scenes import SIDE, Scenes, recall_and_precision, scenes
from examples.detector_training import trained
from rsrv_bundle.meta import write_meta_bundle

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Model = Callable[[Arrays], Arrays]

#: Minimum share of the shapes that a trained detector must find.
REQUIRED_RECALL = 0.94
#: Minimum share of the reported shapes that must be right.
REQUIRED_PRECISION = 0.9


class Direct:
    """Stands for the `call` that a server passes to a meta model. It calls Python functions in place of models.

    `models` maps the models' names to the functions. `calls` lists the model's name and the number of rows of each call so far.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.models = models
        self.calls: list[tuple[str, int]] = []

    def __call__(self, name: str, inputs: Arrays) -> Arrays:
        self.calls.append((name, len(next(iter(inputs.values())))))
        return self.models[name](inputs)

    def many(self, calls: Iterable[tuple[str, Arrays]]) -> list[Arrays]:
        return [self(name, inputs) for name, inputs in calls]

    def scratch(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype)


def held_out() -> Scenes:
    """Return 200 images that the networks have not seen."""
    return scenes(200, seed=0)


def reference(inputs: Arrays) -> Arrays:
    """Return the bundle's results, from the networks in this process. Trains first, once per process."""
    params = trained()
    networks = jax.jit(backbone), jax.jit(head)
    models: dict[str, Model] = {
        "detector_backbone": lambda inputs: _arrays(networks[0](params["backbone"], inputs["image"])),
        "detector_head": lambda inputs: _arrays(networks[1](params["head"], inputs["crops"])),
    }
    return detector_run.run(inputs, Direct(models))


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one. RuntimeError if training went badly."""
    unseen = held_out()
    recall, precision = recall_and_precision(unseen, reference({"image": unseen.images}))
    count = int((unseen.classes >= 0).sum())
    print(f"detector: finds {recall:.1%} of {count} held-out shapes, {precision:.1%} of its finds are right")
    if recall < REQUIRED_RECALL or precision < REQUIRED_PRECISION:
        raise RuntimeError(f"must find {REQUIRED_RECALL:.0%}, and {REQUIRED_PRECISION:.0%} must be right")
    write_meta_bundle(
        Path(detector_run.__file__),
        calls=["detector_backbone", "detector_head"],
        client_inputs=[
            {"name": "image", "dtype": "u8", "shape": "nhwc", "dims": {"h": SIDE, "w": SIDE, "c": 3}}
        ],
        client_outputs=[
            {"name": "boxes", "dtype": "f32", "shape": "nkd", "dims": {"k": MOST_FOUND, "d": 4}},
            {"name": "scores", "dtype": "f32", "shape": "nk", "dims": {"k": MOST_FOUND}},
            {"name": "classes", "dtype": "i64", "shape": "nk", "dims": {"k": MOST_FOUND}},
            {"name": "count", "dtype": "i64", "shape": "nk", "dims": {"k": 1}},
        ],
        out_dir=out_dir,
        description="Squares, discs and triangles in an image, by two networks with numpy between them.",
        overwrite=True,
    )


def _arrays(results: Mapping[str, Any]) -> Arrays:
    return {name: np.asarray(value) for name, value in results.items()}
