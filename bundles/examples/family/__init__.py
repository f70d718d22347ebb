"""family_*: eight questions about a handwritten digit. Each has a separate last layer on the network of `digits`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import digits, digits_hooks
from rsrv_bundle.export import export_bundle

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 8, 32)
#: Each bundle's question: the class of each digit from 0 to 9.
TASKS: Mapping[str, tuple[int, ...]] = {
    "family_half": (0, 0, 1, 1, 2, 2, 3, 3, 4, 4),
    "family_large": (0, 0, 0, 0, 0, 1, 1, 1, 1, 1),
    "family_loop": (1, 0, 0, 0, 0, 0, 1, 0, 1, 1),
    "family_odd": (0, 1, 0, 1, 0, 1, 0, 1, 0, 1),
    "family_prime": (0, 0, 1, 1, 0, 1, 0, 1, 0, 0),
    "family_rest": (0, 1, 2, 0, 1, 2, 0, 1, 2, 0),
    "family_square": (1, 1, 0, 0, 1, 0, 0, 0, 0, 1),
    "family_zero": (1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
}
#: Share of the held-out images that each bundle must get right.
REQUIRED_ACCURACY = 0.92

_BACKBONE = ("conv1", "conv2", "dense1")


def apply(params: Any, image: jax.Array) -> dict[str, jax.Array]:
    """image: [n, 8, 8, 1] -> logits: [n, classes]."""
    return {"logits": digits.features(params, image) @ params["head"]["kernel"] + params["head"]["bias"]}


@functools.cache
def trained() -> dict[str, Any]:
    """Return the parameters of each bundle by its name.

    The layers of the backbone are the same arrays for all bundles. Only `head` differs.
    """
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    images, labels, _, _ = digits.data()
    backbone = {layer: digits.trained()[layer] for layer in _BACKBONE}
    features = np.asarray(digits.features(backbone, jnp.asarray(images)))

    def head(classes: Array) -> dict[str, Array]:
        # With two classes, scikit-learn has a row only for the second class. Add the logit 0 for the first class.
        fitted = LogisticRegression(max_iter=2000).fit(features, classes)
        kernel, bias = fitted.coef_.T, fitted.intercept_
        if len(bias) == 1:
            kernel, bias = np.pad(kernel, ((0, 0), (1, 0))), np.pad(bias, (1, 0))
        return {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}

    # Use one thread. Each step is so small that a second thread does not help. If the cores are busy, the first thread waits for the
    # second one (14 s instead of 1 s).
    with threadpool_limits(1):
        return {name: {**backbone, "head": head(np.asarray(task)[labels])} for name, task in TASKS.items()}


def held_out(name: str) -> tuple[Array, Array]:
    """Return images that were not used for training, f32 [n, 8, 8, 1], and the bundle's right answers to them, i64 [n]."""
    images, labels = digits.held_out()
    return images, np.asarray(TASKS[name])[labels]


def reference(inputs: Mapping[str, Array], params: Any) -> dict[str, Array]:
    """image: f32 [n, 8, 8, 1] -> logits: f32 [n, classes]. `params` are the parameters of one bundle."""
    return {"logits": np.asarray(apply(params, jnp.asarray(inputs["image"]))["logits"])}


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, one of `TASKS`, replacing an existing one. RuntimeError if training went badly."""
    name = out_dir.name
    images, labels = held_out(name)
    accuracy = float((reference({"image": images}, trained()[name])["logits"].argmax(1) == labels).mean())
    print(f"{name}: {accuracy:.1%} of {len(labels)} held-out images are right", flush=True)
    if accuracy < REQUIRED_ACCURACY:
        raise RuntimeError(f"accuracy {accuracy:.1%} is below {REQUIRED_ACCURACY:.0%}")
    export_bundle(
        apply,
        trained()[name],
        {"image": images[:1]},
        batch_sizes=BATCH_SIZES,
        axes={"image": "nhwc"},
        out_dir=out_dir,
        hooks=Path(digits_hooks.__file__),
        client_outputs=digits.CLIENT_OUTPUTS,
        description=f"Handwritten digits, 8 x 8 pixels from 0 to 1: their class, for 0 to 9 {TASKS[name]}.",
        overwrite=True,
    )
