"""Recipes for models of pictures: classes, embeddings, objects, segments and depth."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from rsrv_bundle.errors import BundleError, summary
from rsrv_bundle.hf.directory import Directory
from rsrv_bundle.hf.loading import load_model
from rsrv_bundle.hf.recipe import Array, HubOptions, HubRecipe, Request, label_scores, row, value

#: Pillow's filters. The index of a filter is its number in preprocessor_config.json.
_FILTERS: Final = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
#: Options of a processor that `_PictureSteps` does not cover. They are refused.
_UNKNOWN: Final = (
    "do_reduce_labels_on_images",
    "do_pan_and_scan",
    "do_image_splitting",
)
_THRESHOLD = 0.5
#: Supported values of model_type for depth estimation. transformers scales the depths of these networks to the size of the picture by
#: bicubic interpolation.
_DEPTHS: Final = ("dpt", "depth_anything", "glpn")
_OWN_HOOKS: Final = "export the network with rsrv_bundle.from_torch.export_torch, and hooks of yours"
#: Maximum number of pixels of a side of the network's input.
_MAX_SIDE: Final = 4096


@dataclass(frozen=True, slots=True)
class _PictureSteps:
    """The steps from a picture to an input of the network: resize it, crop its middle, and scale its values."""

    #: Height and width after resizing, or None if pictures are resized by their shorter side.
    size: tuple[int, int] | None
    #: Pixels of the shorter side after resizing if `size` is None.
    shorter: int
    #: True if pictures keep their proportions in `size`. A mask tells the network which pixels are padding.
    fitted: bool
    #: Height and width after cropping, or None if nothing is cropped.
    crop: tuple[int, int] | None
    resample: str
    #: True if the network takes the channels in reverse order: blue, green, red.
    flipped: bool
    # Each channel is scaled: (pixel / 255 - mean) / std.
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the network's input."""
        size = self.crop or self.size
        assert size is not None
        return size

    @property
    def code(self) -> str:
        """Return the lines of `preprocess` that convert `pictures` to `pixels`."""
        how = f'resample="{self.resample}"'
        flip = "[..., ::-1]" if self.flipped else ""
        if self.fitted:
            fit = f"    pixels, extents = image.fit(pictures, {self.size}, {how})\n"
            return fit + (f"    pixels = pixels{flip}\n" if flip else "")
        if self.size is None:
            call = f'image.resize_crop(pictures, {self.shorter}, {self.crop}, {how}, rounding="transformers")'
        else:
            call = f"image.resize(pictures, {self.size}, {how})"
            if self.crop is not None and self.crop != self.size:
                call = f"image.crop({call}, {self.crop})"
        return f"    pixels = {call}{flip}\n"


def _steps(processor: Any, options: HubOptions, masked: bool) -> _PictureSteps:
    """Return the steps of a processor of transformers. Raises BundleError for a step without a hook.

    masked: True if the network takes a mask of the pixels that are not padding.
    """
    get: Callable[[str], Any] = lambda name: getattr(processor, name, None)
    where = "preprocessor_config.json"
    for name in _UNKNOWN:
        if get(name):
            raise BundleError(f"{where}: {name}: rsrv has no hook for this step")
    size = _sides("size", get("size"))
    if get("do_pad"):
        _sides("pad_size", get("pad_size"))
    fitted = bool(options.image_size and masked and get("do_pad"))
    if options.image_size:
        if len(options.image_size) != 2:
            raise BundleError("--image-size: give a height and a width, such as 480,640")
        size = dict(zip(("height", "width"), options.image_size, strict=True))
        processor.size = size
        if fitted:
            processor.size = {f"max_{side}": pixels for side, pixels in size.items()}
            processor.pad_size = size
        for step in ("do_center_crop", "keep_aspect_ratio", *(() if fitted else ("do_pad",))):
            if get(step) is not None:
                setattr(processor, step, False)
        _sides("size", size)
    crop = _sides("crop_size", get("crop_size")) if get("do_center_crop") else {}
    exact = (size["height"], size["width"]) if size.keys() == {"height", "width"} else None
    cropped = (crop["height"], crop["width"]) if crop.keys() == {"height", "width"} else None
    shorter = size.get("shortest_edge", 0)
    if "crop_pct" in dir(processor) and shorter:
        # For small sizes, ConvNeXT resizes pictures to a larger size and crops them. For large sizes, it stretches pictures to
        # the size.
        if shorter < 384:
            cropped, shorter = (shorter, shorter), int(shorter / processor.crop_pct)
        else:
            exact = (shorter, shorter)
    proportional = exact is None and (cropped is None or size.keys() != {"shortest_edge"})
    if not get("do_resize") or proportional or get("keep_aspect_ratio"):
        raise BundleError(
            f"{where}: size: {json.dumps(size)} gives pictures of different sizes, and the network is compiled for one; pass"
            " --image-size HEIGHT,WIDTH to resize all pictures to that"
        )
    if exact is None and cropped is not None and max(cropped) > shorter:
        raise BundleError(f"{where}: crop_size: {json.dumps(crop)} is larger than the resized pictures")
    for name in ("ensure_multiple_of", "size_divisor"):
        step = int(get(name) or 1)
        if exact is not None and step > 1 and any(side % step for side in exact):
            raise BundleError(
                f"{where}: {name}: all sides must be multiples of {step}, but {exact[0]},{exact[1]} are not; pass another --image-size"
            )
    factor = float(get("rescale_factor") or 1 / 255) if get("do_rescale") else 1.0
    mean, std = (get("image_mean"), get("image_std")) if get("do_normalize") else (0.0, 1.0)
    scale = 255 * factor
    return _PictureSteps(
        exact,
        shorter,
        fitted,
        cropped,
        _FILTERS[int(get("resample") if get("resample") is not None else 2)],
        bool(get("do_flip_channel_order")),
        tuple(float(number) / scale for number in _channels(mean)),
        tuple(float(number) / scale for number in _channels(std)),
    )


def _sides(name: str, size: Any) -> dict[str, int]:
    """Return the sides in an entry of the processor, such as height and width. Raises BundleError if a side is out of range."""
    entries = dict(size) if isinstance(size, Mapping) else vars(size) if hasattr(size, "__dict__") else {}
    sides = {name: int(side) for name, side in entries.items() if side}
    if wrong := [side for side in sides.values() if not 0 < side <= _MAX_SIDE]:
        raise BundleError(
            f"preprocessor_config.json: {name}: {wrong[0]!s:.20} pixels must be from 1 to {_MAX_SIDE:,}"
        )
    return sides


def _channels(numbers: Any) -> tuple[float, ...]:
    return tuple(numbers) if isinstance(numbers, list | tuple) else (float(numbers),) * 3


class _ImageNetwork(nn.Module):
    """A network that reads pixels.

    `answer` takes the network's output, and the height and width of the pixels. It returns the bundle's outputs.
    """

    def __init__(self, network: nn.Module, answer: Callable[[Any, Any], dict[str, Any]]) -> None:
        super().__init__()
        self.network = network
        self.answer = answer

    def forward(self, pixel_values: Any, sizes: Any = None, extents: Any = None) -> dict[str, Any]:
        given = {"pixel_values": pixel_values}
        if extents is not None:
            # The picture is in the first rows and columns. As in transformers, the padding is zero after the normalisation.
            height, width = pixel_values.shape[-2:]
            rows, columns = (torch.arange(height) < extents[:, :1]), (torch.arange(width) < extents[:, 1:])
            mask = rows[:, :, None] & columns[:, None]
            given = {"pixel_values": pixel_values * mask[:, None], "pixel_mask": mask.long()}
        outputs = self.answer(self.network(**given), pixel_values.shape[-2:])
        # Return the sizes of the pictures, because the hook needs them to convert shares of a picture to pixels.
        return outputs if sizes is None else {**outputs, "sizes": sizes + 0}


class Pictures:
    """Parts that all recipes for pictures share: the processor's steps, samples and hooks."""

    def __init__(self, directory: Directory, options: HubOptions, *, masked: bool = False) -> None:
        """`masked` is True if the network takes a mask of the pixels that are not padding."""
        try:
            from transformers import AutoImageProcessor

            loader: Any = AutoImageProcessor
            # Use Pillow, because the hooks also use it. The results of torchvision differ in some pixels.
            self.processor = loader.from_pretrained(
                str(directory.path), local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except Exception as e:
            raise BundleError(f"preprocessor_config.json: transformers cannot read it: {summary(e)}") from e
        if options.lengths:
            raise BundleError("--lengths: is for texts and sounds; leave it out")
        self.steps = _steps(self.processor, options, masked)

    def recipe(
        self,
        kind: str,
        network: nn.Module,
        answer: Callable[[Any, Any], dict[str, Any]],
        ask: Any,
        reference: Callable[[Any], Any],
        output: str,
        *,
        post: str = "",
        exact: bool = False,
        **others: Any,
    ) -> HubRecipe:
        """Return the recipe of a network with one output.

        `ask` is the pipeline, and `reference` converts its answer to the output. `post` is the code of
        `postprocess`, which then gets the sizes of the pictures. With `exact`, all samples have the size of the network's input.
        """
        sized = ', "sizes": image.sizes(pictures)' if post else ""
        sized += ', "extents": extents' if self.steps.fitted else ""
        hooks = (
            f'"""Hooks of a model for {kind}: pictures to pixels."""\n\n'
            f"from rsrv.hooks import {'boxes, image, text' if post else 'image'}\n\n"
            f"MEAN = {self.steps.mean}\nSTD = {self.steps.std}\n\n\n"
            'def preprocess(inputs):\n    pictures = image.decode(inputs["image"])\n'
            f"{self.steps.code}"
            f'    return {{"pixel_values": image.normalise(pixels, MEAN, STD){sized}}}\n{post}'
        )
        return HubRecipe(
            kind=kind,
            module=_ImageNetwork(network, answer).eval(),
            axes={"pixel_values": "nchw"},
            hooks=hooks,
            inputs=("image",),
            outputs=(output,),
            samples=self.samples(exact),
            picture_size=self.steps.shape if exact else None,
            reference=lambda request: {output: reference(ask(_opened(request)))},
            **others,
        )

    def samples(self, exact: bool = False) -> dict[str, Request]:
        """Return pictures as files of several formats and sizes. With `exact`, all have the size of the network's input."""
        high, wide = self.steps.shape
        forms = {
            "square": (high, wide, "RGB", "PNG"),
            "JPEG": (high, wide, "RGB", "PNG" if exact else "JPEG"),
            "wide": (high + 37, 2 * wide + 11, "RGB", "JPEG"),
            "high": (2 * high + 3, wide + 18, "RGB", "PNG"),
            "small": (max(4, high // 3), max(4, wide // 3), "RGB", "PNG"),
            "grey": (high + 1, wide, "L", "PNG"),
        }
        return {
            name: row(image=_picture(number, *((high, wide) if exact else (height, width)), mode, kind))
            for number, (name, (height, width, mode, kind)) in enumerate(forms.items())
        }


def _picture(seed: int, height: int, width: int, mode: str, kind: str) -> bytes:
    """Return the file of a picture: waves of several colours, with rectangles and noise."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [
        np.sin(x / rng.uniform(3, 30) + y / rng.uniform(3, 30) + phase) for phase in rng.uniform(0, 6, 3)
    ]
    pixels = 128 + 70 * np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    for _ in range(3):
        top, left = rng.integers(0, height), rng.integers(0, width)
        pixels[top : top + height // 3, left : left + width // 3] = rng.integers(0, 255, 3)
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode)
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def _opened(request: Request) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(value(request, "image")))


def _ask(kind: str, network: Any, pictures: Pictures, **options: Any) -> Any:
    from transformers import pipeline

    make: Any = pipeline
    return make(kind, model=network, image_processor=pictures.processor, device="cpu", **options)


def classify(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for a classifier of pictures."""
    from transformers import AutoModelForImageClassification

    network = load_model(AutoModelForImageClassification, directory)
    pictures = Pictures(directory, options)
    labels = directory.labels
    multi = directory.config.get("problem_type") == "multi_label_classification" or len(labels) == 1
    activation = nn.Sigmoid() if multi else nn.Softmax(-1)
    return pictures.recipe(
        "image-classification",
        network,
        lambda output, _: {"scores": activation(output.logits.float())},
        _ask("image-classification", network, pictures, top_k=len(labels)),
        lambda answer: label_scores(answer, labels),
        "scores",
        labels=labels,
    )


def embed(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for embeddings of pictures."""
    from transformers import AutoModel

    network = load_model(AutoModel, directory)
    pictures = Pictures(directory, options)
    with torch.no_grad():
        output = network(pixel_values=torch.zeros(1, 3, *pictures.steps.shape))
    pooler = getattr(output, "pooler_output", None) is not None
    pooling = options.pooling or ("pooler" if pooler else "cls")
    pools: dict[str, Callable[[Any], Any]] = {"cls": lambda x: x[..., 0, :], "mean": lambda x: x.mean(-2)}
    if pooling == "last":
        raise BundleError("--pooling: a picture has no last token; choose mean or cls")

    def answer(output: Any, _: Any) -> dict[str, Any]:
        if pooling == "pooler":
            return {"embedding": output.pooler_output.flatten(1).float()}
        return {"embedding": pools[pooling](output.last_hidden_state).float()}

    def reference(answer: Any) -> Array:
        vectors = np.array(answer, np.float32)[0]
        vector: Array = vectors.reshape(-1) if pooling == "pooler" else pools[pooling](vectors)
        return vector

    ask = _ask("image-feature-extraction", network, pictures, pool=pooling == "pooler")
    recipe = pictures.recipe("feature-extraction", network, answer, ask, reference, "embedding")
    source = "the model's own pooling" if pooling == "pooler" else "the vector of the first token"
    note = (
        ""
        if options.pooling
        else f"the embedding is {source}; rsrv-bundle export --pooling cls or mean makes another"
    )
    return replace(recipe, note=note)


#: Values of model_type of detectors with a softmax over the classes and "no object".
DETECTORS: Final = ("detr", "table-transformer", "yolos")
#: Code of the hooks. The labels are inserted as literals, so that they cannot become code.
_OBJECTS = """

LABELS = {labels!r}
THRESHOLD = {threshold}


def postprocess(outputs):
    parts = (outputs[name] for name in ("scores", "boxes", "sizes"))
    return {{"detections": text.as_json(boxes.detections(*parts, LABELS, threshold=THRESHOLD))}}
"""


def detect(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for a detector of objects, such as DETR or YOLOS."""
    from transformers import AutoModelForObjectDetection

    kind = directory.config.get("model_type")
    if kind not in DETECTORS:
        raise BundleError(
            f"config.json: model_type: {kind!r:.40} is none of {', '.join(DETECTORS)}, whose answers rsrv makes; {_OWN_HOOKS}"
        )
    network = load_model(AutoModelForObjectDetection, directory)
    masked = "pixel_mask" in inspect.signature(network.forward).parameters
    pictures = Pictures(directory, options, masked=masked)
    # Names may be equal, because several classes of COCO are called N/A.
    labels = directory.label_list()
    return pictures.recipe(
        "object-detection",
        network,
        lambda output, _: {"scores": output.logits.float().softmax(-1), "boxes": output.pred_boxes.float()},
        _ask("object-detection", network, pictures, threshold=_THRESHOLD),
        lambda answer: answer,
        "detections",
        post=_OBJECTS.format(labels=labels, threshold=_THRESHOLD),
        labels=labels,
    )


def segment(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for semantic segmentation: a class for each pixel, at the size of the network's input."""
    from transformers import AutoModelForSemanticSegmentation

    if not directory.architecture.endswith("ForSemanticSegmentation"):
        raise BundleError(
            f"config.json: architectures: '{directory.architecture:.100}' is not a ...ForSemanticSegmentation, which has a class for each"
            f" pixel; {_OWN_HOOKS}"
        )
    network = load_model(AutoModelForSemanticSegmentation, directory)
    pictures = Pictures(directory, options)
    labels = directory.labels

    def answer(output: Any, size: Any) -> dict[str, Any]:
        logits = output.logits.float()
        wide = nn.functional.interpolate(logits, size=size, mode="bilinear", align_corners=False)
        return {"map": wide.argmax(1).int()}

    def reference(answer: Any) -> Array:
        classes = np.zeros(pictures.steps.shape, np.int32)
        for part in answer:
            classes[np.asarray(part["mask"]) > 0] = labels.index(part["label"])
        return classes

    return pictures.recipe(
        "image-segmentation",
        network,
        answer,
        _ask("image-segmentation", network, pictures, subtask="semantic"),
        reference,
        "map",
        labels=labels,
        # The pipeline scales its map to the size of the picture. So compare pictures of the network's input size.
        exact=True,
        # Rounding decides between equally likely classes, so accept any difference of single pixels here. `prove` compares whole
        # maps.
        tolerance={"i32": 1.0},
    )


def depth(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for depth estimation: the depth of each pixel, at the size of the network's input."""
    from transformers import AutoModelForDepthEstimation

    kind = directory.config.get("model_type")
    if kind not in _DEPTHS:
        raise BundleError(
            f"config.json: model_type: {kind!r:.40} is none of {', '.join(_DEPTHS)}, whose depths rsrv makes; {_OWN_HOOKS}"
        )
    network = load_model(AutoModelForDepthEstimation, directory)
    pictures = Pictures(directory, options)

    def answer(output: Any, size: Any) -> dict[str, Any]:
        depths = output.predicted_depth.float()[:, None]
        if depths.shape[-2:] != size:
            depths = nn.functional.interpolate(depths, size=size, mode="bicubic", align_corners=False)
        return {"map": depths[:, 0]}

    return pictures.recipe(
        "depth-estimation",
        network,
        answer,
        _ask("depth-estimation", network, pictures),
        lambda answer: answer["predicted_depth"].detach().numpy().astype(np.float32),
        "map",
        exact=True,
    )
