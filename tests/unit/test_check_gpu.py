"""The recorded figures of modules that are compiled for GPUs, and the comparison in `make check-gpu`."""

from dataclasses import replace

import check_gpu as tool
from rsrv.cards import CARDS

RECORDED = tool.FIGURES.read_text(encoding="utf-8")
ROW = tool.Figures("m/b1", "h100", "auto", 0, temporaries=10, kernels=2, tf32=3, library=1, library_f32=0)


def test_the_recorded_figures_prove_what_the_policies_promise() -> None:
    """With the policy f32, no product is computed in TF32 or with a precision that a library chooses. A T4 never uses TF32."""
    figures = tool.read(RECORDED)
    assert {row.card for row in figures} == CARDS.keys()
    assert not list(tool.faults(figures))
    # TF32 is found in the kernels of every card that has it, so the reader of kernels works.
    assert {row.card for row in figures if row.tf32} == CARDS.keys() - {"t4"}


def test_the_recorded_figures_of_narrow_weights_prove_what_the_page_says() -> None:
    """With weights in bf16 and i8, the arguments of a module take about a half and a quarter of the bytes with f32.

    Intermediate results take no more memory than with f32.
    """
    lines = tool.NARROW_FIGURES.read_text(encoding="utf-8").splitlines()[2:]
    rows = {tuple(cells[:4]): list(map(int, cells[4:])) for cells in (line.split(",") for line in lines)}
    assert {key[0] for key in rows} == set(tool.NARROWED)
    assert {key[3] for key in rows} == set(tool.NARROW_CARDS)
    for (bundle, weights, compute, card), (untiled, arguments, temporaries, _) in rows.items():
        _, wide_arguments, wide_temporaries, _ = rows[bundle, "f32", compute, card]
        if weights in ("bf16", "i8"):
            share = arguments / wide_arguments
            assert share < (0.6 if weights == "bf16" else 0.4)
            # For products that XLA leaves to cuBLAS, the weights are converted to wide copies.
            assert untiled or temporaries <= 1.01 * wide_temporaries
        if bundle == "minilm_encoder" and compute != "f32":
            assert temporaries < 0.6 * rows[bundle, weights, "f32", card][2]


def test_a_product_that_escapes_the_policy_fails_without_any_record() -> None:
    """A product that breaks the policy is reported as a fault, even if no figures were recorded."""
    assert not list(tool.faults([ROW]))
    (kernel,) = tool.faults([replace(ROW, numerics="f32", library=0)])
    (call,) = tool.faults([replace(ROW, numerics="f32", tf32=0)])
    (card,) = tool.faults([replace(ROW, card="t4")])
    assert "not pinned" in kernel
    assert "not pinned" in call
    assert "no TF32" in card


def test_a_changed_figure_is_a_line_of_a_diff_beside_the_versions() -> None:
    """Changed figures are reported as lines of a diff, together with the versions if these have changed.

    Changed versions alone are not reported. Modules that this run has not compiled are not compared.
    """
    recorded = tool.write("# jax 1", [ROW, replace(ROW, module="m/b8")])
    assert tool.differences(recorded, "# jax 2", [ROW]) == []
    lines = tool.differences(recorded, "# jax 2", [replace(ROW, temporaries=11)])
    assert "-m/b1,h100,auto,0,10,2,3,1,0" in lines
    assert "+m/b1,h100,auto,0,11,2,3,1,0" in lines
    assert not any("m/b8" in line for line in lines)
    assert {"-# jax 1", "+# jax 2"} <= set(lines)


def test_a_module_without_a_record_is_a_difference() -> None:
    """A module without recorded figures, for example of a new bundle, is reported as a difference."""
    assert "+m/b1,h100,auto,0,10,2,3,1,0" in tool.differences(tool.write("#", []), "#", [ROW])


def test_each_bundle_is_compiled_at_its_largest_size_once() -> None:
    """Each module is compiled once, at its largest size. Several golden bundles contain the same modules."""
    names = [name for name in tool.modules() if name.startswith(("affine/", "hooks/", "variants/", "types/"))]
    assert sorted(names) == ["affine/b4", "types/only", "variants/v1.b2"]
