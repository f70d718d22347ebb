"""A catalogue of thousands of bundles: what the generator costs for new, unchanged and changed ones.

    python -m tests.bench.catalogue                      # 1,000 bundles
    python -m tests.bench.catalogue --models 10000

The bundles are hard links to one bundle's modules and weights, with manifests that differ. Seconds are of CPU time, because
other processes of the machine do not count in it; memory is the largest of the process.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.phases import say
from tests.bench.places import ROOT, WORK
from tests.bench.report import table

#: a bundle of a few kilobytes
SOURCE = ROOT / "tests/golden/jax_0_10_2/format_3/affine"
#: seconds that bundles must be unchanged before the generator relies on what it noted of them
_SETTLED_S = 3.0


def main() -> None:
    """Measure one number of bundles."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.catalogue", description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--front", choices=("native", "python"), default="native")
    options = parser.parse_args()
    folder = WORK / "catalogue"
    shutil.rmtree(folder, ignore_errors=True)
    bundles = make_bundles(folder / "bundles", options.models)
    (folder / "config.yaml").write_text(f"stub: {{front: {options.front}}}\n")
    time.sleep(_SETTLED_S)
    rows = [generated("new", folder), generated("unchanged", folder)]
    with (bundles[0] / "manifest.yaml").open("a") as manifest:
        manifest.write("# changed\n")
    rows.append(generated("one changed", folder))
    say(table(["bundles", "s", "CPU s", "MB"], rows))


def make_bundles(folder: Path, count: int) -> list[Path]:
    """Make bundles of hard links, each with a comment of its own in its manifest."""
    text = (SOURCE / "manifest.yaml").read_text()
    files = [file for file in SOURCE.iterdir() if file.name != "manifest.yaml"]
    bundles = [folder / f"m{number:05d}" for number in range(count)]
    for bundle in bundles:
        bundle.mkdir(parents=True)
        for file in files:
            os.link(file, bundle / file.name)
        (bundle / "manifest.yaml").write_text(f"{text}# {bundle.name}\n")
    return bundles


def generated(what: str, folder: Path) -> list[str]:
    """Run the generator, and return a row of figures."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "rsrv_gen.cli", "bundles", "-o", "gen", "--config", "config.yaml"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [what, f"{time.monotonic() - began:.1f}", f"{cpu:.1f}", f"{after.ru_maxrss / 1000:.0f}"]


if __name__ == "__main__":
    main()
