"""Write the data of `rsrv serve --demo`: some of the example bundles, a request, and images with the right answers.

    python tools/demo_bundles.py

The result is in the repository, so that the demo trains and exports nothing. Run this after a change of these examples
or of the bundle format.
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import numpy as np

import example_bundles
from examples import digits, family
from rsrv.serve import demo

FINE_TUNES = ("family_half", "family_large", "family_loop", "family_odd")
NAMES = (demo.MODEL, *FINE_TUNES, "glossary_bytes", "unet")


def main() -> int:
    """Write the data. Return the exit status."""
    built = example_bundles.ensure(NAMES)
    shutil.rmtree(demo.DATA / demo.BUNDLES, ignore_errors=True)
    for name in NAMES:
        shutil.copytree(built / name, demo.DATA / demo.BUNDLES / name)
    images, labels = digits.held_out()
    answers = {name: family.held_out(name)[1] for name in FINE_TUNES} | {demo.MODEL: labels}
    held_out: dict[str, Any] = {name: answer.astype(np.uint8) for name, answer in answers.items()}
    np.savez_compressed(demo.DATA / demo.HELD_OUT, images=(images * 16).astype(np.uint8), **held_out)
    tensor = {
        "name": "image",
        "datatype": "FP32",
        "shape": [1, *images[0].shape],
        "data": images[0].ravel().tolist(),
    }
    (demo.DATA / demo.REQUEST).write_text(json.dumps({"inputs": [tensor]}) + "\n")
    size = sum(file.stat().st_size for file in demo.DATA.rglob("*") if file.is_file())
    print(f"{demo.DATA}: {size:,} bytes; {demo.REQUEST} shows a {labels[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
