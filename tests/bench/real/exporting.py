"""Export the bundles of a model into a folder, and print the seconds. Each model is exported in its own process.

    python -m tests.bench.real.exporting MODEL FOLDER

The seconds are the time from a loaded and trained model to a checked bundle. Imports, downloads and training are not counted.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from examples import detector_training, minilm_files, resnet18, vit
from examples import family as family_maker
from examples.fno import network as fno_network
from examples.unet import network as unet_network
from tests.bench.real.cases import CASES

#: Steps before an export, by the first word of a model's name.
PREPARE: Mapping[str, Callable[[], object]] = {
    "detector": detector_training.trained,
    "family": family_maker.trained,
    "fno": fno_network.trained,
    "minilm": minilm_files.fetched,
    "resnet18": resnet18.source,
    "unet": unet_network.trained,
    "vit": vit.source,
}
#: First words of names of models for which one package makes all bundles. Other bundles have a module each.
_FOLDERS = ("family", "fno", "resnet18", "unet", "vit")


def main() -> None:
    """Export the bundles, and print the seconds."""
    name, folder = sys.argv[1:]
    word = name.partition("_")[0]
    with contextlib.redirect_stdout(sys.stderr):
        PREPARE[word]()
        makers = [
            (importlib.import_module(f"examples.{word if word in _FOLDERS else bundle}"), bundle)
            for bundle in CASES[name].bundles
        ]
        started = time.perf_counter()
        for maker, bundle in makers:
            maker.make(Path(folder, bundle))
        seconds = time.perf_counter() - started
    print(seconds)


if __name__ == "__main__":
    main()
