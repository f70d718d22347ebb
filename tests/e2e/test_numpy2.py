"""Stubs with numpy 2, with which Triton 24.10 corrupts tensors. rsrv avoids the corruption, and logs a warning.

Triton reports no error for the corruption, and part of it appears only under concurrency. So the tests compare every element of
many answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import ml_dtypes
import numpy as np
import pytest

from examples import glossary
from rsrv.serve import demo
from rsrv_bundle.export import export_bundle
from tests.e2e import bundles
from tests.e2e.bundles import DTYPES, LEAST_STEPS
from tests.e2e.calls import PROTOCOLS, Arrays, Caller, assert_same, at_once, caller, random_u32, refusal
from tests.e2e.harness import RunningTriton, make_repository, path_with_numpy2, running_triton
from tests.e2e.stateful import Stream
from tests.e2e.test_answers import varied

#: These tests take half a minute, and matter only to installations with numpy 2. Triton's image has another numpy.
pytestmark = pytest.mark.long

#: Types of the tensors of the model with hooks.
HOOKED = {"f32": np.float32, "i64": np.int64, "bool": np.bool_, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
#: Number of elements in a row of these tensors. Rows are long, so freed memory that is used too late has changed.
WIDTH = 257

#: Hooks that return only new arrays. Only the stub has references to these arrays.
HOOKS = """
import numpy as np


def preprocess(inputs):
    return {name: np.roll(x, 2, axis=1) for name, x in inputs.items()}


def postprocess(outputs):
    return {name: np.roll(y, 1, axis=1) for name, y in outputs.items()}
"""


@pytest.fixture(scope="module")
def numpy2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server whose stubs find numpy 2. It has quick and slow models, with and without hooks."""
    folder = tmp_path_factory.mktemp("numpy2")
    with jax.enable_x64(True):
        export_bundle(
            lambda params, **inputs: {name.replace("x", "y"): x[:, ::-1] for name, x in inputs.items()},
            {},
            {f"x_{token}": np.zeros((1, WIDTH), dtype) for token, dtype in HOOKED.items()},
            batch_sizes=(1, 4),
            out_dir=folder / "fresh",
            hooks=HOOKS,
        )
    others = [bundles.ensure() / name for name in ("every_dtype", "exact", "axes", "elastic")]
    generator = demo.DATA / demo.BUNDLES / "glossary_bytes"
    repository = make_repository(folder, folder / "fresh", generator, *others)
    environment = {"PATH": path_with_numpy2()}
    with running_triton(repository, folder / "server.log", env=environment) as running:
        yield running


def check_every_dtype(call: Caller, rng: np.random.Generator) -> None:
    """Send a request with varied tensors of all types, and check the answer."""
    rows = int(rng.integers(1, 5))
    inputs = {f"x_{token}": varied(token, (rows, 5), rng) for token in DTYPES}
    got = call("every_dtype", inputs)
    assert_same(got, {f"y_{token}": inputs[f"x_{token}"][:, ::-1] for token in DTYPES})


def check_hooks(call: Caller, rng: np.random.Generator) -> None:
    """Send a request that both hooks and the model change, and check the answer. Each of the three changes is needed for it."""
    rows = int(rng.integers(1, 5))
    inputs = {f"x_{token}": varied(token, (rows, WIDTH), rng) for token in HOOKED}
    want: Arrays = {}
    for token in HOOKED:
        want[f"y_{token}"] = np.roll(np.roll(inputs[f"x_{token}"], 2, axis=1)[:, ::-1], 1, axis=1)
    assert_same(call("fresh", inputs), want)


def check_matrix(call: Caller, rng: np.random.Generator) -> None:
    """Send a request with some rows to the model that multiplies, and check the answer."""
    x = rng.integers(-50, 51, (int(rng.integers(1, 17)), 64)).astype(np.float32)
    assert_same(call("exact", {"x": x}), {"y": x @ bundles.exact_kernel()})


def check_slow(call: Caller, rng: np.random.Generator) -> None:
    """Send a request that is answered after execute(), and check the answer."""
    u = random_u32(rng, int(rng.integers(1, 5)))
    steps = rng.integers(20, 80, len(u), np.int32)
    got = call("elastic", {"x": u, "steps": steps.reshape(-1, 1)})
    assert_same(got, {"y": bundles.stepped(u, steps + LEAST_STEPS)})


CHECKS = (check_every_dtype, check_hooks, check_matrix, check_slow)


def test_each_stub_warns_of_numpy_2(numpy2: RunningTriton) -> None:
    """For each model, the server's log warns that this numpy and this Triton do not work together."""
    warnings = re.findall(r"numpy 2\.\d+\S* and this Triton's stub do not work together", numpy2.log_text())
    assert len(warnings) == len(numpy2.stub_pids()) == 6


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_of_every_dtype_are_right_with_numpy_2(numpy2: RunningTriton, protocol: str) -> None:
    """Varied elements of each type, with and without hooks, are right bit by bit."""
    rng = np.random.default_rng(2)
    with caller(numpy2, protocol) as call:
        for _ in range(10):
            for check in CHECKS:
                check(call, rng)


def test_tensors_without_rows_are_right_with_numpy_2(numpy2: RunningTriton) -> None:
    """A model that Triton does not batch also answers empty batches."""
    rng = np.random.default_rng(3)
    with caller(numpy2) as call:
        for rows in (0, 1, 4, 0):
            a, b = rng.standard_normal((3, rows), np.float32), rng.standard_normal((rows, 2), np.float32)
            assert_same(call("axes", {"a": a, "b": b}), {"sum": a.T[None] + b.T[:, :, None]})


@pytest.mark.parametrize("check", CHECKS)
def test_concurrent_clients_of_one_model_are_answered_right_with_numpy_2(
    numpy2: RunningTriton, check: object
) -> None:
    """Sixteen clients of one model get right answers, although several answers leave the stub at the same time."""
    assert callable(check)

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(100 + number)
        for _ in range(60):
            check(call, rng)

    at_once(numpy2, 16, work)


def test_concurrent_clients_of_all_models_are_answered_right_with_numpy_2(numpy2: RunningTriton) -> None:
    """Sixteen clients use models with and without hooks, quick and slow, at the same time. All answers are right."""
    stubs = numpy2.stub_pids()

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(200 + number)
        for _ in range(60):
            CHECKS[int(rng.integers(len(CHECKS)))](call, rng)

    at_once(numpy2, 16, work)
    assert numpy2.stub_pids() == stubs


def test_strings_end_no_stub_with_numpy_2(numpy2: RunningTriton) -> None:
    """With this numpy, reading a BYTES tensor would end the stub. Such requests are refused before that."""
    stubs = numpy2.stub_pids()
    with caller(numpy2) as call:
        for name in ("exact", "fresh"):
            inputs: Arrays = {"x": np.full((1, 64), b"abc", object)}
            if name == "fresh":
                inputs = {f"x_{token}": np.full((1, WIDTH), b"abc", object) for token in HOOKED}
            refusal(lambda name=name, inputs=inputs: call(name, inputs)).assert_is("INVALID_ARG", "grpc")  # type: ignore[misc]
        check_matrix(call, np.random.default_rng(4))
        check_hooks(call, np.random.default_rng(5))
    assert numpy2.stub_pids() == stubs


def test_text_streams_as_its_bytes(numpy2: RunningTriton) -> None:
    """The demo's generator streams tokens, which are bytes of UTF-8. Stubs handle no text: the client decodes the bytes."""
    with Stream(numpy2, "glossary_bytes", tokens=list(b'"UTF-8" ')) as stream:
        tokens = [token for part in stream for token in np.atleast_1d(part["tokens"]).tolist()]
    assert bytes(tokens).decode() == glossary.definitions()["UTF-8"]
