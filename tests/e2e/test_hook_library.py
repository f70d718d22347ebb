"""The hooks library in the stubs of a real server. The hooks read files that clients send."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from rsrv.hooks.text import as_text, from_text
from rsrv_bundle.export import export_bundle
from tests.e2e.calls import PROTOCOLS, Array, Caller, at_once, caller, refusal
from tests.e2e.harness import StartTriton, make_repository

pytestmark = pytest.mark.long

COLOURS = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200)}
KINDS = ("JPEG", "PNG", "WEBP")
HOOKS = """
from pathlib import Path

from rsrv.hooks import image, labels

NAMES = labels.read_names(Path(__file__).with_name("names.txt"), width=8)


def preprocess(inputs):
    pixels = image.resize_crop(image.decode(inputs["file"]), 40, (32, 32))
    return {"image": image.normalise(pixels, image.IMAGENET_MEAN, image.IMAGENET_STD)}


def postprocess(outputs):
    scores, classes = labels.top_k(labels.softmax(outputs["logits"]), 2)
    return {"score": scores, "name": NAMES[classes]}
"""


def write_colours(out_dir: Path) -> None:
    """Write a model that maps picture files to the names of the two best of three colours."""
    export_bundle(
        lambda params, image: {"logits": image.mean((2, 3))},
        {},
        {"image": np.zeros((1, 3, 32, 32), np.float32)},
        batch_sizes=(1, 4),
        out_dir=out_dir,
        hooks=HOOKS,
        client_inputs=[{"name": "file", "dtype": "u8", "shape": "nt", "dims": {"t": -1}}],
        client_outputs=[
            {"name": "score", "dtype": "f32", "shape": "nk", "dims": {"k": 2}},
            {"name": "name", "dtype": "u8", "shape": "nkt", "dims": {"k": 2, "t": 8}},
        ],
    )
    (out_dir / "names.txt").write_text("\n".join(COLOURS))


def picture(colour: str, kind: str, size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    PIL.Image.new("RGB", size, COLOURS[colour]).save(stream, kind)
    return stream.getvalue()


def best(answer: dict[str, Array]) -> list[str]:
    assert (answer["score"][:, 0] > answer["score"][:, 1]).all()
    return from_text(answer["name"][:, 0])


def test_files_of_pictures_become_names(tmp_path: Path, start_triton: StartTriton) -> None:
    """Files of all kinds and sizes are classified: in one request, over both protocols, and from eight clients at the same time.

    A broken file is the client's fault, and the error names its row.
    """
    write_colours(tmp_path / "bundles" / "colours")
    server = start_triton(make_repository(tmp_path))
    sizes = ((50, 90), (640, 480), (41, 40))
    files = [picture(colour, kind, size) for colour, kind, size in zip(COLOURS, KINDS, sizes, strict=True)]

    for protocol in PROTOCOLS:
        with caller(server, protocol) as call:
            assert best(call("colours", {"file": as_text(files)})) == list(COLOURS)
            broken = as_text([files[0], files[1][:-50]])
            refused = refusal(lambda call=call, broken=broken: call("colours", {"file": broken}))  # type: ignore[misc]
            refused.assert_is("INVALID_ARG", protocol)
            assert "image 1 is damaged" in refused.message

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(20):
            colours = [str(each) for each in rng.choice(list(COLOURS), rng.integers(1, 5))]
            sent = [
                picture(
                    colour, str(rng.choice(KINDS)), (int(rng.integers(40, 99)), int(rng.integers(40, 99)))
                )
                for colour in colours
            ]
            assert best(call("colours", {"file": as_text(sent)})) == colours

    at_once(server, 8, work)
