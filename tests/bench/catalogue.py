"""The generator's cost for thousands of bundles: all new, all unchanged, and one changed.

    python -m tests.bench.catalogue                      # 1,000 bundles
    python -m tests.bench.catalogue --models 10000

The bundles are hard links to the modules and weights of one bundle. Their manifests differ. The table has CPU seconds, because
other processes on the machine do not affect them. Memory is the peak of the generator's largest process.
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

#: A bundle of a few kilobytes.
SOURCE = ROOT / "tests/golden/jax_0_10_2/format_3/affine"
#: The generator trusts its notes about a bundle only if the bundle has been unchanged for this many seconds.
_SETTLED_S = 3.0


def main() -> None:
    """Measure one number of bundles, and print the table."""
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
    """Make bundles of hard links. Each manifest has a different comment."""
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
