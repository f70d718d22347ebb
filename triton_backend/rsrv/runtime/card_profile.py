"""`python -m rsrv.runtime.card_profile REPOSITORY FILE`: tune the kernels of a repository's models on this machine's GPU.

`rsrv gpu profile` starts this program with the interpreter of the runtime. FILE gets a description of the card and the results,
for `rsrv-gen --compile-for FILE` on another machine. During the tuning, no server may hold the card's memory, because tuning
executes the kernels.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rsrv.cards import CardProfile, write_profile
from rsrv.command import put
from rsrv.runtime.compile_for import models_of, settings_of
from rsrv.runtime.cuda import MemoryShare
from rsrv.runtime.device import DeviceError
from rsrv.runtime.jax_device import JaxDevice
from rsrv.settings import SettingsError
from rsrv_bundle import BundleError
from rsrv_bundle.inspection import InspectorError


def main(argv: list[str] | None = None) -> int:
    """Write the profile. Returns 1 if a path is wrong, if there is no CUDA device, or if a module could not be compiled."""
    parser = argparse.ArgumentParser(prog="rsrv.runtime.card_profile", description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    try:
        settings = settings_of(options.repository)
    except SettingsError as error:
        _complain(str(error))
        return 1
    # Tuning takes minutes, so check the path first.
    if options.file.is_dir() or not os.access(
        options.file if options.file.exists() else options.file.parent, os.W_OK
    ):
        _complain(
            f"{options.file} cannot be written. Name a file in a folder that exists and that you may write to"
        )
        return 1
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.textproto")
        # Set the flags before the first use of XLA, because XLA reads them only then.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_dump_autotune_results_to={results}"
        try:
            device = JaxDevice(
                "cuda", memory=MemoryShare(preallocate=False), numerics=settings.runtime.numerics
            )
            target = device.card()
        except DeviceError as error:
            _complain(str(error))
            return 1
        for model, modules in models_of(options.repository, settings, device.hardware):
            try:
                count = len([device.compile(module, signature) for _, module, signature in modules])
            except (BundleError, DeviceError, InspectorError, RuntimeError, ValueError) as error:
                failed = True
                _complain(f"{model}: {error}")
            else:
                put(f"tuned      {model}: {count} modules")
        tuning = results.read_text(encoding="utf-8") if results.exists() else ""
    here = device.target
    profile = CardProfile(here.card, here.capability, here.versions, target, tuning)
    try:
        write_profile(options.file, profile)
    except OSError as error:
        _complain(f"{options.file} cannot be written: {error.strerror}")
        return 1
    put(f"wrote      {options.file}: {here.card}, {profile.kernels} tuned kernels")
    return int(failed)


def _complain(text: str) -> None:
    put(f"rsrv gpu profile: {text}", sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
