"""Images, compared with Pillow, with torch's resampling, and with values computed by hand."""

from __future__ import annotations

import io
import struct
from typing import Any, Literal

import numpy as np
import PIL.Image
import PIL.PngImagePlugin
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rsrv.hooks import BadInput, boxes, image
from rsrv.hooks.text import as_text

Array = np.ndarray[Any, Any]

#: Functions that turn an upright picture into the stored picture, by EXIF's orientation (tag 274).
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


def picture(height: int = 24, width: int = 36, seed: int = 0) -> Array:
    """Return a smooth picture, which JPEG changes very little."""
    rng = np.random.default_rng(seed)
    small = PIL.Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8))
    return np.asarray(small.resize((width, height), PIL.Image.Resampling.BICUBIC))


def file(pixels: Array, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("kind", "options", "off"),
    [("PNG", {}, 0), ("WEBP", {"lossless": True}, 0), ("WEBP", {}, 40), ("JPEG", {"quality": 95}, 12)],
)
def test_files_of_all_kinds_are_decoded_together(kind: str, options: dict[str, Any], off: int) -> None:
    """In each format, two pictures of different sizes are decoded from one padded tensor."""
    pictures = [picture(), picture(90, 50, seed=1)]
    decoded = image.decode(as_text([file(pixels, kind, **options) for pixels in pictures]))
    for got, expected in zip(decoded, pictures, strict=True):
        assert got.dtype == np.uint8
        assert got.shape == expected.shape
        assert abs(got.astype(int) - expected).max() <= off


@pytest.mark.parametrize("orientation", STORED)
def test_pictures_stand_upright_however_the_camera_was_held(orientation: int) -> None:
    """Files with any of EXIF's eight orientations give the same upright picture."""
    exif = PIL.Image.Exif()
    exif[274] = orientation
    stored = np.ascontiguousarray(STORED[orientation](picture()))
    (pixels,) = image.decode(as_text([file(stored, exif=exif)]))
    assert (pixels == picture()).all()


def exif_of(*entries: bytes) -> bytes:
    """Return a JPEG whose EXIF has the orientation 6, and after it these TIFF entries of 12 bytes each."""
    all_of_them = (struct.pack("<HHII", 274, 3, 1, 6), *entries)
    tiff = b"II*\0\x08\0\0\0" + struct.pack("<H", len(all_of_them)) + b"".join(all_of_them) + bytes(4)
    stored = np.ascontiguousarray(STORED[6](picture()))
    return file(stored, "JPEG", exif=b"Exif\0\0" + tiff, quality=95)


@pytest.mark.parametrize(
    "entry",
    [
        struct.pack("<HHI4s", 0x11A, 2, 4, b"abc"),
        struct.pack("<HHIf", 0x100, 11, 1, 0.5),
        struct.pack("<HHIi", 0x100, 9, 1, -5),
    ],
    ids=["resolution in words", "half a pixel wide", "a negative width"],
)
def test_what_else_a_camera_wrote_does_not_matter(entry: bytes) -> None:
    """EXIF entries of wrong types do not affect the orientation."""
    (pixels,) = image.decode(as_text([exif_of(entry)]))
    assert abs(pixels.astype(int) - picture()).max() <= 12


def test_exif_that_cannot_be_read_says_nothing() -> None:
    """Unreadable EXIF is ignored."""
    text = PIL.PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n 4\nno numbers\n")
    (pixels,) = image.decode(as_text([file(picture(), pnginfo=text)]))
    assert (pixels == picture()).all()


def test_a_jpeg_with_endless_scans_is_refused() -> None:
    """A JPEG with more than a hundred scans is refused, because each scan is a pass over the whole picture."""
    whole = file(np.zeros((64, 64, 3), np.uint8), "JPEG", progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    hundred = whole[:-2] + last * (100 - whole.count(b"\xff\xda")) + whole[-2:]
    assert image.decode(as_text([hundred]))[0].shape == (64, 64, 3)
    with pytest.raises(BadInput, match="image 1 is damaged: it has more than 100 scans"):
        image.decode(as_text([whole, hundred[:-2] + last + whole[-2:]]))


def test_only_the_picture_s_own_scans_are_counted() -> None:
    """Bytes that look like scans, but are in a segment or after the end, are not counted."""
    whole = file(picture(), "JPEG", quality=95)
    lookalikes = b"\xff\xda" * 200
    segment = b"\xff\xe9" + struct.pack(">H", 2 + len(lookalikes)) + lookalikes
    decoded = image.decode(as_text([whole[:2] + segment + whole[2:], whole + lookalikes + b"."]))
    for pixels in decoded:
        assert abs(pixels.astype(int) - picture()).max() <= 12


@pytest.mark.parametrize(
    ("stored", "grey"),
    [
        (np.array([[0, 7, 255]], np.uint8), [0, 7, 255]),
        (np.array([[0, 0x1234, 0xFFFF]], np.uint16), [0, 0x12, 255]),
        (np.array([[[9, 9, 9, 0], [8, 8, 8, 255]]], np.uint8), [9, 8]),
        (np.array([[[9, 0], [8, 255]]], np.uint8), [9, 8]),
        (np.array([[False, True]]), [0, 255]),
    ],
    ids=["grey", "16 bits", "transparent", "transparent grey", "black and white"],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_have_the_channels_that_are_asked_for(
    stored: Array, grey: list[int], channels: Literal[1, 3]
) -> None:
    """A picture has the requested channels, whatever channels its file has."""
    (pixels,) = image.decode(as_text([file(stored)]), channels=channels)
    assert (pixels == np.array(grey)[None, :, None]).all()
    assert pixels.shape == (1, len(grey), channels)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "image 1 is not a JPEG"),
        (b"hello", "image 1 is not a JPEG"),
        (file(picture(), "GIF"), "image 1 is not a JPEG"),
        (file(picture(), "JPEG")[:-200], "image 1 is damaged"),
        (file(picture())[:-100], "image 1 is damaged"),
    ],
    ids=["nothing", "text", "gif", "half a jpeg", "half a png"],
)
def test_what_is_no_picture_is_the_clients_fault(data: bytes, message: str) -> None:
    """A file that is not a picture is refused, and the error names its row. So is half a file with zeros after it."""
    files = as_text([file(picture()), data], width=20_000)
    with pytest.raises(BadInput, match=message):
        image.decode(files)


def test_half_a_webp_is_the_clients_fault() -> None:
    """Half a WebP is refused, because it is shorter than its declared length.

    Zeros up to that length would hide this.
    """
    with pytest.raises(BadInput, match="image 0 is"):
        image.decode(as_text([file(picture(), "WEBP")[:-100]]))


@given(st.sampled_from(["JPEG", "PNG", "WEBP"]), st.data())
def test_damaged_files_raise_nothing_else(kind: str, data: st.DataObject) -> None:
    """Randomly damaged files are decoded or refused, without another error."""
    damaged = bytearray(file(picture(), kind))
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), min_size=1, max_size=5)
    ):
        damaged[place] = value
    try:
        (pixels,) = image.decode(as_text([bytes(damaged)]), most_pixels=100_000)
    except BadInput:
        return
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3


def test_a_small_file_of_a_huge_picture_is_refused_by_its_header() -> None:
    """A small file with a huge picture is refused after reading its header. The limit is for all rows together."""
    bomb = file(np.zeros((3000, 4000), np.uint8))
    assert len(bomb) < 20_000
    with pytest.raises(BadInput, match="more than 11999999 pixels"):
        image.decode(as_text([bomb]), most_pixels=11_999_999)
    small = as_text([file(picture())] * 3)
    assert len(image.decode(small, most_pixels=3 * 24 * 36)) == 3
    with pytest.raises(BadInput, match="all images of the request"):
        image.decode(small, most_pixels=3 * 24 * 36 - 1)


def test_files_come_as_rows_of_bytes() -> None:
    """If a hook does not pass rows of bytes, it gets a ValueError, which does not blame the client."""
    with pytest.raises(ValueError, match=r"u8 \[n, bytes\], not float32 \[3\]"):
        image.decode(np.zeros(3, np.float32))
    assert image.decode(np.zeros((0, 10), np.uint8)) == []


def test_files_come_as_strings() -> None:
    """Strings of clients, one per row, are accepted as files."""
    strings = np.array([file(picture()), file(picture())], object)
    (first, second) = image.decode(strings)
    assert image.decode(strings.reshape(-1, 1))[0].tolist() == first.tolist() == second.tolist()
    with pytest.raises(ValueError, match=r"strings \[n\] or u8"):
        image.decode(strings.reshape(1, 2))


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(11, 13), (24, 36), (50, 61)])
def test_resizing_averages_as_torch_does(resample: image.Filter, size: tuple[int, int]) -> None:
    """Resizing to smaller and to larger sizes equals torch's interpolation with antialiasing, except for rounding."""
    pictures = np.stack([picture(seed=seed) for seed in range(2)])
    resized = image.resize(pictures, size, resample=resample)
    tensor = torch.tensor(pictures).permute(0, 3, 1, 2).float()
    expected = torch.nn.functional.interpolate(
        tensor, size, mode=resample, antialias=True, align_corners=False
    )
    assert resized.shape == (2, *size, 3)
    assert abs(resized - expected.clamp(0, 255).permute(0, 2, 3, 1).numpy()).max() <= 1.5


def test_one_channel_stays_one() -> None:
    """A picture of one channel has one channel after all steps."""
    grey = picture()[..., :1]
    assert (image.resize([grey], (7, 9))[..., 0] == image.resize([picture()], (7, 9))[..., 0]).all()
    assert image.resize_crop([grey], 10, (8, 8)).shape == (1, 8, 8, 1)
    assert image.letterbox([grey], (8, 8))[0].shape == (1, 8, 8, 1)
    assert image.resize([], (4, 5)).shape == (0, 4, 5, 3)
    nothing = np.zeros((0, 24, 36, 1), np.uint8)
    assert image.resize(nothing, (4, 5)).shape == (0, 4, 5, 1)
    assert image.resize_crop(nothing, 10, (8, 8)).shape == (0, 8, 8, 1)
    assert image.letterbox(nothing, (8, 8))[0].shape == (0, 8, 8, 1)


@pytest.mark.parametrize(
    ("shape", "scaled", "corner"),
    [
        # torchvision computes int(16 * 36 / 24) = 24, and the corners round((16 - 10) / 2) and round((24 - 10) / 2).
        ((24, 36), (16, 24), (3, 7)),
        ((36, 24), (24, 16), (7, 3)),
        ((20, 27), (16, 21), (3, 6)),  # the width is 21.6, and 5.5 rounds to the even 6
        ((10, 10), (16, 16), (3, 3)),
    ],
)
def test_the_middle_is_cut_out_as_torchvision_does(
    shape: tuple[int, int], scaled: tuple[int, int], corner: tuple[int, int]
) -> None:
    """The sizes and the corners of the crop are those of torchvision's Resize and CenterCrop."""
    pixels = picture(*shape)
    cropped = image.resize_crop([pixels], 16, (10, 10))
    top, left = corner
    whole = PIL.Image.fromarray(pixels).resize(scaled[::-1], PIL.Image.Resampling.BILINEAR)
    assert (cropped[0] == np.asarray(whole)[top : top + 10, left : left + 10]).all()


@pytest.mark.parametrize(("height", "width"), [(1, 4000), (4000, 1)])
def test_a_thin_line_is_refused_before_it_is_scaled(height: int, width: int) -> None:
    """A thin picture that scaling would make 256 million pixels large is refused before it is scaled."""
    bomb = file(np.zeros((height, width), np.uint8))
    assert len(bomb) < 150
    pictures = image.decode(as_text([bomb]))
    with pytest.raises(BadInput, match="more than 50000000 pixels when they are scaled"):
        image.resize_crop(pictures, 256, (224, 224))
    assert image.letterbox(pictures, (224, 224))[0].shape == (1, 224, 224, 3)


def test_the_limit_of_what_is_scaled_is_that_of_all_pictures_together() -> None:
    """The limit is for the exact number of scaled pixels of all pictures together. The crop does not matter."""
    pictures = [picture()] * 2
    assert len(image.resize_crop(pictures, 16, (10, 10), most_pixels=2 * 16 * 24)) == 2
    with pytest.raises(BadInput, match="all images of the request"):
        image.resize_crop(pictures, 16, (10, 10), most_pixels=2 * 16 * 24 - 1)


def test_a_high_and_narrow_picture_is_not_made_broad() -> None:
    """For a high and narrow picture, the limit of pixels applies to Pillow's intermediate result.

    Pillow changes the width first.
    """
    assert image.resize([picture()], (4, 100), most_pixels=2400).shape == (1, 4, 100, 3)
    with pytest.raises(BadInput, match="more than 2399 pixels"):
        image.resize([picture()], (4, 100), most_pixels=2399)
    with pytest.raises(BadInput, match="more than 50000000 pixels"):
        image.resize([np.zeros((1_000_000, 1, 3), np.uint8)], (224, 224))


def test_a_crop_has_to_fit() -> None:
    """A crop larger than the scaled picture is refused."""
    with pytest.raises(ValueError, match="does not fit"):
        image.resize_crop([picture()], 16, (10, 17))


@given(st.tuples(st.integers(1, 90), st.integers(1, 90)), st.tuples(st.integers(4, 64), st.integers(4, 64)))
def test_boxes_find_their_way_back_from_a_letterbox(shape: tuple[int, int], size: tuple[int, int]) -> None:
    """The frame of a letterboxed picture converts back to the whole picture. All around the frame is the fill."""
    height, width = shape
    pixels, places = image.letterbox([np.full((*shape, 3), 200, np.uint8)], size, fill=7)
    (rows,), (columns,) = (
        [np.flatnonzero((pixels[0, ..., 0] == 200).any(axis)) for _ in "x"] for axis in (1, 0)
    )
    frame = np.array([[[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]]], np.float32)
    assert ((pixels == 200).all(-1).sum(), (pixels == 7).all(-1).sum()) == (
        len(rows) * len(columns),
        np.prod(size) - len(rows) * len(columns),
    )
    assert len(rows) == size[0] or len(columns) == size[1]
    restored = image.from_letterbox(frame, places)
    np.testing.assert_allclose(restored, [[[0, 0, width, height]]], atol=1e-3)
    margin = image.from_letterbox(np.array([[[0, 0, size[1], size[0]]]], np.float32), places)
    np.testing.assert_allclose(boxes.clip(margin, height, width), [[[0, 0, width, height]]], atol=1e-3)


def test_a_fitted_picture_keeps_its_proportions() -> None:
    """A fitted picture is at the upper left, its sides are rounded down, and zeros fill the rest."""
    pictures = [
        np.full((10, 30, 3), 9, np.uint8),
        np.full((40, 21, 3), 9, np.uint8),
        np.full((1, 999, 3), 9, np.uint8),
    ]
    pixels, extents = image.fit(pictures, (20, 40))
    assert extents.tolist() == [[13, 40], [20, 10], [1, 40]]
    for page, (height, width) in zip(pixels, extents, strict=True):
        assert (page[:height, :width] == 9).all()
        assert page.sum() == 9 * 3 * height * width
    pixels, extents = image.fit([], (20, 40))
    assert (pixels.shape, extents.shape) == ((0, 20, 40, 3), (0, 2))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_pixels_are_normalised_exactly(layout: Literal["nchw", "nhwc"], dtype: Any) -> None:
    """For each value of a byte and each channel, normalising gives the same as the formula in 64 bits."""
    pixels = np.random.default_rng(0).permuted(np.arange(768, dtype=np.int64) % 256).astype(np.uint8)
    pixels = pixels.reshape(2, 16, 8, 3)
    mean, std = image.IMAGENET_MEAN, image.IMAGENET_STD
    expected = (pixels / 255 - np.array(mean)) / np.array(std)
    if layout == "nchw":
        expected = expected.transpose(0, 3, 1, 2)
    normalised = image.normalise(pixels, mean, std, layout=layout, dtype=dtype)
    assert normalised.dtype == dtype
    assert normalised.flags.c_contiguous
    assert (normalised == expected.astype(dtype)).all()


def test_each_channel_has_its_mean() -> None:
    """Three means for a picture of one channel are refused."""
    with pytest.raises(ValueError, match="3 means and 3 deviations for 1 channels"):
        image.normalise(np.zeros((1, 2, 2, 1), np.uint8), image.IMAGENET_MEAN, image.IMAGENET_STD)
