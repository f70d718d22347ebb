"""Samples of the user for the comparison with the framework: texts by line, and files with pictures or sounds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rsrv_bundle.errors import BundleError
from rsrv_bundle.hf.recipe import HubRecipe, Request, row


def read_samples(files: Sequence[Path], recipe: HubRecipe) -> dict[str, Request]:
    """Return requests of one row, by name: the name of the file, and for texts also the line. Raises BundleError, OSError."""
    if recipe.inputs == ("text",):
        return {name: row(text=text) for name, text in read_lines(files).items()}
    if recipe.inputs == ("text", "text_pair"):
        return {name: _pair(name, text) for name, text in read_lines(files).items()}
    (role,) = recipe.inputs
    contents = {str(file): file.read_bytes() for file in files}
    if recipe.picture_size is not None:
        contents = {name: _resized(name, content, recipe.picture_size) for name, content in contents.items()}
    return {name: row(**{role: content}) for name, content in contents.items()}


def read_lines(files: Sequence[Path]) -> dict[str, str]:
    """Return the nonempty lines of text files. The keys are the name of the file and the number of the line.

    Raises BundleError, OSError.
    """
    samples = {}
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as e:
            raise BundleError(f"--samples {file}: is not text in UTF-8 ({e}); save it as UTF-8") from None
        texts = {f"{file}:{number}": line for number, line in enumerate(lines, 1) if line.strip()}
        # Refuse an empty file, because a comparison of nothing would look like an agreement.
        if not texts:
            raise BundleError(f"--samples {file}: has no text; write one sample per line")
        samples.update(texts)
    return samples


def _pair(name: str, line: str) -> Request:
    first, tab, second = line.partition("\t")
    if not tab:
        raise BundleError(f"--samples {name}: has no tab; write a query, a tab and a document in each line")
    return row(text=first, text_pair=second)


def _resized(name: str, content: bytes, size: tuple[int, int]) -> bytes:
    """Return a picture of this height and width, as a PNG file."""
    from PIL import Image, ImageOps

    try:
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    except Exception as e:  # noqa: BLE001 - the decoders raise all kinds
        raise BundleError(f"--samples {name}: is not a picture that Pillow can read: {e!s:.200}") from None
    file = io.BytesIO()
    picture.resize((size[1], size[0])).save(file, "PNG")
    return file.getvalue()
