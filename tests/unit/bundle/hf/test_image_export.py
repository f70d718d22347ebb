"""Directories with models for pictures become bundles whose whole answers are those of transformers' pipelines."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from rsrv.hooks import BadInput
from rsrv_bundle import BundleError
from rsrv_bundle.hf.export import export_hf
from rsrv_bundle.hf.proof import ServedBundle
from rsrv_bundle.hf.recipe import HubOptions, row
from tests.unit.bundle.hf.directories import PATCHES, detr, picture, plain

pytestmark = pytest.mark.long

QUICK = HubOptions(batch_sizes=(2,))
Make = Callable[[Path], Path]
SQUARE = {"size": {"height": 32, "width": 32}}
EDGE = {"size": {"shortest_edge": 40}, "crop_size": {"height": 28, "width": 32}}
STAGES = {"depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
#: Sizes of a DPT. The network has an output for each pixel.
DENSE: dict[str, Any] = {
    **PATCHES,
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8, 8, 8, 8],
    "fusion_hidden_size": 8,
}

DIRECTORIES: dict[str, tuple[str, Make]] = {
    "ViT": (
        "image-classification",
        lambda f: picture(f, "ViTForImageClassification", "ViT", SQUARE, **PATCHES),
    ),
    "ConvNeXT, enlarged and cropped": (
        "image-classification",
        lambda f: picture(
            f,
            "ConvNextForImageClassification",
            "ConvNext",
            {"size": {"shortest_edge": 32}},
            hidden_sizes=[8, 16, 16, 24],
            depths=[1, 1, 1, 1],
        ),
    ),
    "ResNet, shorter side and crop": (
        "image-classification",
        lambda f: picture(
            f,
            "ResNetForImageClassification",
            "Bit",
            EDGE,
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
        ),
    ),
    "ViT embeds": ("feature-extraction", lambda f: picture(f, "ViTModel", "ViT", SQUARE, **PATCHES)),
    "DINOv2 embeds": (
        "feature-extraction",
        lambda f: picture(f, "Dinov2Model", "Bit", EDGE, **{**PATCHES, "patch_size": 4}),
    ),
    "DeiT embeds": (
        "feature-extraction",
        lambda f: picture(
            f,
            "DeiTModel",
            "DeiT",
            {"size": {"height": 36, "width": 37}, "crop_size": {"height": 32, "width": 32}},
            **PATCHES,
        ),
    ),
    "YOLOS": (
        "object-detection",
        lambda f: picture(
            f,
            "YolosForObjectDetection",
            "Yolos",
            SQUARE,
            **{**PATCHES, "image_size": [32, 32]},
            num_detection_tokens=9,
        ),
    ),
    "SegFormer": (
        "image-segmentation",
        lambda f: picture(
            f, "SegformerForSemanticSegmentation", "Segformer", SQUARE, hidden_sizes=[8, 16, 16, 16], **STAGES
        ),
    ),
    "DPT segments": (
        "image-segmentation",
        lambda f: picture(f, "DPTForSemanticSegmentation", "DPT", SQUARE, **DENSE),
    ),
    "MobileViT, blue before red": (
        "image-segmentation",
        lambda f: picture(
            f,
            "MobileViTForSemanticSegmentation",
            "MobileViT",
            {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
            hidden_sizes=[16, 24, 24],
            neck_hidden_sizes=[8, 8, 12, 12, 16, 16, 32],
            image_size=32,
            aspp_out_channels=16,
            intermediate_size=16,
            num_attention_heads=2,
            atrous_rates=[1, 2, 3],
        ),
    ),
    "DPT": (
        "depth-estimation",
        lambda f: picture(f, "DPTForDepthEstimation", "DPT", SQUARE, **DENSE),
    ),
}


def damped(folder: Path) -> Path:
    """Divide the kernels of convolutions by the root of the number of their inputs.

    Otherwise, sums of large numbers would magnify each rounding.
    """
    weights = load_file(folder / "model.safetensors")
    for weight in weights.values():
        if weight.ndim == 4:
            weight *= (weight.shape[3] / weight[0].numel()) ** 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


#: Directories whose processors make pictures of different sizes.
RESIZED: dict[str, Make] = {
    "Depth Anything over DINOv2": lambda f: picture(
        f,
        "DepthAnythingForDepthEstimation",
        "DPT",
        {**SQUARE, "ensure_multiple_of": 4, "keep_aspect_ratio": True},
        transformers.Dinov2Config(
            **{
                **PATCHES,
                "patch_size": 4,
                "num_hidden_layers": 4,
                "out_indices": [1, 2, 3, 4],
                "reshape_hidden_states": False,
            }
        ),
        reassemble_hidden_size=32,
        patch_size=4,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        head_hidden_size=8,
    ),
    "GLPN": lambda f: damped(
        picture(
            f,
            "GLPNForDepthEstimation",
            "GLPN",
            {},
            hidden_sizes=[8, 16, 16, 16],
            decoder_hidden_size=8,
            **STAGES,
        )
    ),
}


@pytest.mark.parametrize(("kind", "make"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_a_directory_becomes_a_bundle(kind: str, make: Make, tmp_path: Path) -> None:
    """The directory decides the task. For all sample pictures, the bundle gives the pipeline's answers."""
    manifest = export_hf(make(tmp_path / "model"), out_dir=tmp_path / "bundle", options=QUICK).manifest
    assert manifest.task is not None
    assert manifest.task.kind == kind
    errors = manifest.numerics["answers"]
    assert isinstance(errors, dict)
    assert 0 <= max(errors.values()) < 1e-5


@pytest.mark.parametrize("make", RESIZED.values(), ids=RESIZED)
def test_depths_have_the_size_of_the_user(make: Make, tmp_path: Path) -> None:
    """The processors of these models make pictures of different sizes, so the export is refused unless the user gives a size.

    The size must be a multiple of the processor's step.
    """
    made = make(tmp_path / "model")
    for size, reason in ((), "--image-size HEIGHT,WIDTH"), ((33, 32), r"multiples of \d+, but 33,32 are not"):
        with pytest.raises(BundleError, match=reason):
            export_hf(made, out_dir=tmp_path / "bundle", options=replace(QUICK, image_size=size))
    sized = replace(QUICK, image_size=(32, 64))
    manifest = export_hf(made, out_dir=tmp_path / "bundle", options=sized).manifest
    assert manifest.outputs[0].dims == (-1, 32, 64)
    errors = manifest.numerics["answers"]
    assert isinstance(errors, dict)
    assert 0 <= errors["map"] < 1e-5


def test_pictures_of_many_sizes_are_answered_and_bombs_are_not(tmp_path: Path) -> None:
    """A detector answers for pictures of other sizes than its own. A picture of too many pixels or of another format is refused."""
    made = DIRECTORIES["YOLOS"][1](tmp_path / "model")
    served = ServedBundle(export_hf(made, out_dir=tmp_path / "bundle", options=QUICK))
    answers = [
        json.loads(served(row(image=file(*size)))["detections"][0, 0]) for size in ((32, 32), (90, 50))
    ]
    assert answers[0]
    assert {key for detection in answers[1] for key in detection} == {"score", "label", "box"}
    with pytest.raises(BadInput, match="more than 50000000 pixels"):
        served(row(image=file(10_000, 8_000)))
    with pytest.raises(BadInput, match="image 0 is not a JPEG, PNG or WebP file"):
        served(row(image=b"GIF89a"))


def file(width: int, height: int) -> bytes:
    """Return a PNG file of random pixels, or of one colour if it is large. A file of one colour has few bytes."""
    stream = io.BytesIO()
    if width * height < 100_000:
        noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(noise).save(stream, "PNG")
    else:
        Image.new("1", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def test_pictures_that_keep_their_proportions_need_a_size(tmp_path: Path) -> None:
    """The network is compiled for one size. So a processor that keeps proportions is refused until the user gives a size."""
    sizes = {"size": {"shortest_edge": 32, "longest_edge": 64}}
    config = {**PATCHES, "image_size": [32, 48]}
    made = picture(
        tmp_path / "model", "YolosForObjectDetection", "Yolos", sizes, **config, num_detection_tokens=5
    )
    with pytest.raises(BundleError, match="pass --image-size HEIGHT,WIDTH"):
        export_hf(made, out_dir=tmp_path / "bundle", options=QUICK)
    sized = HubOptions(batch_sizes=(2,), image_size=(32, 48))
    assert export_hf(made, out_dir=tmp_path / "bundle", options=sized).manifest.inputs[0].dims == (
        -1,
        3,
        32,
        48,
    )


@pytest.mark.parametrize("family", ["Detr", "TableTransformer"])
def test_a_detector_with_a_mask_keeps_proportions(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures for a detector with a mask are padded to one size. The network ignores the padding, as in the pipeline."""
    options = HubOptions(batch_sizes=(2,), image_size=(64, 96))
    bundle = export_hf(detr(tmp_path / "model", family), out_dir=tmp_path / "bundle", options=options)
    assert "is empty for all samples" not in capsys.readouterr().err
    together = np.concatenate([row(image=file(*size))["image"] for size in ((90, 20), (30, 60))])
    served = ServedBundle(bundle)
    first, second, alone = (
        [detection["score"] for detection in json.loads(answer)]
        for pictures in (together, together[1:])
        for answer in served({"image": pictures})["detections"][:, 0]
    )
    assert second == pytest.approx(alone, abs=1e-5)
    assert first != pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("architecture", "kind", "reason"),
    [
        ("DeformableDetrForObjectDetection", "deformable_detr", "is none of detr, table-transformer, yolos"),
        ("ZoeDepthForDepthEstimation", "zoedepth", "is none of dpt, depth_anything, glpn"),
        ("MaskFormerForInstanceSegmentation", "maskformer", "is not a ...ForSemanticSegmentation"),
        ("Mask2FormerForUniversalSegmentation", "mask2former", "is not a ...ForSemanticSegmentation"),
        ("DetrForSegmentation", "detr", "is not a ...ForSemanticSegmentation"),
    ],
)
def test_other_networks_are_refused(architecture: str, kind: str, reason: str, tmp_path: Path) -> None:
    """Networks whose answers rsrv cannot compute are refused by name before their weights are read."""
    config = {"architectures": [architecture], "model_type": kind}
    made = plain(tmp_path / "model", **{"config.json": json.dumps(config)})
    with pytest.raises(BundleError, match=f"'({architecture}|{kind})' {re.escape(reason)}"):
        export_hf(made, out_dir=tmp_path / "bundle")


def test_pictures_of_the_user_are_compared(tmp_path: Path) -> None:
    """A user's sample may be a picture of another size than the model's, or a picture that EXIF rotates.

    If a sample is not a picture, the error names the sample.
    """
    lying = Image.open(io.BytesIO(file(40, 20)))
    exif = lying.getexif()
    exif[0x112] = 6
    lying.convert("RGB").save(tmp_path / "lying.jpg", exif=exif)
    for kind in ("DPT", "ViT"):
        options = HubOptions(batch_sizes=(2,), samples=[tmp_path / "lying.jpg"])
        export_hf(
            DIRECTORIES[kind][1](tmp_path / kind),
            out_dir=tmp_path / "bundle",
            options=options,
            overwrite=True,
        )
    (tmp_path / "no.jpg").write_bytes(b"text")
    options = HubOptions(batch_sizes=(2,), samples=[tmp_path / "no.jpg"])
    with pytest.raises(BundleError, match=r"no\.jpg': the hooks refuse it: image 0 is not a JPEG"):
        export_hf(tmp_path / "ViT", out_dir=tmp_path / "bundle", options=options, overwrite=True)
