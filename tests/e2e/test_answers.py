"""Standard clients get the right answers over both protocols, with single and with coalesced requests, for every kind of model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from examples import digits, mlp, two_sizes, v2_affine
from rsrv_bundle import Bundle, load_weights, read_bundle
from rsrv_bundle.modules import as_exported, check_signatures, module_file
from tests.e2e import bundles
from tests.e2e.bundles import DTYPES
from tests.e2e.calls import (
    PROTOCOLS,
    Array,
    Arrays,
    Caller,
    assert_same,
    at_once,
    at_once_behind_a_pause,
    caller,
    refusal,
)
from tests.e2e.harness import RunningTriton
from tests.status import read_status

#: Tolerance relative to an output's largest magnitude. Sums of some hundred f32 terms may be computed in another order.
TOLERANCE = 1e-5


def compiled(folder: Path, variant: int, size: int, inputs: Mapping[str, Array]) -> Arrays:
    """Execute the bundle's own module of this size in this process, and return its outputs."""
    bundle, call = _module(folder, variant, size)
    outputs = call(*(inputs[spec.name] for spec in bundle.manifest.inputs))
    return {spec.name: np.asarray(out) for spec, out in zip(bundle.manifest.outputs, outputs, strict=True)}


@cache
def _module(folder: Path, variant: int, size: int) -> tuple[Bundle, Callable[..., Any]]:
    bundle = read_bundle(folder)
    key = variant, size
    module = as_exported(module_file(bundle, key).read_bytes(), check_signatures(bundle)[key])
    weights = load_weights(bundle)
    jitted = jax.jit(module.call)
    return bundle, lambda *inputs: jitted(*inputs, *weights)


def assert_close(got: Mapping[str, Array], want: Mapping[str, Array]) -> None:
    assert set(got) == set(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        np.testing.assert_allclose(got[name], array, rtol=0, atol=TOLERANCE * np.abs(array).max())


def padded(x: Array, size: int) -> Array:
    """Append rows of zeros, as the runtime does."""
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def sizes_run(triton: RunningTriton, model: str) -> Counter[str]:
    """Return how often each compiled module of a model has been executed, by "variant/size"."""
    return Counter(read_status(triton.pid)["models"][model]["sizes"])


def mlp_rows(rng: np.random.Generator, rows: int) -> Arrays:
    return {"x": rng.standard_normal((rows, 256), np.float32)}


def image_rows(rng: np.random.Generator, rows: int, size: tuple[int, int]) -> Arrays:
    return {"image": rng.standard_normal((rows, *size, 3), np.float32)}


def exact_rows(rng: np.random.Generator, rows: int) -> Arrays:
    return {"x": rng.integers(-50, 51, (rows, 64)).astype(np.float32)}


def exact_answer(inputs: Mapping[str, Array]) -> Arrays:
    return {"y": inputs["x"] @ bundles.exact_kernel()}


# --- alone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rows", [*mlp.BATCH_SIZES, 3])
def test_a_request_alone_gets_the_very_bits_of_the_module_that_ran(
    triton: RunningTriton, example_bundles: Path, protocol: str, rows: int
) -> None:
    """A request that executes alone gets, bit by bit, the answer of the compiled size that the runtime reports."""
    x = mlp_rows(np.random.default_rng(rows), rows)["x"]
    before = sizes_run(triton, "mlp")
    with caller(triton, protocol) as call:
        got = call("mlp", {"x": x})
    ((ran, times),) = (sizes_run(triton, "mlp") - before).items()
    variant, size = map(int, ran.split("/"))
    assert (variant, times) == (0, 1)
    want = compiled(example_bundles / "mlp", 0, size, {"x": padded(x, size)})
    assert_same(got, {"logits": want["logits"][:rows]})


@pytest.mark.parametrize("variant", [0, 1])
def test_each_variant_answers_with_its_own_module(
    triton: RunningTriton, example_bundles: Path, variant: int
) -> None:
    """The input's size selects the variant's module, and the outputs have the shapes of this variant."""
    with caller(triton) as call:
        for rows in two_sizes.BATCH_SIZES:
            inputs = image_rows(np.random.default_rng(rows), rows, two_sizes.SIZES[variant])
            before = sizes_run(triton, "two_sizes")
            got = call("two_sizes", inputs)
            ((ran, _),) = (sizes_run(triton, "two_sizes") - before).items()
            index, size = map(int, ran.split("/"))
            assert index == variant
            want = compiled(
                example_bundles / "two_sizes", variant, size, {"image": padded(inputs["image"], size)}
            )
            assert_same(got, {name: array[:rows] for name, array in want.items()})
            assert_close(got, two_sizes.reference(inputs))


@pytest.mark.parametrize("rows", range(1, 33))
def test_rows_between_the_compiled_sizes_are_padded_and_cut_again(triton: RunningTriton, rows: int) -> None:
    """A request with any number of rows up to the largest compiled size gets exactly its own rows back."""
    inputs = mlp_rows(np.random.default_rng(100 + rows), rows)
    with caller(triton) as call:
        assert_close(call("mlp", inputs), mlp.reference(inputs))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_bundle_of_format_2_answers_exactly(triton: RunningTriton, protocol: str) -> None:
    """A bundle of format 2 has reversed axes and transposed weights. Its answers are exact."""
    rng = np.random.default_rng(2)
    with caller(triton, protocol) as call:
        for rows in (1, 2, 3, 4):
            inputs = {"x": rng.integers(-9, 10, (rows, 2, 3)).astype(np.float32)}
            assert_same(call("v2_affine", inputs), v2_affine.reference(inputs))


def test_hooks_of_the_digits_model_classify_unseen_images(
    triton: RunningTriton, example_bundles: Path
) -> None:
    """The postprocess hook converts logits to class and score. Both equal the results of a direct computation."""
    images, labels = digits.held_out()
    params = digits.params_of(example_bundles / "digits")
    right = 0
    with caller(triton) as call:
        for at in range(0, len(images), 32):
            inputs = {"image": images[at : at + 32]}
            got, want = call("digits", inputs), digits.reference(inputs, params)
            np.testing.assert_array_equal(got["class"], want["class"])
            np.testing.assert_allclose(got["score"], want["score"], atol=1e-5)
            right += int((got["class"][:, 0] == labels[at : at + 32]).sum())
    assert right / len(images) >= digits.REQUIRED_ACCURACY


# --- together -----------------------------------------------------------------------------------------------------


def test_64_clients_of_3_models_get_their_own_rows_back(triton: RunningTriton) -> None:
    """64 concurrent clients of three models send 1 to 8 rows each. However the requests are coalesced, the answers are right."""

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(10):
            rows = int(rng.integers(1, 9))
            match (number + int(rng.integers(3))) % 3:
                case 0:
                    inputs = mlp_rows(rng, rows)
                    assert_close(call("mlp", inputs), mlp.reference(inputs))
                case 1:
                    inputs = exact_rows(rng, rows)
                    assert_same(call("exact", inputs), exact_answer(inputs))
                case _:
                    size = two_sizes.SIZES[int(rng.integers(2))]
                    inputs = image_rows(rng, 1 + rows % 4, size)
                    assert_close(call("two_sizes", inputs), two_sizes.reference(inputs))

    at_once(triton, 64, work)


def test_coalesced_answers_equal_those_of_one_compiled_size(
    triton: RunningTriton, example_bundles: Path
) -> None:
    """However requests are coalesced, a row's answer equals, bit by bit, the answer of one of the compiled sizes."""
    inputs = [mlp_rows(np.random.default_rng(500 + number), 1) for number in range(32)]

    possible = [
        {
            compiled(example_bundles / "mlp", 0, size, {"x": padded(own["x"], size)})["logits"][:1].tobytes()
            for size in mlp.BATCH_SIZES
        }
        for own in inputs
    ]

    def work(call: Caller, number: int) -> None:
        for _ in range(20):
            assert call("mlp", inputs[number])["logits"].tobytes() in possible[number]

    at_once(triton, 32, work)


def test_variants_coalesce_apart_from_each_other(triton: RunningTriton) -> None:
    """If requests of two image sizes have waited, an execution has requests of only one size, and all answers are right."""
    before = sizes_run(triton, "two_sizes")

    def work(call: Caller, number: int) -> None:
        inputs = image_rows(np.random.default_rng(number), 1, two_sizes.SIZES[number % 2])
        assert_close(call("two_sizes", inputs), two_sizes.reference(inputs))

    at_once_behind_a_pause(triton, "two_sizes", 16, work)
    # The number of rows that share an execution depends on the measured costs.
    rows: Counter[str] = Counter()
    for ran, times in (sizes_run(triton, "two_sizes") - before).items():
        variant, size = ran.split("/")
        rows[variant] += int(size) * times
    assert rows.keys() == {"0", "1"}
    assert min(rows.values()) >= 8


def test_each_of_many_single_rows_is_counted_once(triton: RunningTriton) -> None:
    """However requests are coalesced, the runtime counts exactly the answers and the rows that clients have received."""
    before = read_status(triton.pid)["models"]["exact"]

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(30):
            inputs = exact_rows(rng, 1)
            assert_same(call("exact", inputs), exact_answer(inputs))

    at_once(triton, 48, work)
    after = read_status(triton.pid)["models"]["exact"]
    assert after["outcomes"]["answered"] - before["outcomes"].get("answered", 0) == 48 * 30
    assert after["useful_rows"] - before["useful_rows"] == 48 * 30


def test_requests_that_wait_are_coalesced(triton: RunningTriton) -> None:
    """Eight requests that have waited share executions, because four rows cost about as much as one row."""

    def dispatches() -> int:
        return int(read_status(triton.pid)["models"]["steady"]["dispatches"])

    def work(call: Caller, number: int) -> None:
        x = np.random.default_rng(number).integers(0, 2**32, (1, 4), np.uint32)
        assert_same(call("steady", {"x": x}), {"y": bundles.stepped(x, bundles.STEADY_STEPS)})

    before = dispatches()
    at_once_behind_a_pause(triton, "steady", 8, work)
    assert dispatches() - before < 8


# --- element types and axes ---------------------------------------------------------------------------------------


def varied(token: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return varied elements from the whole range of the type, with its smallest and its largest value."""
    dtype = np.dtype(DTYPES[token])
    if token == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape))
    if token[0] in "iu":
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, count, dtype, endpoint=True)
        values[:2] = info.min, info.max
        return values.reshape(shape)
    finfo: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    values = rng.standard_normal(count).astype(dtype)
    special = np.array([finfo.max, finfo.min, finfo.tiny, np.inf, -np.inf, -0.0])[:count]
    values[: len(special)] = special.astype(dtype)
    return rng.permutation(values).reshape(shape)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_varied_tensors_of_every_dtype_arrive_bit_by_bit(
    triton: RunningTriton, protocol: str, rows: int
) -> None:
    """Varied tensors of every type pass through the server and back. No element is changed or moved."""
    rng = np.random.default_rng(rows)
    inputs = {f"x_{token}": varied(token, (rows, 5), rng) for token in DTYPES}
    with caller(triton, protocol) as call:
        got = call("every_dtype", inputs)
    assert_same(got, {f"y_{token}": inputs[f"x_{token}"][:, ::-1] for token in DTYPES})


def test_varied_tensors_of_every_dtype_survive_coalescing(triton: RunningTriton) -> None:
    """Requests of all types execute together, and each answer is right bit by bit."""

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(5):
            rows = int(rng.integers(1, 5))
            inputs = {f"x_{token}": varied(token, (rows, 5), rng) for token in DTYPES}
            got = call("every_dtype", inputs)
            assert_same(got, {f"y_{token}": inputs[f"x_{token}"][:, ::-1] for token in DTYPES})

    at_once(triton, 16, work)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scalars_and_models_without_a_batch_axis(triton: RunningTriton, protocol: str) -> None:
    """Tensors without any axis travel as one element. A model without a batch axis answers each request alone."""

    def work(call: Caller, number: int) -> None:
        a, b = np.float32(number + 0.5), np.int64(2**40 + number)
        m = np.random.default_rng(number).standard_normal((2, 3))
        got = call("scalars", {"a": np.array([a]), "b": np.array([b]), "m": m})
        want = {
            "scaled": np.array([a * np.float32(b)]),
            "next": np.array([b + 1]),
            "turned": m.T,
            "shift": np.arange(3, dtype=np.float32) + a,
        }
        assert_same(got, want)

    at_once(triton, 8, work, protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_that_have_only_the_batch_axis(triton: RunningTriton, protocol: str) -> None:
    """Rows of a single element travel as [N, 1], in a single request and in coalesced requests."""

    def work(call: Caller, number: int) -> None:
        for rows in (1, 2, 3, 8):
            x = np.random.default_rng(number * 10 + rows).integers(-1000, 1000, (rows, 1), np.int32)
            assert_same(call("only_rows", {"x": x}), {"y": 3 * x})

    at_once(triton, 8, work, protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_batch_axis_that_is_not_the_first(triton: RunningTriton, protocol: str) -> None:
    """The runtime joins inputs and splits outputs along the axis that the bundle names."""

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(number)
        for rows in (1, 2, 3, 4, 0):
            a = rng.standard_normal((3, rows), np.float32)
            b = rng.standard_normal((rows, 2), np.float32)
            assert_same(call("axes", {"a": a, "b": b}), {"sum": a.T[None] + b.T[:, :, None]})

    at_once(triton, 8, work, protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_rows_at_all_are_refused_where_triton_batches(triton: RunningTriton, protocol: str) -> None:
    """For a model with max_batch_size, Triton itself refuses an empty batch. The server then answers other requests."""
    with caller(triton, protocol) as call:
        empty = {"x": np.zeros((0, 64), np.float32)}
        refusal(lambda: call("exact", empty)).assert_is("INVALID_ARG", protocol)
        inputs = exact_rows(np.random.default_rng(0), 3)
        assert_same(call("exact", inputs), exact_answer(inputs))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_tensor_of_64_mebibytes(triton: RunningTriton, protocol: str) -> None:
    """The model gets all of a tensor that is far larger than the buffers of sockets and protocols, and returns the right elements."""
    x = np.arange(bundles.LARGE, dtype=np.float32).reshape(1, -1)
    with caller(triton, protocol) as call:
        assert_same(call("large", {"x": x}), {"y": x[:, :: bundles.LARGE_STEP]})


# --- both protocols -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "exact", "two_sizes", "v2_affine", "digits"])
def test_both_protocols_give_equal_answers(triton: RunningTriton, model: str) -> None:
    """A request over gRPC and the same request over HTTP, one after the other, have the same answer bit by bit."""
    rng = np.random.default_rng(11)
    make: Mapping[str, Callable[[], Arrays]] = {
        "mlp": lambda: mlp_rows(rng, 4),
        "exact": lambda: exact_rows(rng, 4),
        "two_sizes": lambda: image_rows(rng, 4, two_sizes.SIZES[1]),
        "v2_affine": lambda: {"x": rng.standard_normal((4, 2, 3), np.float32)},
        "digits": lambda: {"image": digits.held_out()[0][:4]},
    }
    inputs = make[model]()
    answers: list[Any] = []
    for protocol in PROTOCOLS:
        with caller(triton, protocol) as call:
            answers.append(call(model, inputs))
    assert_same(*answers)
