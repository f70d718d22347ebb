"""Exporting PyTorch modules, and the refusals."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rsrv_bundle import BundleError, load_weights
from rsrv_bundle.dtypes import TOKENS, numpy_dtype
from rsrv_bundle.from_torch import eager_torch, export_stateful_torch, export_torch
from rsrv_bundle.torch_arrays import dtype_of, to_numpy, to_torch

X = {"x": torch.zeros(1, 3)}


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Seed the random weights of each test's modules. With some weights, the error of a bf16 module exceeds its tolerance."""
    torch.manual_seed(0)


def export(out_dir: Path, module: nn.Module, inputs: Any = None, **options: Any) -> Any:
    """Call export_torch with defaults for all arguments that a test does not set."""
    return export_torch(
        module.eval(), X if inputs is None else inputs, out_dir=out_dir, **{"batch_sizes": [2], **options}
    )


class Function(nn.Module):
    """Module without weights."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Encoder(nn.Module):
    """Text model with indices, a mask, attention, tied and unused weights, and all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(9, 9)
        self.register_buffer("place", torch.arange(8.0), persistent=False)
        # A plain attribute: neither a parameter nor a buffer.
        self.scale = torch.linspace(0, 1, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        x = self.embed(ids) + self.get_buffer("place")
        x = self.layer(x, src_key_padding_mask=mask == 0) * self.scale
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) + torch.tensor([0.5])
        large = torch.tensor([2**40, 1]).sum()
        return {"words": self.head(x), "pair": (x.mean(1), None), "best": x.argmax(2) + large}


IDS = {"ids": torch.tensor([[49, 1, 7, 20]]), "mask": torch.tensor([[1, 1, 1, 0]])}


@pytest.mark.long
def test_a_text_encoder_answers_as_in_pytorch(tmp_path: Path) -> None:
    """A text encoder gives PyTorch's answers.

    Integers stay 64 bits wide, shared weights are stored once, and unused ones are left out.
    """
    settings = (
        jax.config.read("jax_enable_x64"),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_grad_enabled(),
    )
    module = Encoder()
    bundle = export(tmp_path / "m", module, IDS, batch_sizes=[1, 3])
    assert [(spec.name, spec.dtype) for spec in bundle.manifest.inputs] == [("ids", "i64"), ("mask", "i64")]
    assert [(spec.name, spec.dtype, spec.dims) for spec in bundle.manifest.outputs] == [
        ("words", "f32", (-1, 4, 50)),
        ("pair_0", "f32", (-1, 8)),
        ("best", "i64", (-1, 4)),
    ]
    names = [weight.name for weight in bundle.weights]
    assert {"embed.weight", "norm.running_mean", "place", "scale"} < set(names)
    assert not {"head.weight", "unused.weight", "norm.num_batches_tracked"} & set(names)
    stored = dict(zip(names, load_weights(bundle), strict=True))
    np.testing.assert_array_equal(stored["embed.weight"], module.embed.weight.detach().numpy())
    assert 0 < bundle.manifest.numerics["max_rel_error"] < 1e-5
    assert bundle.manifest.provenance["torch"] == metadata.version("torch")
    assert bundle.manifest.provenance["torchax"]
    after = (
        jax.config.read("jax_enable_x64"),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_grad_enabled(),
    )
    assert after == settings


@pytest.mark.long
def test_two_image_sizes_share_weights(tmp_path: Path) -> None:
    """A convolutional network that is traced at two image sizes shares its weights."""
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    bundle = export(
        tmp_path / "m",
        module,
        {"input": np.zeros((1, 3, 9, 9), np.float32)},
        axes={"input": "nchw"},
        input_shapes=[{"h": 9, "w": 9}, {"h": 12, "w": 9}],
    )
    assert sorted(path.name for path in bundle.modules.values()) == ["model.v0.b2.mlir", "model.v1.b2.mlir"]
    assert len(bundle.weights) == 5
    assert bundle.manifest.outputs[0].dims == (-1, 4)


@pytest.mark.long
def test_fourier_transforms_and_inverses_are_exported(tmp_path: Path) -> None:
    """Fourier transforms and matrix inverses are exported; complex numbers stay inside the module."""
    matrix = torch.eye(3) * 2

    def forward(x: torch.Tensor) -> Any:
        transformed = torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j), n=3)
        return {"x": transformed @ torch.linalg.inv(matrix), "y": x @ torch.linalg.cholesky(matrix)}

    bundle = export(tmp_path / "m", Function(forward))
    assert [spec.dims for spec in bundle.manifest.outputs] == [(-1, 3), (-1, 3)]


@pytest.mark.parametrize(
    ("dtype", "token"),
    [(torch.bfloat16, "bf16"), pytest.param(torch.float64, "f64", marks=pytest.mark.long)],
)
def test_other_precisions_stay(tmp_path: Path, dtype: torch.dtype, token: str) -> None:
    """bf16 and f64 modules keep their type: Python numbers in the module do not change it."""
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU(approximate="tanh"), nn.LayerNorm(4)).to(dtype)
    bundle = export(tmp_path / "m", module, {"input": torch.zeros(1, 3, dtype=dtype)})
    assert {spec.dtype for spec in (*bundle.manifest.inputs, *bundle.manifest.outputs)} == {token}
    assert {weight.dtype for weight in bundle.weights} == {token}


def test_inputs_of_one_shape_are_not_swapped(tmp_path: Path) -> None:
    """Inputs of one shape reach their parameters by name, in any given order."""

    class Difference(nn.Module):
        def forward(
            self, a: torch.Tensor, b: torch.Tensor, *, c: torch.Tensor, d: Any = None
        ) -> torch.Tensor:
            return a - 2 * b + 3 * c

    inputs = {name: torch.zeros(1, 2) for name in "cba"}
    bundle = export(tmp_path / "m", Difference(), inputs)
    assert [spec.name for spec in bundle.manifest.inputs] == ["c", "b", "a"]
    numbers = {name: np.full((1, 1), value, np.float32) for name, value in (("c", 3), ("a", 1), ("b", 2))}
    assert eager_torch(Difference().eval())(**numbers).values == (np.full((1, 1), 6, np.float32),)
    with pytest.raises(
        BundleError, match=r"y: the model has no such input; it takes \(a, b, c, d\), so use these names"
    ):
        export(tmp_path / "n", Difference(), {**inputs, "y": torch.zeros(1, 2)})
    with pytest.raises(BundleError, match=r"a: the model takes .* has no default; give this input"):
        export(tmp_path / "n", Difference(), {name: inputs[name] for name in "cb"})


def test_results_may_be_dataclasses_and_tuples(tmp_path: Path) -> None:
    """A dataclass names its results. For a tuple, the user must give names."""

    @dataclasses.dataclass
    class Found:
        value: torch.Tensor
        nothing: None = None

    bundle = export(tmp_path / "a", Function(lambda x: Found(x * 2)), batch_sizes=[], batch_axis=None)
    assert [(spec.name, spec.dims) for spec in bundle.manifest.outputs] == [("value", (1, 3))]
    bundle = export(tmp_path / "b", Function(lambda x: (x + 1, x.int())), output_names=["up", "whole"])
    assert [(spec.name, spec.dtype) for spec in bundle.manifest.outputs] == [("up", "f32"), ("whole", "i32")]


class Waves(nn.Module):
    """Module that multiplies each wave by complex weights: a parameter, its conjugate, and a tensor that `forward` creates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.arange(3.0), torch.ones(3)))
        self.register_buffer("conjugate", self.weight.detach().conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.fft.rfft(x, dim=1) * self.weight + self.get_buffer("conjugate") * torch.tensor(
            [1j, 2, 3]
        )
        answer: torch.Tensor = torch.fft.irfft(turned, 4, dim=1)
        return answer


def test_complex_weights_are_exported_as_pairs(tmp_path: Path) -> None:
    """A bundle stores complex weights as pairs of real numbers, because the format has no complex tensors."""
    bundle = export(tmp_path / "waves", Waves(), {"x": torch.zeros(1, 4)})
    assert [w.shape for w in load_weights(bundle)] == [(3, 2), (3, 2)]


class Scale(nn.Module):
    """Module with one buffer or one plain attribute."""

    def __init__(self, scale: torch.Tensor, *, persistent: bool | None = True) -> None:
        super().__init__()
        if persistent is None:
            self.scale = scale
        else:
            self.register_buffer("scale", scale, persistent=persistent)

    def forward(self, x: torch.Tensor) -> Any:
        return {"all": x * self.scale, "column": x[:, 0]}


def test_columns_of_one_element_are_exported(tmp_path: Path) -> None:
    """Tensors of one element are exported with any stride, as weights and as results at batch size 1."""
    bundle = export(tmp_path / "m", Scale(torch.arange(4.0)[None][:, 1]), batch_sizes=[1, 2])
    assert [spec.dims for spec in bundle.manifest.outputs] == [(-1, 3), (-1,)]
    assert [np.asarray(weight).tolist() for weight in load_weights(bundle)] == [[1.0]]


def test_classes_become_vectors(tmp_path: Path) -> None:
    """`one_hot` is exported, without PyTorch's check of the number of classes."""
    module = Function(lambda x: nn.functional.one_hot(x, 5))
    bundle = export(tmp_path / "m", module, {"x": torch.tensor([[4, 0, 1]])})
    assert bundle.manifest.outputs[0].dims == (-1, 3, 5)


@pytest.mark.long
def test_a_compiled_module_is_exported_as_it_was_before(tmp_path: Path) -> None:
    """A compiled module is exported with its original weight names, and its compiled parts run uncompiled."""
    inner = nn.Sequential(nn.Linear(3, 2)).eval()
    compiled: Any = torch.compile(inner, backend="eager")
    bundle = export(tmp_path / "m", compiled, {"input": X["x"]})
    assert [weight.name for weight in bundle.weights] == ["0.bias", "0.weight"]
    assert len(export(tmp_path / "n", nn.Sequential(compiled), {"input": X["x"]}).weights) == 2
    assert eager_torch(compiled)(input=np.zeros((1, 3), np.float32)).values[0].shape == (1, 2)


@pytest.mark.long
def test_nothing_of_torchax_is_there_before_an_export() -> None:
    """An import of the exporter does not import torchax, because torch.compile does not work after that."""
    program = "import sys, rsrv_bundle.from_torch; assert 'torchax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_torchax_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For another version of torchax, the message says what to install."""
    monkeypatch.delitem(sys.modules, "rsrv_bundle.torch_programs", raising=False)
    monkeypatch.delattr("rsrv_bundle.torch_programs", raising=False)
    monkeypatch.setitem(sys.modules, "torchax", None)
    monkeypatch.setattr(
        "rsrv_bundle.from_torch.metadata.requires",
        lambda _: ["numpy>=2", 'torch==1.2.3; extra == "export-torch"', 'flax==1; extra == "export-flax"'],
    )
    with pytest.raises(BundleError, match=r"pip install .*\[export-torch\]', which is torch==1.2.3$"):
        export(tmp_path / "m", Scale(torch.ones(3)))


def test_an_error_of_ours_is_not_told_as_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the exporter after the model has run is not reported as the model's."""

    def broken(name: str, value: Any) -> Any:
        if name.startswith("outputs"):
            raise RuntimeError("ours")
        return to_numpy(name, value)

    monkeypatch.setattr("rsrv_bundle.from_torch.to_numpy", broken)
    with pytest.raises(RuntimeError, match=r"^ours$"):
        export(tmp_path / "m", Scale(torch.ones(3)))


def test_a_warning_is_no_failure_of_the_module() -> None:
    """A module that warns is evaluated even if the program turns warnings into errors."""

    class Old(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("this is deprecated", stacklevel=1)
            return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (answer,) = eager_torch(Old().eval())(x=np.zeros((1, 2), np.float32)).values

    assert (answer == 1).all()


def test_a_module_in_training_mode_is_refused(tmp_path: Path) -> None:
    """A module that is in training mode, or has a part in training mode, is refused by the exporter and by the eager call."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    module[1].train()
    with pytest.raises(BundleError, match=r"module: is in training mode \(1\); call module.eval\(\) first"):
        export_torch(module, X, batch_sizes=[1], out_dir=tmp_path / "m")
    with pytest.raises(BundleError, match="is in training mode"):
        eager_torch(module)(input=np.zeros((1, 3), np.float32))


def test_a_module_without_a_batch_axis_is_told_from_one_that_cannot_be_traced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With batch sizes, an example without a batch axis and a module that decides by values give different errors.

    PyTorch's own log is not shown.
    """
    for function, message in (
        (
            lambda x: x @ torch.ones(3, 2),
            r"works with x \[3\], but fails with x \[1\], which the batch sizes .*cannot be multiplied.* leave out the batch",
        ),
        (lambda x: x if x.sum() > 0 else -x, r"\d+: forward decides by .* in all requests$"),
    ):
        with pytest.raises(BundleError, match=message):
            export(tmp_path / "m", Function(function), {"x": torch.zeros(3)}, batch_sizes=[1, 2])
    assert "aten" not in capfd.readouterr().err + caplog.text


def test_an_example_without_the_batch_axis_is_told_the_shape_that_the_module_takes(tmp_path: Path) -> None:
    """If a module fails with an example because the example lacks the batch axis, the error names the shape with this axis."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    message = (
        r"^module: fails with input \[3, 8, 8\] \(ValueError: expected 4D input .*\), but works with input \[1, 3, 8, 8\]; give"
        r" examples with the batch axis in front$"
    )
    with pytest.raises(BundleError, match=message):
        export(tmp_path / "m", module, {"input": torch.zeros(3, 8, 8)}, batch_sizes=[1, 2])


def test_a_module_elsewhere_is_refused(tmp_path: Path) -> None:
    """Modules with weights, buffers or attributes on another device are refused."""
    with FakeTensorMode():
        far = torch.empty(3, device="cuda")
    for module, message in (
        (nn.Linear(3, 2, device="meta"), "module: is on meta, where tensors have no values"),
        (Scale(far), r"module: is on cuda:0; export module.cpu\(\), for any platform"),
        (Scale(far, persistent=False), r"module: is on cuda:0; export module.cpu\(\)"),
        (
            nn.Sequential(Scale(far, persistent=None)),
            "module: 0.scale: is on cuda:0, .* call register_buffer",
        ),
    ):
        with pytest.raises(BundleError, match=message):
            export(tmp_path / "m", module)


def test_a_module_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Scripted, quantized and other kinds of modules are refused with what to export instead."""
    net = nn.Sequential(nn.Linear(3, 2)).eval()
    # PyTorch does not type these functions.
    jit: Any = torch.jit
    quantization: Any = torch.ao.quantization
    with warnings.catch_warnings():
        # These two functions are deprecated.
        warnings.simplefilter("ignore")
        script = jit.trace(net, X["x"])
        quantised = quantization.quantize_dynamic(net, {nn.Linear})
    parallel = nn.DataParallel.__new__(nn.DataParallel)
    nn.Module.__init__(parallel)
    for module, message in (
        (script, "module: is TorchScript; export the module that it was made from"),
        (quantised, "module: 0: is quantised"),
        (parallel, "module: is a DataParallel; export module.module"),
    ):
        with pytest.raises(BundleError, match=message):
            export_torch(module, {"input": X["x"]}, batch_sizes=[1], out_dir=tmp_path / "m")


class Counter(nn.Module):
    """Module that changes its state when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.get_buffer("count").add_(1)


LARGE = torch.rand(600, 600)


def _filled(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(3)
    mask[0] = x[0, 0]
    return x if (mask == 0).all() else -x


def _counted(x: torch.Tensor) -> torch.Tensor:
    """Read a value that depends on the number of nonzero elements of the input, and so only indirectly on the input's values."""
    return x * torch.ones(x.nonzero().shape[0] + 1).sum().item()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Counter(), "module: count: forward changes it"),
        (Function(lambda x: x.add_(1)), "module: x: forward changes it"),
        (
            Function(nn.functional.dropout),
            r"module: test_from_torch.py:\d+: aten.rand.default draws random numbers",
        ),
        (
            Function(lambda x: x[x > 0].exp() + 1),
            r"\Amodule: test_from_torch.py:\d+: aten.index.Tensor makes what is computed depend on .* torch.where\Z",
        ),
        (Function(lambda x: x * x.max().item()), "_local_scalar_dense.default makes what is computed depend"),
        (
            Function(lambda x: x if bool(x.sum() > 0) else -x),
            r"module: test_from_torch.py:\d+: forward decides by a tensor's values",
        ),
        (Function(_filled), r"module: test_from_torch.py:\d+: forward decides by a tensor's values"),
        (
            Function(lambda x: x if torch.rand(()) < 2 else -x),
            r"module: test_from_torch.py:\d+: forward decides by a tensor's values",
        ),
        (Function(_counted), "aten.nonzero.default makes what is computed depend on a tensor's values"),
        (
            nn.Sequential(
                Function(lambda x: torch.segment_reduce(x.T, "sum", lengths=torch.tensor([1, 2])).T)
            ),
            r"test_from_torch.py:\d+ in 0: torchax has no aten.segment_reduce.default for jax; .* lowerings=$",
        ),
        (Function(lambda x: x + LARGE.clone()[0, :3]), "captures 1440000 bytes of constants"),
        (Function(lambda x: {"b": 3}), r"outputs: the model returns no tensor \(int\); return tensors"),
        (Function(torch.fft.fft), r"outputs: output: has the element type complex64, .* torch.view_as_real"),
        (
            Function(lambda x: {f"a{len(x)}": x}),
            "outputs: their names depend on the input shapes; return the same for all",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, module: nn.Module, message: str) -> None:
    """The refusal names the line, the operation or the tensor, and nothing is written."""
    name = "input" if isinstance(module, nn.Sequential) else "x"
    with pytest.raises(BundleError, match=message):
        export(tmp_path / "m", module, {name: torch.zeros(1, 3)}, batch_sizes=[2, 3])
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_model_itself_is_told_before_an_export(tmp_path: Path) -> None:
    """A module that already fails in PyTorch with its examples gets another error than a module that cannot be exported."""
    message = r"^module: Embedding itself fails with the example inputs, .*: input \[1, 2\] \(IndexError: index out of range"
    with pytest.raises(BundleError, match=message):
        export(tmp_path / "m", nn.Embedding(3, 2), {"input": torch.tensor([[1, 7]])})
    with pytest.raises(BundleError, match="x: is a list; give a tensor, an array"):
        export(tmp_path / "m", Function(torch.relu), {"x": [1.0]})


def _asserted(x: torch.Tensor) -> torch.Tensor:
    # A trace treats the statement `assert` like this call. pytest would rewrite the statement.
    count = (x > 9).sum().item()
    torch._check(count <= 9)  # type: ignore[no-untyped-call]
    return x + 1


class Decided(nn.Module):
    """Module that calls a function, and has a buffer of three numbers."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("numbers", torch.tensor([1, 2, 0]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.get_buffer("numbers"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, numbers: x if (numbers.square() < 9).all() else -x,
        lambda x, numbers: x * numbers.sum().item(),
        lambda x, numbers: x[:, : numbers[1]] + torch.zeros(numbers[1]),
        lambda x, numbers: torch.stack([x * each for each in numbers.tolist()]),
        lambda x, numbers: x if torch.equal(numbers, numbers.clone()) else -x,
        lambda x, numbers: x if (torch.ones_like(x) == 1).all() else -x,
        lambda x, numbers: x[:, numbers] * numbers.sum().item() if numbers.max() < 3 else -x,
        lambda x, numbers: (
            x if not torch.compiler.is_compiling() and x.sum() > 9 else x * numbers.sum().item()
        ),
        lambda x, numbers: _asserted(x),
        lambda x, numbers: torch.where(x > 0, *(x * number for number in (numbers[0], int(numbers[1])))),
    ],
    ids=["if", "item", "sizes", "list", "equal", "shape", "index", "checked", "asserted", "mixed"],
)
def test_a_module_may_read_values_that_no_request_changes(
    tmp_path: Path, function: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    """A module may decide by values of buffers and constants, because they are the same for all requests. It is exported."""
    export(tmp_path / "m", Decided(function), {"x": torch.ones(1, 3)})


def test_assertions_about_values_of_inputs_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement `assert` may read values of inputs.

    But if other code on the same line branches on a value, the export is refused.
    """
    # pytest rewrites the assertions of its own files.
    (tmp_path / "asserting.py").write_text(
        "def forward(x):\n"
        "    assert (x == x).all(\n"
        "    ), x.sum().item()\n"
        "    assert x.square().sum().item() >= 0\n"
        "    return x + 1\n"
        "def decided(x):\n"
        "    assert x.shape[1] == 3; return x if x.sum() > 0 else -x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    asserting = importlib.import_module("asserting")
    export(tmp_path / "m", Function(asserting.forward))
    with pytest.raises(BundleError, match=r"asserting.py:7: forward decides by a tensor's values"):
        export(tmp_path / "m2", Function(asserting.decided))


class Reading(nn.Module):
    """Recurrent network that returns its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.network(x)[0][:, -1])


def test_a_recurrent_network_is_exported_as_a_loop(tmp_path: Path) -> None:
    """The exported module has a loop, and does not repeat the operations for each time step."""
    bundle = export(tmp_path / "m", Reading(), {"x": torch.rand(1, 100, 3)})
    assert (bundle.path / "model.b2.mlir").stat().st_size < 100 * 100


def test_zeros_become_integers_that_the_module_takes(tmp_path: Path) -> None:
    """If the example has only zeros, such as types of tokens, other integers that the module takes are compared as well."""
    bundle = export(tmp_path / "m", nn.Embedding(2, 3), {"input": torch.zeros(1, 4, dtype=torch.int64)})
    assert bundle.manifest.numerics["source"] == {"model.b2": 0.0}


def test_views_of_a_decomposed_result_are_exported(tmp_path: Path) -> None:
    """A view of a kernel's result is exported, whatever strides the kernel's decomposition returns."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(-1, 4, 2, 3).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return mixed.transpose(1, 2).reshape(-1, 4, 6).view(-1, 6).view(-1, 4, 6)

    bundle = export(tmp_path / "m", Function(forward), {"x": torch.rand(1, 4, 6)}, batch_sizes=[2, 3])
    assert bundle.manifest.outputs[0].dims == (-1, 4, 6)


def test_windows_over_the_memory_of_a_transposed_tensor_are_exported(tmp_path: Path) -> None:
    """`as_strided` is exported for a transposed tensor, whose memory has another order of axes, as in the windows of Longformer."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = (2 * x).transpose(1, 2)
        rows, columns, steps = y.stride()
        return y.as_strided((len(y), 3, 2, 5), (rows, 2 * columns, columns, steps))

    export(tmp_path / "m", Function(forward), {"x": torch.rand(1, 5, 7)}, batch_sizes=[2, 3])
    outside: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x[:, ::2].as_strided((len(x), 2), (7, 2)),
        lambda x: x[:, 1:].as_strided((len(x), 2), (7, 2)),
    ]
    for number, function in enumerate(outside):
        with pytest.raises(
            BundleError, match=r"as_strided.default reads memory outside of a tensor, .* contiguous"
        ):
            export(tmp_path / str(number), Function(function), {"x": torch.rand(1, 7)})


def test_a_convolution_without_padding_is_exported(tmp_path: Path) -> None:
    """A convolution with `padding="valid"` is exported, although torchax changes the list that it gets for this padding."""
    module = nn.Conv2d(1, 2, 3, padding="valid")
    bundle = export(tmp_path / "m", module, {"input": torch.rand(1, 1, 4, 5)})
    assert bundle.manifest.outputs[0].dims == (-1, 2, 2, 3)


class Caching(nn.Module):
    """Detection head that caches its grid for the last shape, and returns nested results and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: Any = None
        self.grids: dict[str, torch.Tensor] = {}
        self.register_buffer("padding", torch.tensor(1), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        x = nn.functional.pad(x, (0, int(self.get_buffer("padding"))))
        if self.shape != x.shape:
            self.shape, self.grids["last"] = x.shape, torch.arange(x.numel()).view(x.shape)
        return x * self.grids["last"], {"boxes": [x, x + 1], "count": 3}, None


def test_what_a_module_caches_for_a_shape_does_not_outlive_a_call(tmp_path: Path) -> None:
    """After each call and each trace, the module's attributes are as before. Nested results have names."""
    module = Caching()
    bundle = export(tmp_path / "m", module, batch_sizes=[1], outputs=["output_1_boxes_1", "output_0"])
    assert [spec.name for spec in bundle.manifest.outputs] == ["output_1_boxes_1", "output_0"]
    assert module.shape is None
    assert module.grids == {}


class Converting(nn.Module):
    """Module that converts a part to the type that the part already has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head = self.head.to(x.dtype)
        answer: torch.Tensor = self.head(x)
        return answer


def test_a_conversion_that_changes_nothing_is_exported(tmp_path: Path) -> None:
    """`self.head.to(dtype)` in forward is allowed if the head has that type already, as in models with routers."""
    assert len(export(tmp_path / "m", Converting()).weights) == 2


def test_an_operation_of_the_users_gets_its_lowering(tmp_path: Path) -> None:
    """A custom operation is exported with a JAX function that the user gives for it, and refused without such a function."""

    @torch.library.custom_op("rsrvtest::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    double.register_fake(torch.empty_like)
    with pytest.raises(BundleError, match=r"torchax has no rsrvtest.double.default"):
        export(tmp_path / "m", Function(double))
    for number, op in enumerate(("rsrvtest::double", double, torch.ops.rsrvtest.double.default)):
        export(tmp_path / str(number), Function(double), lowerings={op: lambda x: x + x})


@given(st.sampled_from(TOKENS), st.lists(st.integers(0, 3), max_size=3), st.binary(min_size=8, max_size=8))
def test_arrays_become_tensors_and_come_back(token: str, shape: list[int], bits: bytes) -> None:
    """Arrays of every element type and shape become tensors and come back, without shared memory."""
    dtype = numpy_dtype(token)
    count = int(np.prod(shape, dtype=int))
    source = np.frombuffer(bits * max(1, count), np.uint8)[: count * dtype.itemsize]
    array = (source & 1 if token == "bool" else source).view(dtype).reshape(shape)
    tensor = to_torch(array)
    assert tensor.dtype == dtype_of(dtype)
    back = to_numpy("x", tensor)
    assert back.dtype == dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    tensor.zero_()
    assert back.tobytes() == array.tobytes()


class Recurrent(nn.Module):
    """Cell whose state is an input and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, steps: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.cell(x, hidden)
        return {"hidden": hidden, "y": hidden.sum(1), "steps": steps + 1}


def test_a_module_with_state_is_exported(tmp_path: Path) -> None:
    """State that `forward` takes and returns by name becomes the state of sequences. The given values are its initial values."""
    state = {"hidden": torch.ones(4), "steps": torch.tensor(5)}
    bundle = export_stateful_torch(
        Recurrent().eval(), state, X, slots=8, batch_sizes=[2], out_dir=tmp_path / "m"
    )
    assert [spec.name for spec in bundle.manifest.outputs] == ["y"]
    assert bundle.manifest.state is not None
    assert [(tensor.name, tensor.dtype) for tensor in bundle.manifest.state.tensors] == [
        ("hidden", "f32"),
        ("steps", "i64"),
    ]
    assert {weight.name for weight in bundle.weights} == {
        f"cell.{kind}_{side}h" for kind in ("weight", "bias") for side in "ih"
    }
    with pytest.raises(
        BundleError, match="module: z: forward takes this state, and must return it by this name"
    ):
        export_stateful_torch(
            Forgetful().eval(), {"z": torch.zeros(3)}, X, slots=8, batch_sizes=[2], out_dir=tmp_path / "n"
        )


class Forgetful(nn.Module):
    """Module that does not return its state."""

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x + z}
