"""The real models without a server. They are compared with their sources, and with the task for which they were trained."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import example_bundles
import examples.build
from examples import family, fno
from examples.build import MODELS
from examples.fno.burgers import POINTS, TIME, VISCOSITY, solve, starts
from examples.resnet18.network import network
from rsrv_bundle import load_weights, read_bundle
from rsrv_bundle.numerics import TOLERANCE, difference
from tests.bench.real.cases import CASES
from tests.bench.real.twins import TWINS, weights_of
from tests.examples.built import Model
from tests.examples.sources import source

#: These tests check the examples. The exporters have quicker tests.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def root() -> Path:
    """Return the built examples."""
    return example_bundles.ensure(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_computes_what_its_source_computes(root: Path, name: str) -> None:
    """Three rows of random numbers, which are padded, get the answers of the model's source."""
    model = Model(root / name)
    (spec,) = model.bundle.manifest.inputs
    shape = model.bundle.input_shape(0, 0, 8)[1:]
    rng = np.random.default_rng(4)
    inputs = {
        spec.name: rng.integers(0, 256, (3, *shape), np.uint8)
        if spec.dtype == "u8"
        else rng.standard_normal((3, *shape)).astype({"f32": np.float32, "f64": np.float64}[spec.dtype])
    }
    got, want = model(inputs), source(root, name)(inputs)
    assert got.keys() == want.keys()
    for output in got:
        assert got[output].dtype == want[output].dtype
        _, relative = difference(got[output], want[output])
        assert relative <= TOLERANCE[spec.dtype if spec.dtype != "u8" else "f32"]


@pytest.mark.parametrize("name", ["fno_f32", "fno_f64", "unet", "family_rest", "family_zero"])
def test_a_model_rewritten_in_pytorch_answers_alike(root: Path, name: str) -> None:
    """A model that is rewritten in PyTorch gets its weights by their names. It gives the same answers as the bundle."""
    inputs = CASES.get(name, CASES["family_half"]).inputs(8)
    (batch,) = inputs.values()
    (got,) = Model(root / name)(inputs).values()
    want = TWINS[name.partition("_")[0]](weights_of(root / name), torch.from_numpy(batch)).numpy()
    _, relative = difference(got, want)
    assert relative <= TOLERANCE["f64" if batch.dtype == np.float64 else "f32"]


def test_the_solver_agrees_with_the_exact_solution() -> None:
    """The solver agrees with the exact solution of Cole and Hopf: -2 v (log w)_x.

    In this formula, v is the viscosity, and w solves the heat equation with the initial state exp(-(integral of u) / 2 v).
    """
    start = starts(5, seed=7)
    wave = np.arange(POINTS // 2 + 1)
    spectrum = np.fft.rfft(start, axis=1)
    spectrum[:, 1:] /= 1j * wave[1:]
    heat = np.fft.rfft(np.exp(-np.fft.irfft(spectrum, axis=1) / (2 * VISCOSITY)), axis=1)
    heat *= np.exp(-VISCOSITY * wave**2 * TIME)
    exact = -2 * VISCOSITY * np.fft.irfft(1j * wave * heat, axis=1) / np.fft.irfft(heat, axis=1)
    np.testing.assert_allclose(solve(start), exact, atol=1e-3)


def test_the_operator_knows_burgers_equation_in_both_precisions(root: Path) -> None:
    """The operator predicts final states for unseen initial states in both precisions.

    It does so on the grid of its training and on a grid that is twice as fine.
    """
    unseen, expected = fno.held_out()
    single, double = Model(root / "fno_f32"), Model(root / "fno_f64")
    for every in (2, 1):
        start = np.ascontiguousarray(unseen[:32, ::every])
        in_double = double({"start": start})["end"]
        in_single = single({"start": start.astype(np.float32)})["end"]
        assert fno.mean_error(in_double, expected[:32, ::every]) < fno.REQUIRED_ERROR
        # The precisions differ only by the rounding of 32 bits.
        np.testing.assert_allclose(in_single, in_double, atol=1e-4)
        assert (in_single != in_double).any()


def test_the_family_differs_in_its_last_layer_only(root: Path) -> None:
    """In all eight bundles, all tensors except those of the last layer have the same bytes."""
    hashes: dict[str, set[str]] = {}
    for name in family.TASKS:
        bundle = read_bundle(root / name, digest=False)
        for weight, array in zip(bundle.weights, load_weights(bundle), strict=True):
            hashes.setdefault(weight.name, set()).add(hashlib.sha256(array.tobytes()).hexdigest())
    several = {name for name, digests in hashes.items() if len(digests) > 1}
    assert several == {"head/bias", "head/kernel"}
    assert all(len(hashes[name]) == len(family.TASKS) for name in several)


@pytest.mark.parametrize("name", family.TASKS)
def test_each_of_the_family_answers_its_question(root: Path, name: str) -> None:
    """Each model of the family answers its question about unseen images."""
    images, labels = family.held_out(name)
    model = Model(root / name)
    got = np.concatenate([model({"image": images[at : at + 32]})["logits"] for at in range(0, 360, 32)])
    assert (got.argmax(1) == labels).mean() >= family.REQUIRED_ACCURACY


def test_resnet18_takes_the_weights_that_torchvision_publishes() -> None:
    """ResNet-18 has torchvision's names and shapes: 122 tensors, 11,689,512 parameters."""
    state = network().state_dict()
    assert len(state) == 122
    names = (
        "conv1.weight",
        "layer2.0.downsample.1.running_var",
        "layer4.1.bn2.num_batches_tracked",
        "fc.bias",
    )
    assert [tuple(state[name].shape) for name in names] == [(64, 3, 7, 7), (128,), (), (1000,)]
    assert sum(parameter.numel() for parameter in network().parameters()) == 11_689_512
    other = {name: torch.full_like(value, 0.5) for name, value in state.items()}
    assert torch.equal(network(other).fc.bias, other["fc.bias"])


def test_the_folders_say_what_they_hold(root: Path) -> None:
    """Every real model has a README in its maker's folder, and the list of bundles has the whole family."""
    folder = Path(examples.build.__file__).parent
    for name in MODELS:
        assert (folder / name.partition("_")[0] / "README.md").is_file()
    assert {name for name in MODELS if name.startswith("family")} == family.TASKS.keys()
