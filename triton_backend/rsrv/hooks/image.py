"""Conversion of image files to a network's inputs. Pillow decodes and resizes. Arrays are u8 [h, w, c], RGB or grey."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rsrv.hooks import BadInput, needs

if TYPE_CHECKING:
    import PIL.Image

Array = npt.NDArray[Any]
#: One array u8 [n, h, w, c], or n arrays u8 [h, w, c], whose sizes may differ.
Images = Array | Sequence[Array]
Filter = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]

#: Mean and deviation of ImageNet's images by channel, on a scale from 0 to 1. Most published classifiers use them.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

#: Formats of clients' files. With fewer decoders, there is less code to attack.
_FORMATS = ("JPEG", "PNG", "WEBP")

#: Progressive JPEGs have about ten scans. Each scan takes time for the whole picture, although it may be only a few bytes long.
_MAX_SCANS = 100
#: The marker of a JPEG's segment with a length, or the marker of the picture's end. Other FF bytes are data of a scan, or markers
#: of segments without a length.
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)

#: EXIF's tag for the orientation. For each value of the tag, Pillow's transposition that makes a picture upright (TIFF 6.0,
#: "Orientation").
_ORIENTATION = 0x112
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def decode(files: Array, *, channels: Literal[1, 3] = 3, most_pixels: int = 50_000_000) -> list[Array]:
    """Decode JPEG, PNG and WebP files to pixels, u8 [h, w, channels] each, upright by EXIF's orientation.

    `files` are strings [n] or [n, 1], objects of type bytes, or u8 [n, bytes] with one file in each row and zeros after it.
    Transparency is dropped, 16 bits become 8, and only the first picture of an animation is decoded. The arrays are read-only.

    `most_pixels` limits the sum over all rows. It is checked with the files' headers before anything is decoded. Pillow limits
    one picture to 179 million pixels. A pixel takes `channels` bytes in the result. While a row is decoded, turned, converted
    and copied, each of its pixels takes 10 to 14 bytes.

    Raises BadInput for files of other formats, damaged files, and files with too many pixels. However, a WebP file that was cut off
    is decoded with the zeros after it.
    """
    rows: Iterable[Array]
    if files.dtype == object and files.size == len(files):
        rows = [np.frombuffer(file, np.uint8) for file in files.reshape(len(files))]
    elif files.ndim == 2 and files.dtype == np.uint8:
        rows = files
    else:
        raise ValueError(f"files must be strings [n] or u8 [n, bytes], not {files.dtype} {list(files.shape)}")
    opened: list[PIL.Image.Image] = []
    for row, padded in enumerate(rows):
        with _blame_row(row):
            opened.append(_open(padded))
    if sum(image.width * image.height for image in opened) > most_pixels:
        raise BadInput(f"all images of the request together have more than {most_pixels} pixels")
    pictures = []
    for row in range(len(opened)):
        with _blame_row(row):
            # Remove the image from the list, so that Pillow's copy of the pixels is freed.
            pictures.append(_pixels(opened.pop(0), channels))
    return pictures


def resize(
    images: Images,
    size: tuple[int, int],
    *,
    resample: Filter = "bilinear",
    most_pixels: int = 50_000_000,
) -> Array:
    """Resize images of any sizes to u8 [n, height, width, c], size = (height, width). Their proportions may change.

    `resample` is a filter of Pillow. All filters except "nearest" average over all pixels that become one pixel (antialiasing), as
    torchvision does with antialias=True. OpenCV's cv2.resize does not. Pillow changes widths first. With the new
    widths and the old heights, all images together may have at most `most_pixels` pixels, else BadInput. Only very high and
    narrow images come near this limit.
    """
    _limit(sum(image.shape[0] * size[1] for image in images), most_pixels)
    return _stack([_resized(image, size, resample) for image in images], size, images)


def resize_crop(
    images: Images,
    shorter: int,
    size: tuple[int, int],
    *,
    resample: Filter = "bilinear",
    most_pixels: int = 50_000_000,
    rounding: Literal["torchvision", "transformers"] = "torchvision",
) -> Array:
    """Resize each image to `shorter` pixels of its shorter side, and crop its middle: u8 [n, height, width, c].

    This is the usual preparation for classifiers: torchvision's Resize(shorter) and CenterCrop(size), with their rounding. The
    longer side is rounded down, and the crop's corner to the nearest pixel (halves to the even one). size: (height, width),
    each at most `shorter`, else ValueError. rounding: "transformers" rounds the crop's corner down, as the processors of
    transformers do. most_pixels: maximum number of pixels of all images together after scaling and before the crop, else
    BadInput. A file of a few bytes can hold a line that is one pixel wide and thousands of pixels long. Scaling enlarges both sides
    hundreds of times.
    """
    if max(size) > shorter:
        raise ValueError(f"a crop of {size} does not fit into images whose shorter side is {shorter}")
    scaled = []
    for image in images:
        height, width = image.shape[:2]
        if height <= width:
            scaled.append((shorter, shorter * width // height))
        else:
            scaled.append((shorter * height // width, shorter))
    _limit(sum(height * width for height, width in scaled), most_pixels)
    cropped = []
    for image, whole in zip(images, scaled, strict=True):
        spare = [had - cropped for had, cropped in zip(whole, size, strict=True)]
        top, left = (margin // 2 if rounding == "transformers" else round(margin / 2) for margin in spare)
        middle = (left, top, left + size[1], top + size[0])
        cropped.append(_resized(image, whole, resample, middle))
    return _stack(cropped, size, images)


def crop(pixels: Array, size: tuple[int, int]) -> Array:
    """Cut the middle out of u8 [n, h, w, c]: [n, height, width, c], size = (height, width). The corner is rounded down."""
    top, left = ((had - cropped) // 2 for had, cropped in zip(pixels.shape[1:3], size, strict=True))
    if min(top, left) < 0:
        raise ValueError(f"a crop of {size} does not fit into images of {pixels.shape[1:3]}")
    return pixels[:, top : top + size[0], left : left + size[1]]


def sizes(images: Images) -> Array:
    """Return the heights and widths of images: i32 [n, 2]. They may pass through a model as a separate tensor."""
    return np.array([image.shape[:2] for image in images], np.int32).reshape(-1, 2)


def letterbox(
    images: Images, size: tuple[int, int], *, fill: int = 114, resample: Filter = "bilinear"
) -> tuple[Array, Array]:
    """Scale each image into the middle of `size`, keep its proportions, and add `fill` around it: u8 [n, height, width, c].

    The second result, f32 [n, 4], has the places of the images: horizontal and vertical scale, then left and top in pixels.
    `from_letterbox` needs this result, which may pass through a model as a separate tensor.
    """
    pixels, places = [], []
    for image in images:
        height, width = image.shape[:2]
        scale = min(size[0] / height, size[1] / width)
        high, wide = max(1, round(height * scale)), max(1, round(width * scale))
        top, left = (size[0] - high) // 2, (size[1] - wide) // 2
        page = np.full((*size, image.shape[2]), fill, np.uint8)
        page[top : top + high, left : left + wide] = _resized(image, (high, wide), resample)
        pixels.append(page)
        places.append((wide / width, high / height, left, top))
    return _stack(pixels, size, images), np.array(places, np.float32).reshape(-1, 4)


def fit(images: Images, size: tuple[int, int], *, resample: Filter = "bilinear") -> tuple[Array, Array]:
    """Resize each image to fit into `size`, put it at the upper left, and fill the rest with zeros: u8 [n, height, width, c].

    Images keep their proportions. The second result, i32 [n, 2], is the height and the width of each resized image. Both are
    rounded down, as transformers' detectors do.
    """
    extents = []
    pages = np.zeros((len(images), *size, images[0].shape[2] if len(images) else 3), np.uint8)
    for page, image in zip(pages, images, strict=True):
        height, width = image.shape[:2]
        scale = min(size[0] / height, size[1] / width)
        extent = max(1, int(height * scale)), max(1, int(width * scale))
        page[: extent[0], : extent[1]] = _resized(image, extent, resample)
        extents.append(extent)
    return pages, np.array(extents, np.int32).reshape(-1, 2)


def from_letterbox(boxes: Array, places: Array) -> Array:
    """Map boxes of letterboxed images to the images: [n, k, 4] each, (left, top, right, bottom).

    places: f32 [n, 4], from `letterbox`. Parts of boxes in the fill are then outside of the image. `boxes.clip` removes them.
    """
    scales, corners = np.tile(places[:, None, :2], 2), np.tile(places[:, None, 2:], 2)
    mapped: Array = (boxes - corners) / scales
    return mapped


def normalise(
    pixels: Array,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    layout: Literal["nchw", "nhwc"] = "nchw",
    dtype: npt.DTypeLike = np.float32,
) -> Array:
    """Compute (pixels / 255 - mean) / std of u8 [n, h, w, c] as `dtype`, [n, c, h, w] or [n, h, w, c].

    mean, std: a number for each channel, else ValueError. Each result is the exact value, rounded only once.
    """
    if not len(mean) == len(std) == pixels.shape[3]:
        raise ValueError(f"{len(mean)} means and {len(std)} deviations for {pixels.shape[3]} channels")
    # A byte has only 256 values, so each is computed once and then looked up.
    values = ((np.arange(256) / 255 - np.array(mean)[:, None]) / np.array(std)[:, None]).astype(dtype)
    count, height, width, channels = pixels.shape
    normalised = np.empty((count, channels, height, width), dtype)
    if layout == "nhwc":
        normalised = np.empty((count, height, width, channels), dtype).transpose(0, 3, 1, 2)
    for channel, table in enumerate(values):
        normalised[:, channel] = table[pixels[..., channel]]
    return normalised if layout == "nchw" else normalised.transpose(0, 2, 3, 1)


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise needs("Pillow") from None
    return PIL


@contextmanager
def _blame_row(row: int) -> Iterator[None]:
    """Turn Pillow's errors into BadInput, which blames the file of this row."""
    pil = _pillow()
    try:
        yield
    except MemoryError:
        raise
    except pil.UnidentifiedImageError:
        raise BadInput(f"image {row} is not a JPEG, PNG or WebP file") from None
    except Exception as error:  # noqa: BLE001 - the decoders raise all kinds
        raise BadInput(f"image {row} is damaged: {error}") from None


def _open(padded: Array) -> PIL.Image.Image:
    """Open a file. This reads only its header."""
    file = padded.tobytes()
    if file.startswith(b"RIFF"):
        # Cut a WebP file at the length in its header, because the file itself may end in zeros.
        file = file[: 8 + int.from_bytes(file[4:8], "little")]
    else:
        # Remove the zeros. With them, a file that was cut off would seem complete to the JPEG decoder, and the rest of the
        # picture would be grey.
        file = file.rstrip(b"\0")
    if file.startswith(b"\xff\xd8") and _has_too_many_scans(file):
        raise ValueError(f"it has more than {_MAX_SCANS} scans")
    opened: PIL.Image.Image = _pillow().Image.open(io.BytesIO(file), formats=_FORMATS)
    return opened


def _has_too_many_scans(jpeg: bytes) -> bool:
    """Return whether a JPEG has too many scans. Scans inside its segments (a thumbnail) and after its end are ignored."""
    scans, place = 0, 0
    while (marker := _MARKER.search(jpeg, place)) and marker[1] != b"\xd9":
        scans += marker[1] == b"\xda"
        if scans > _MAX_SCANS:
            return True
        place = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big")
    return False


def _pixels(image: PIL.Image.Image, channels: int) -> Array:
    image.load()  # Read the whole file, because in a PNG file, EXIF may come last.
    turn = None
    # Ignore a damaged EXIF block. Pillow raises many kinds of errors for it.
    with suppress(Exception):
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    if turn:
        image = image.transpose(_pillow().Image.Transpose[turn])
    if image.mode.startswith("I"):
        # Pillow would limit values of 16 bits to 255.
        image = _pillow().Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    mode = "RGB" if channels == 3 else "L"
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], channels)


def _limit(pixels: int, most: int) -> None:
    if pixels > most:
        raise BadInput(
            f"all images of the request together have more than {most} pixels when they are scaled"
        )


def _resized(
    image: Array,
    size: tuple[int, int],
    resample: Filter,
    middle: tuple[int, int, int, int] | None = None,
) -> Array:
    """Return the image resized to [height, width, c], or only its part `middle`: left, top, right, bottom."""
    pil = _pillow()
    channels = image.shape[2]
    picture = pil.Image.fromarray(image if channels > 1 else image[..., 0])
    resized = picture.resize((size[1], size[0]), pil.Image.Resampling[resample.upper()])
    pixels = np.asarray(resized if middle is None else resized.crop(middle))
    return pixels.reshape(*pixels.shape[:2], channels)


def _stack(made: Sequence[Array], size: tuple[int, int], images: Images) -> Array:
    channels = images.shape[3] if isinstance(images, np.ndarray) else 3
    return np.stack(made) if made else np.empty((0, *size, channels), np.uint8)
