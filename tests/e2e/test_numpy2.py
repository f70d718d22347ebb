"""Stubs that run with numpy 2, with which Triton 24.10 corrupts tensors: rsrv works around it, and warns.

The corruption was silent, and partly only under concurrency: so every element of many answers is compared.
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

#: Half a minute, for a pairing that Triton's image does not have.
pytestmark = pytest.mark.long

#: Shapes of the model with hooks; rows are so long that memory used too late has changed.
HOOKED = {"f32": np.float32, "i64": np.int64, "bool": np.bool_, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
WIDTH = 257

#: Every array that a hook returns is a new one, which only the stub holds.
HOOKS = """
import numpy as np


def preprocess(inputs):
    return {name: np.roll(x, 2, axis=1) for name, x in inputs.items()}


def postprocess(outputs):
    return {name: np.roll(y, 1, axis=1) for name, y in outputs.items()}
"""


@pytest.fixture(scope="module")
def numpy2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server whose stubs find numpy 2: with models with and without hooks, quick and slow."""
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
    """Send one request of varied tensors of all types."""
    rows = int(rng.integers(1, 5))
    inputs = {f"x_{token}": varied(token, (rows, 5), rng) for token in DTYPES}
    got = call("every_dtype", inputs)
    assert_same(got, {f"y_{token}": inputs[f"x_{token}"][:, ::-1] for token in DTYPES})


def check_hooks(call: Caller, rng: np.random.Generator) -> None:
    """Send one request that both hooks and the model change; none of the three alone gives the expected result."""
    rows = int(rng.integers(1, 5))
    inputs = {f"x_{token}": varied(token, (rows, WIDTH), rng) for token in HOOKED}
    want: Arrays = {}
    for token in HOOKED:
        want[f"y_{token}"] = np.roll(np.roll(inputs[f"x_{token}"], 2, axis=1)[:, ::-1], 1, axis=1)
    assert_same(call("fresh", inputs), want)


def check_matrix(call: Caller, rng: np.random.Generator) -> None:
    """Send one request of some rows to the model that multiplies."""
    x = rng.integers(-50, 51, (int(rng.integers(1, 17)), 64)).astype(np.float32)
    assert_same(call("exact", {"x": x}), {"y": x @ bundles.exact_kernel()})


def check_slow(call: Caller, rng: np.random.Generator) -> None:
    """Send one request whose answer does not come from within execute()."""
    u = random_u32(rng, int(rng.integers(1, 5)))
    steps = rng.integers(20, 80, len(u), np.int32)
    got = call("elastic", {"x": u, "steps": steps.reshape(-1, 1)})
    assert_same(got, {"y": bundles.stepped(u, steps + LEAST_STEPS)})


CHECKS = (check_every_dtype, check_hooks, check_matrix, check_slow)


def test_each_stub_warns_of_numpy_2(numpy2: RunningTriton) -> None:
    """The server's log warns for each model that this numpy and this Triton do not work together."""
    warnings = re.findall(r"numpy 2\.\d+\S* and this Triton's stub do not work together", numpy2.log_text())
    assert len(warnings) == len(numpy2.stub_pids()) == 6


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_of_every_dtype_are_right_with_numpy_2(numpy2: RunningTriton, protocol: str) -> None:
    """Varied elements of each type, with and without hooks, arrive bit by bit where they belong."""
    rng = np.random.default_rng(2)
    with caller(numpy2, protocol) as call:
        for _ in range(10):
            for check in CHECKS:
                check(call, rng)


def test_tensors_without_rows_are_right_with_numpy_2(numpy2: RunningTriton) -> None:
    """A model that Triton does not batch answers empty batches, too."""
    rng = np.random.default_rng(3)
    with caller(numpy2) as call:
        for rows in (0, 1, 4, 0):
            a, b = rng.standard_normal((3, rows), np.float32), rng.standard_normal((rows, 2), np.float32)
            assert_same(call("axes", {"a": a, "b": b}), {"sum": a.T[None] + b.T[:, :, None]})


@pytest.mark.parametrize("check", CHECKS)
def test_concurrent_clients_of_one_model_are_answered_right_with_numpy_2(
    numpy2: RunningTriton, check: object
) -> None:
    """Sixteen clients of one model, so that answers of several requests leave the stub together."""
    assert callable(check)

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(100 + number)
        for _ in range(60):
            check(call, rng)

    at_once(numpy2, 16, work)


def test_concurrent_clients_of_all_models_are_answered_right_with_numpy_2(numpy2: RunningTriton) -> None:
    """Sixteen clients that choose among models with and without hooks, quick and slow."""
    stubs = numpy2.stub_pids()

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(200 + number)
        for _ in range(60):
            CHECKS[int(rng.integers(len(CHECKS)))](call, rng)

    at_once(numpy2, 16, work)
    assert numpy2.stub_pids() == stubs


def test_strings_end_no_stub_with_numpy_2(numpy2: RunningTriton) -> None:
    """BYTES tensors, whose reading ends the process here, are refused before that."""
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
    """The demo's generator needs no text in the stubs: clients make it of tokens, the bytes of UTF-8."""
    with Stream(numpy2, "glossary_bytes", tokens=list(b'"UTF-8" ')) as stream:
        found = [token for part in stream for token in np.atleast_1d(part["tokens"]).tolist()]
    assert bytes(found).decode() == glossary.definitions()["UTF-8"]
