"""The models and files of `rsrv serve --demo`. `tools/demo_bundles.py` makes them.

- `bundles` has a classifier of handwritten digits, fine-tunes that share its backbone, a segmentation network, and a
  generator of text.
- `demo.yaml` sets a weight budget that is too small for all of them.
- `digit.json` is a request.
- `held_out.npz` has images on which no model was trained, with each model's right answers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

DATA = Path(__file__).resolve().parent
BUNDLES, SETTINGS, REQUEST, HELD_OUT = "bundles", "demo.yaml", "digit.json", "held_out.npz"
#: Name of the model that REQUEST is for.
MODEL = "digits"


def copy_to(directory: Path) -> None:
    """Copy the bundles, the settings and the request into the directory. Do not change existing files. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / BUNDLES).exists():
        shutil.copytree(DATA / BUNDLES, directory / BUNDLES, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (SETTINGS, REQUEST):
        if not (directory / name).exists():
            shutil.copyfile(DATA / name, directory / name)
