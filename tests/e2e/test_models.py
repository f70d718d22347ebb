"""The real models on a real server. They answer as their sources, and eight fine-tunes take the memory of one backbone."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

import example_bundles
from examples import family, fno, unet
from examples.build import MODELS
from examples.resnet18 import hooks
from rsrv.hooks.text import as_text
from rsrv_bundle import load_weights, read_bundle
from rsrv_bundle.numerics import TOLERANCE
from tests.e2e.calls import PROTOCOLS, Array, caller
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.examples.sources import source
from tests.status import read_status

#: These tests check the examples. The exporters have quicker tests.
pytestmark = pytest.mark.long


def bytes_of(root: Path, names: Iterable[str]) -> tuple[int, int]:
    """Return the bytes of all weights of these bundles, and the bytes if each tensor is stored only once."""
    arrays = [array for name in names for array in load_weights(read_bundle(root / name, digest=False))]
    once = {(a.dtype.str, a.shape, hashlib.sha256(a.tobytes()).digest()): a.nbytes for a in arrays}
    return sum(array.nbytes for array in arrays), sum(once.values())


@pytest.fixture(scope="module")
def real_models() -> Path:
    """The folder of the real models. Some of them are trained first."""
    return example_bundles.ensure(MODELS)


@pytest.fixture(scope="module")
def server(real_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """Serve the real models. The budget has room for each of their tensors once."""
    folder = tmp_path_factory.mktemp("models")
    _, room = bytes_of(real_models, MODELS)
    sources = [real_models / name for name in MODELS]
    repository = make_repository(folder, *sources, settings=f"runtime: {{weight_budget_bytes: {room}}}")
    with running_triton(repository, folder / "server.log", expected=["weights_thrash"]) as running:
        yield running


def close(got: Array, want: Array, dtype: str = "f32") -> None:
    """Check that the largest error of an answer is within the tolerance that exports use."""
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * np.abs(want).max())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_files_become_the_classes_that_pytorch_finds(
    server: RunningTriton, real_models: Path, protocol: str
) -> None:
    """A request has PNG and JPEG files of different sizes. The answer has the classes that eager PyTorch finds."""
    rng = np.random.default_rng(3)
    files = []
    for kind, size in (("PNG", (150, 120)), ("JPEG", (96, 200)), ("PNG", (110, 110))):
        small = PIL.Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
        small.resize(size).save(file := io.BytesIO(), kind)
        files.append(file.getvalue())
    inputs = {"file": as_text(files)}
    want = hooks.postprocess(source(real_models, "resnet18")(hooks.preprocess(inputs)))

    with caller(server, protocol) as call:
        got = call("resnet18", inputs)

    assert (got["classes"] == want["classes"]).all()
    np.testing.assert_allclose(got["scores"], want["scores"], rtol=1e-3)


def test_images_become_the_logits_that_flax_finds(server: RunningTriton, real_models: Path) -> None:
    """Three images get Flax's logits, in one request and in separate requests."""
    image = np.random.default_rng(5).standard_normal((3, 64, 64, 3)).astype(np.float32)
    want = source(real_models, "vit_tiny")({"image": image})["logits"]
    with caller(server) as call:
        together = call("vit_tiny", {"image": image})["logits"]
        alone = [call("vit_tiny", {"image": row[None]})["logits"] for row in image]
    close(together, want)
    close(np.concatenate(alone), want)


def test_scenes_become_the_masks_that_equinox_finds(server: RunningTriton, real_models: Path) -> None:
    """A request with many scenes gets Equinox's masks. The masks are as good as in training."""
    known = unet.held_out()
    with caller(server) as call:
        logits = call("unet", {"image": known.images})["logits"]
    close(logits[:2], source(real_models, "unet")({"image": known.images[:2]})["logits"])
    assert unet.overlap(logits, known) >= unet.REQUIRED_OVERLAP


@pytest.mark.parametrize(("name", "dtype"), [("fno_f32", np.float32), ("fno_f64", np.float64)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_operator_stands_for_the_solver(
    server: RunningTriton, real_models: Path, protocol: str, name: str, dtype: type
) -> None:
    """The operator predicts the solver's final states for unseen initial states, in both precisions and on both grids."""
    unseen, expected = fno.held_out()
    for every in (2, 1):
        start: Array = unseen[:5, ::every].astype(dtype)
        with caller(server, protocol) as call:
            end = call(name, {"start": start})["end"]
        close(end, source(real_models, name)({"start": start})["end"], name[-3:])
        assert fno.mean_error(end, expected[:5, ::every]) < fno.REQUIRED_ERROR


def test_eight_fine_tunes_cost_one_backbone(server: RunningTriton, real_models: Path) -> None:
    """Eight fine-tunes are resident in the memory of one backbone. The status counts the bytes of shared tensors once."""
    with caller(server) as call:
        for name in family.TASKS:
            images, labels = family.held_out(name)
            got = call(name, {"image": images[:32]})["class"][:, 0]
            assert (got == labels[:32]).mean() > 0.8

    status = read_status(server.pid)
    models = [status["models"][name] for name in family.TASKS]
    assert {(model["weights"], model["evictions"]) for model in models} == {("resident", 0)}
    logical, physical = bytes_of(real_models, MODELS)
    for tier in (status["memory"], status["host"]):
        assert tier["logical_bytes"] == logical
        assert tier["physical_bytes"] <= physical
    # The last layers are small, so eight models of the family take little more memory than one.
    logical, physical = bytes_of(real_models, family.TASKS)
    assert physical < logical / 6
