"""`runtime.numerics`: how modules and devices are treated, and the probe. The tests need no GPU."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.runtime.device import Array, DeviceError, Executable, Hardware, run
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.numerics import OVERRIDE, Computes, hardware_of, judge, probe, treatment
from rsrv.settings import Numerics, SettingsError, load_settings
from rsrv.stub.connection import Rejected
from rsrv_bundle.export import export_bundle
from rsrv_bundle.modules import Signature, signature_of
from rsrv_bundle.precision import Treatment, product, treat
from rsrv_bundle.products import Precision
from tests.fakes import FakeDevice
from tests.logged import logged_here
from tests.status import read_status
from tests.unit.runtime.conftest import StartRuntime, build_here
from tests.unit.runtime.test_hostile_peers import Client

AMPERE, TURING = Hardware("cuda", (8, 0)), Hardware("cuda", (7, 5))


@pytest.mark.parametrize(
    ("device", "expected", "tf32"),
    [
        (("cpu", "<unknown>", None), Hardware("cpu"), False),
        (("gpu", "PJRT C API\ncuda 12090", "8.0"), AMPERE, True),
        (("gpu", "cuda 13000", "12.1"), Hardware("cuda", (12, 1)), True),
        (("gpu", "cuda 12090", "7.5"), TURING, False),
        (("gpu", "cuda 12090", None), Hardware("cuda"), False),
        (("gpu", "cuda 12090", "new"), Hardware("cuda"), False),
        (("gpu", "PJRT C API\nrocm 60300", "gfx942"), Hardware("gpu"), False),
        (("tpu", "libtpu", None), Hardware("tpu"), False),
    ],
)
def test_tf32_needs_compute_capability_8(
    device: tuple[str, str, object], expected: Hardware, tf32: bool
) -> None:
    """CUDA devices have TF32 if their compute capability is 8.0 or above, and unknown devices have none."""
    assert hardware_of(*device) == expected
    assert expected.has_tf32 == tf32


@pytest.mark.parametrize(
    ("numerics", "hardware", "expected"),
    [
        ("auto", AMPERE, "keep"),
        ("auto", TURING, "strip"),
        ("auto", Hardware("cuda"), "strip"),
        ("auto", Hardware("cpu"), "strip"),
        ("f32", AMPERE, "pin"),
        ("f32", Hardware("cpu"), "pin"),
        ("tf32", AMPERE, "keep"),
    ],
)
def test_what_is_done_to_modules(numerics: Numerics, hardware: Hardware, expected: Treatment) -> None:
    """The treatment of modules depends on the setting and the hardware."""
    assert treatment(numerics, hardware) == expected


def rounded(matrix: Array, bits: int) -> Array:
    """Round to `bits` bits of mantissa, to nearest, as tensor cores round their inputs."""
    half, mask = (1 << (23 - bits)) >> 1, ~((1 << (23 - bits)) - 1) & 0xFFFFFFFF
    return ((matrix.view(np.uint32) + np.uint32(half)) & np.uint32(mask)).view(np.float32)


@pytest.mark.parametrize(
    ("bits", "expected"), [(23, "f32"), (22, "f32"), (16, "indeterminate"), (10, "tf32"), (7, "tf32")]
)
def test_the_product_tells_how_it_was_made(bits: int, expected: Computes) -> None:
    """The probe's product shows whether the mantissa was that of f32, of TF32, or of another length."""
    seen: list[Array] = []
    device = Multiplier(bits, bits, seen)

    assert probe(device, "auto") == expected
    assert judge(seen[0]) == expected


def test_a_product_with_anything_else_in_it_is_indeterminate() -> None:
    """A product with a wrong element or NaN shows nothing, so the probe's result is "indeterminate"."""
    ones = np.ones((512, 512), np.float32)
    for value in (2, np.nan, 0):
        wrong = ones.copy()
        wrong[3, 4] = value
        assert judge(wrong) == "indeterminate"


class Multiplier(FakeDevice):
    """A GPU that multiplies with a mantissa of `default` bits, or of `pinned` bits if the module requests f32."""

    def __init__(self, default: int, pinned: int, seen: list[Array] | None = None) -> None:
        super().__init__(self._multiply)
        self.hardware = AMPERE
        self._bits = {"default": default, "pinned": pinned}
        self._latest = ""
        self._seen = [] if seen is None else seen

    def compile(self, module: bytes, signature: Signature) -> Executable:
        self._latest = "pinned" if signature_of(module, "model.mlir").precision.f32 else "default"
        return super().compile(module, signature)

    def _multiply(self, inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
        x, y = (rounded(factor, self._bits[self._latest]) for factor in inputs)
        # One factor is 1, so any product is exact.
        self._seen.append((x.astype(np.float64) @ y).astype(np.float32))
        return [self._seen[-1]]


def test_the_probe_needs_no_gpu_to_find_f32() -> None:
    """The probe finds f32 with the compiler for the CPU."""
    device = JaxDevice("cpu")
    device.hardware = TURING

    assert probe(device, "auto") == "f32"
    assert probe(device, "f32") == "f32"


def test_nothing_is_probed_on_a_cpu() -> None:
    """A CPU is not probed, and executes nothing."""
    device = FakeDevice(lambda inputs, weights: [])
    assert probe(device, "auto") is None
    assert probe(device, "f32") is None
    assert not device.executed


def test_f32_holds_where_the_default_is_tf32() -> None:
    """With `f32`, the probe reports TF32 as the default, and accepts the device, because it computes f32 on request."""
    seen: list[Array] = []

    assert probe(Multiplier(10, 23, seen), "f32") == "tf32"
    assert [judge(matrix) for matrix in seen] == ["tf32", "f32"]


@pytest.mark.parametrize(("bits", "how"), [(10, "tf32"), (16, "indeterminate")])
def test_f32_refuses_a_device_that_rounds_what_is_pinned(bits: int, how: str) -> None:
    """With `f32`, a device is refused if it rounds even where a module requests f32.

    The error calls this a fault of the driver.
    """
    with pytest.raises(
        DeviceError, match=f"multiplies in {how} where a module requests f32: a fault of the driver"
    ):
        probe(Multiplier(10, bits), "f32")


def test_a_device_that_cannot_multiply_is_said_to_be_it() -> None:
    """If a device cannot multiply, the probe raises an error of the device. The next probe may succeed."""
    device = Multiplier(10, 23)
    device.fail_next("launch", error=RuntimeError("no kernel image"))
    with pytest.raises(DeviceError, match=r"before any model is built: RuntimeError: no kernel image"):
        probe(device, "auto")
    assert probe(device, "auto") == "tf32"


@pytest.mark.parametrize(
    ("hardware", "why"),
    [
        (Hardware("cpu"), "the models would run on a CPU, which has no TF32"),
        (TURING, "a CUDA device of compute capability 7.5 is not known to have TF32"),
        (Hardware("cuda"), "a CUDA device of compute capability unknown is not known to have TF32"),
        (Hardware("gpu"), "a device of the platform gpu is not known to have TF32"),
    ],
)
def test_tf32_refuses_hardware_without_it(hardware: Hardware, why: str) -> None:
    """With `tf32`, hardware without TF32 is refused before anything is executed."""
    device = FakeDevice(lambda inputs, weights: [])
    device.hardware = hardware

    with pytest.raises(DeviceError, match=f"^runtime.numerics is tf32, but {why}.*; set it to auto or f32"):
        probe(device, "tf32")


@pytest.mark.parametrize(
    ("numerics", "bits", "message"),
    [
        ("auto", 10, None),
        ("auto", 23, None),
        ("auto", 16, "neither f32 nor TF32"),
        ("tf32", 10, None),
        ("tf32", 23, f"check whether {OVERRIDE} is 0"),
    ],
)
def test_what_else_is_odd_is_said(
    numerics: Numerics, bits: int, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """If the probe finds a precision that does not fit the setting, the log has a warning."""
    probe(Multiplier(bits, bits), numerics)

    warnings = [record.getMessage() for record in logged_here(caplog) if record.levelno >= logging.WARNING]
    assert len(warnings) == (message is not None)
    assert message is None or message in warnings[0]


_START = """
import os
import jax
from rsrv.runtime.jax_device import JaxDevice
for numerics in ("auto", "f32"):
    JaxDevice("cpu", numerics=numerics)
    print(numerics, os.environ["NVIDIA_TF32_OVERRIDE"], jax.config.jax_default_matmul_precision)
"""


def test_the_process_keeps_to_the_setting() -> None:
    """The setting decides about CUDA's variable and jax's default precision, whatever the user's variables say."""
    out = subprocess.run(
        [sys.executable, "-c", _START],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16", OVERRIDE: "1"},
    )
    assert out.stdout.splitlines() == ["auto 1 None", "f32 0 highest"]


def test_tf32_on_a_cpu_is_refused_with_the_settings() -> None:
    """The settings are refused if `numerics` is `tf32` and `platform` is `cpu`."""
    with pytest.raises(SettingsError, match="numerics: tf32 needs a GPU, because platform: cpu"):
        load_settings("runtime: {numerics: tf32, platform: cpu}")


def settings_text(numerics: Numerics) -> str:
    return f"runtime: {{numerics: {numerics}}}"


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle: y = (x w) w of 3 x 3 matrices, whose first product requests TF32, in sizes 1 and 4."""
    path = tmp_path_factory.mktemp("bundles") / "products"

    def compute(params: Mapping[str, Any], x: Any) -> dict[str, Any]:
        first = jax.lax.dot_general(
            x, params["w"], (((1,), (0,)), ((), ())), precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32
        )
        return {"y": first @ params["w"]}

    export_bundle(
        compute,
        {"w": jnp.asarray(W)},
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1, 4],
        out_dir=path,
        platform="cuda",
    )
    return path


W = np.array([[1, 2, 3], [0, 1, 4], [5, 6, 0]], np.float32)


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [("auto", Precision(hardware=2, stripped=1)), ("f32", Precision(f32=2, pinned=1, rewritten=1))],
)
def test_a_model_that_asks_for_tf32_computes_on_a_cpu(
    numerics: Numerics, expected: Precision, products: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, a requested TF32 algorithm is removed, or made f32. The model and the log have the resulting precision."""
    caplog.set_level(logging.INFO)
    device = JaxDevice("cpu", numerics="auto")

    model = build_here(products, device, load_settings(settings_text(numerics)))

    assert model.precisions == {(0, 1): asdict(expected), (0, 4): asdict(expected)}
    assert f"(variant 0, size 1): {expected}" in caplog.text
    assert model.weights is not None
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    (y,), _ = run(device, model.executables[0, 4], model.weights, [x])
    np.testing.assert_array_equal(y, x @ W @ W)  # The integers are so small that any precision is exact.


def test_the_module_of_another_setting_is_another_executable(products: Path) -> None:
    """Executables for different settings are different, in the process and in the cache."""
    module, signature = product(4)
    assert treat(module, "model.mlir", "strip", signature.precision)[0] == module
    assert treat(module, "model.mlir", "pin", signature.precision)[0] != module
    device = JaxDevice("cpu")
    models = [
        build_here(products, device, load_settings(settings_text(setting)))
        for setting in ("auto", "f32", "f32")
    ]
    first, second, third = (set(map(id, model.executables.values())) for model in models)
    assert not first & second
    assert second == third


def test_a_runtime_on_a_cpu_serves_in_f32_and_says_so(start_runtime: StartRuntime, products: Path) -> None:
    """The status has the setting, and the precision of each executable."""
    runtime = start_runtime(
        load_settings(settings_text("f32")),
        compute=lambda inputs, weights: [inputs[0] @ weights[0] @ weights[0]],
    )
    runtime.connect().register({"model": "products", "bundle": str(products)})

    status = read_status(os.getpid())

    assert (status["numerics"], status["computes"]) == ("f32", "")
    executables = status["models"]["products"]["executables"]
    (precision,) = (executable["precision"] for executable in executables if executable["size"] == 4)
    assert precision["f32"] == 2
    assert precision["hardware"] == precision["tf32"] == 0


def test_a_runtime_refuses_every_model_where_tf32_is_wanted_and_not_there(
    start_runtime: StartRuntime, doubling: Path
) -> None:
    """With `tf32` on a CPU, each model is rejected with the reason."""
    runtime = start_runtime(load_settings(settings_text("tf32")))
    for _ in range(2):
        with pytest.raises(Rejected, match="numerics is tf32, but the models would run on a CPU"):
            runtime.connect().register({"model": "doubling", "bundle": str(doubling)})
    assert runtime.alive


def test_a_runtime_on_a_gpu_probes_before_it_compiles_models(
    start_runtime: StartRuntime, doubling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the status has the result of the probe."""
    monkeypatch.setattr("rsrv.runtime.model_builder.probe", lambda device, numerics: "tf32")
    runtime = start_runtime()
    client = Client(runtime, doubling)
    assert client.works()
    assert read_status(os.getpid())["computes"] == "tf32"
