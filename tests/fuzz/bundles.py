"""Every bundle, however bad, is read, planned and built, or refused in words; nothing else happens."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rsrv.runtime.device import Device, DeviceError
from rsrv.runtime.host import HostStore
from rsrv.runtime.host_memory import HostMemoryError, PrivateMemory
from rsrv.runtime.models import build, identify
from rsrv.settings import load_settings
from rsrv_bundle import BundleError, read_bundle
from rsrv_bundle.inspection import Inspector
from rsrv_gen.plan import plan_repository
from rsrv_gen.sources import read_sources
from tests.fakes import FakeDevice
from tests.fuzz.corpus import Files, write_mutant
from tests.fuzz.watched import Verdict, watch

#: what one bundle may cost that is read three times, whatever is in it
SECONDS = 10.0
NBYTES = 400 << 20


def check_bundles(seeds: Sequence[int], good: Sequence[Files], scratch: Path) -> Iterator[Verdict]:
    """Make and read the bundle of every seed."""
    inspector = Inspector()
    device = FakeDevice(lambda inputs, weights: [])
    settings = load_settings()

    def case(seed: int) -> str:
        with _folder(scratch) as parent:
            path = write_mutant(seed, good, parent)
            try:
                return _serve(path, device, inspector)
            except (BundleError, HostMemoryError, DeviceError):
                return "refused"

    def _serve(path: Path, device: Device, inspector: Inspector) -> str:
        # First what reads many bundles, and must not end because of one.
        sources = read_sources([path.parent])
        plan_repository(
            {name: s for name, s in sources.good.items() if s.bundle.manifest.kind == "model"}, {}
        )
        bundle = read_bundle(path)
        if bundle.manifest.kind == "meta":
            return "read"
        wanted = identify("model", str(path), {})
        ((name, found),) = wanted.models.values()
        model = build(found, device, HostStore(PrivateMemory()), settings, name, inspector)
        model.host.close()
        return "built"

    yield from watch(case, seeds, seconds=SECONDS, nbytes=NBYTES)


@contextmanager
def _folder(scratch: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
