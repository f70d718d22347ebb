"""The padded axis of a bundle: its section of the manifest, and the proof that padding changes no answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from rsrv_bundle.cli import main
from rsrv_bundle.commands.samples import rows_of
from rsrv_bundle.errors import BundleError
from rsrv_bundle.export import export_bundle
from rsrv_bundle.numerics import TOLERANCE, Judge, ModuleRunner
from rsrv_bundle.padding import parse_pad
from rsrv_bundle.padding_check import check_padding
from rsrv_bundle.reader import read_bundle
from rsrv_bundle.spec import PadSpec
from rsrv_bundle.writer import document_of

TABLE = np.random.default_rng(0).standard_normal((100, 4)).astype(np.float32)
IDS = np.arange(24, dtype=np.int32).reshape(2, 12)


def attend(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Attention over the tokens that the mask keeps. Returns a vector for each token, and one for each row."""
    x = params[jnp.clip(ids, 0, 99)]
    scores = jnp.einsum("nqd,nkd->nqk", x, x) + jnp.where(mask == 0, -1e9, 0.0)[:, None, :]
    hidden = jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(scores), x)
    attended = (mask != 0)[:, :, None]
    return {"hidden": hidden, "mean": jnp.where(attended, hidden, 0).sum(1) / jnp.maximum(attended.sum(1), 1)}


def export(folder: Path, fn: Any = attend, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "batch_sizes": (1, 4),
        "axes": {"ids": "nt", "mask": "nt"},
        "input_shapes": [{"t": 4}, {"t": 6}, {"t": 9}],
        "pad": "t=0,mask=mask",
        "out_dir": folder / "m",
    }
    return export_bundle(fn, TABLE, {"ids": IDS, "mask": np.ones_like(IDS)}, **(options | changes))


def test_a_padded_axis_is_proven_at_export_and_written_into_the_manifest(tmp_path: Path) -> None:
    """The exporter tries padding with every variant, and names the outputs' axes.

    The section `pad` of the manifest is the same after it is read and written again.
    """
    bundle = export(tmp_path, pad="t=7,mask=mask")

    assert bundle.manifest.pad == PadSpec("t", {"ids": 7, "mask": 0}, "mask")
    assert [spec.letters for spec in bundle.manifest.outputs] == ["ntc", "na"]
    assert bundle.manifest.padded_axis(bundle.manifest.outputs[0]) == 1
    assert bundle.manifest.padded_axis(bundle.manifest.outputs[1]) is None
    errors = bundle.manifest.numerics["padding"]
    assert isinstance(errors, dict)
    assert len(errors) == 6
    assert max(errors.values()) < 1e-5
    assert document_of(bundle.manifest, {})["pad"] == {"t": {"values": {"ids": 7, "mask": 0}, "mask": "mask"}}


def test_the_padded_axis_may_come_before_the_batch_axis(tmp_path: Path) -> None:
    """Rows are padded and cut along the axis that the letters name."""

    def time_first(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        return {"hidden": attend(params, ids.T, mask.T)["hidden"].swapaxes(0, 1)}

    options = {"axes": {"ids": "tn", "mask": "tn"}, "input_shapes": [{"t": 2}, {"t": 4}], "batch_sizes": (2,)}
    bundle = export(tmp_path, time_first, **options)

    (hidden,) = bundle.manifest.outputs
    assert (hidden.batch_axis, bundle.manifest.padded_axis(hidden)) == (1, 0)
    assert max(bundle.manifest.numerics["padding"].values()) < 1e-5


def test_the_padded_axis_is_shown_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` prints the padded axis. `diff` reports that two bundles have different values for the padding."""
    export(tmp_path)
    export(tmp_path, out_dir=tmp_path / "other", pad="t=7,mask=mask")

    assert main(["show", str(tmp_path / "m")]) == 0
    assert "Padded axis" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "m"), str(tmp_path / "other")]) == 1
    assert "pad.t: " in capsys.readouterr().out


def test_samples_of_any_length_are_padded_as_requests_are(tmp_path: Path) -> None:
    """A sample is padded to the smallest variant that holds it. A sample that is too long is refused."""
    bundle = export(tmp_path, pad="t=7,mask=mask")
    ids = IDS[:, :5]
    ((variant, (padded, mask)),) = rows_of(bundle, {"ids": ids, "mask": np.ones_like(ids)}).items()
    assert variant == 1
    assert padded.tolist() == [[*row, 7] for row in ids.tolist()]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 0]] * 2
    with pytest.raises(BundleError, match=r"a sample is int32 \[1, 12\]"):
        rows_of(bundle, {"ids": IDS, "mask": np.ones_like(IDS)})


def ignores_the_mask(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    return attend(params, ids, jnp.ones_like(mask))


def trusts_the_pad_value(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Return the sum over ids, and ignore the mask. Padding changes the sum unless all pad values are zero."""
    return {"sum": ids.sum(1).astype(jnp.float32) + 0 * mask.sum(1)}


def counts_the_axis(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    return {"mean": (ids * mask).sum(1) / ids.shape[1] + params[0, 0]}


def fails_at_odd_lengths(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    pairs = (ids * mask).reshape(len(ids), ids.shape[1] // 2, 2)
    return {"sum": pairs.sum((1, 2)).astype(jnp.float32)}


def halves(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    return {"half": (ids * mask)[:, ::2].astype(jnp.float32)}


@pytest.mark.parametrize(
    ("fn", "changes", "problem"),
    [
        (ignores_the_mask, {}, r"a row of t=2 changes with padding behind it"),
        (trusts_the_pad_value, {}, r"changes with random values behind it.*the mask must hide it"),
        (counts_the_axis, {}, r"changes with padding"),
        (
            fails_at_odd_lengths,
            {"input_shapes": [{"t": 4}, {"t": 8}]},
            r"the model fails at t=1 .*leave pad out",
        ),
        (halves, {}, r"outputs: half: padding cannot be cut from its shape"),
        (attend, {"input_shapes": [{"t": 4}]}, "with two lengths or more"),
        (attend, {"pad": "q=0"}, "needs one axis that varies"),
        (attend, {"pad": "t"}, "write LETTER=VALUE"),
        (attend, {"pad": "t=0,mask=nobody"}, "no input with the axis 't' is called 'nobody'"),
        (attend, {"pad": "t=0.5,mask=mask"}, "must be a whole number that fits i32"),
        (attend, {"platform": "cuda"}, "runs the modules, which are for cuda"),
        (
            attend,
            {"axes": {"ids": "nt", "mask": "nt", "hidden": "nxd"}},
            "'nxd' must have the letter t for the axis",
        ),
    ],
)
def test_an_axis_whose_padding_may_change_an_answer_is_refused(
    tmp_path: Path, fn: Any, changes: dict[str, Any], problem: str
) -> None:
    """If padding may change an answer, the error names the fault, and no bundle is written."""
    with pytest.raises(BundleError, match=problem):
        export(tmp_path, fn, **changes)
    assert not (tmp_path / "m").exists()


def test_without_a_mask_the_pad_value_alone_must_change_nothing(tmp_path: Path) -> None:
    """If padding with zeros changes no answer, the model needs no mask. Without a mask, the check tries no random padding."""
    bundle = export(tmp_path, trusts_the_pad_value, pad="t=0,mask=0")
    assert bundle.manifest.pad == PadSpec("t", {"ids": 0, "mask": 0}, None)


def test_a_check_of_the_bundle_alone_compares_the_variants(tmp_path: Path) -> None:
    """Without the original model, padded rows are compared with the answers of the smallest variant that holds them."""
    bundle = export(tmp_path)
    judge = Judge(bundle, TOLERANCE)
    check_padding(ModuleRunner(bundle), judge)
    judge.raise_if_any()
    assert set(judge.errors) == {"padding"}


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ([], "must map the letter of one axis"),
        ({"t": {"values": {"ids": 0, "mask": 0}, "fill": 1}}, "pad.t.fill: unknown key"),
        (
            {"a": {"values": {"ids": 0, "mask": 0}}},
            "'a' must be the only axis of size -1 of the inputs; these are t",
        ),
        ({"t": {"values": {"ids": 0}}}, "must give a value for each input with the axis: ids, mask"),
        ({"t": {"values": {"ids": "0", "mask": 0}}}, "pad.t.values.ids: must be a number"),
        ({"t": {"values": {"ids": 2**31, "mask": 0}}}, "must be a whole number that fits i32"),
        ({"t": {"values": {"ids": 0, "mask": 0}, "mask": "hidden"}}, "pad.t.mask: names no input"),
        ({"t": {"values": {"ids": 0, "mask": 0}, "mask": ["mask"]}}, "pad.t.mask: names no input"),
    ],
)
def test_a_wrong_section_is_reported_with_its_key(tmp_path: Path, section: Any, problem: str) -> None:
    """If the section `pad` of a manifest is wrong, the error names the key and the rule."""
    export(tmp_path)
    file = tmp_path / "m" / "manifest.yaml"
    document = yaml.safe_load(file.read_text())
    document["pad"] = section
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(BundleError) as raised:
        read_bundle(tmp_path / "m")
    assert any(problem in line for line in raised.value.problems), raised.value.problems


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [("f16", 1e6, False), ("f32", 10**400, False), ("bf16", 1e39, False), ("f16", float("-inf"), True)],
)
def test_a_pad_value_fits_the_type_of_its_input(tmp_path: Path, dtype: str, value: float, fits: bool) -> None:
    """A pad value that does not fit its input's type is refused, because the runtime would fail each execution."""
    manifest = export(tmp_path).manifest
    ids, mask = manifest.inputs
    manifest = replace(manifest, inputs=(replace(ids, dtype=dtype), mask))
    problems: list[str] = []
    parse_pad({"t": {"values": {"ids": value, "mask": 0}}}, manifest, lambda key, _: problems.append(key))
    assert problems == ([] if fits else ["pad.t.values.ids"])
