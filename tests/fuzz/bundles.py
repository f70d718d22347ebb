"""Every bundle, however bad, is read, planned and built, or is refused with a text. There are no other effects."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rsrv.control.watching import scan
from rsrv.runtime.device import Device
from rsrv.runtime.host_memory import HostMemory, HostMemoryError
from rsrv.runtime.host_weights import HostStore
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.models import CompiledModel, compile_model, identify, warm_up
from rsrv.settings import load_settings
from rsrv_bundle import BundleError, read_bundle
from rsrv_bundle.inspection import Inspector
from rsrv_bundle.modules import check_signatures
from rsrv_gen.plan import plan_repository
from rsrv_gen.sources import read_sources
from tests.fakes import FakeDevice
from tests.fuzz.corpus import write_module_mutant, write_mutant
from tests.fuzz.manifests import Files
from tests.fuzz.watched import Verdict, watch

#: Limits in seconds and bytes for a bundle that is read three times.
SECONDS = 10.0
NBYTES = 400 << 20
#: Limits in seconds and bytes for a bundle that is also compiled.
COMPILING = 20.0
COMPILING_NBYTES = 1 << 30


def check_bundles(seeds: Sequence[int], good: Sequence[Files], scratch: Path) -> Iterator[Verdict]:
    """Make and read a bundle for every seed. A fake device compiles nothing."""
    inspector = Inspector()
    device = FakeDevice(lambda inputs, weights: [])

    def case(seed: int) -> str:
        with _folder(scratch) as parent:
            path = write_mutant(seed, good, parent)
            # These readers of many bundles must not fail because of one bad bundle.
            scan(path.parent, linked=True)
            sources = read_sources([path.parent])
            models = {name: bundle for name, bundle in sources.good.items() if not bundle.facts.meta}
            for recipe in plan_repository(models).models.values():
                recipe.plan()
            try:
                if read_bundle(path).manifest.kind == "meta":
                    return "read"
                _build(path, device, inspector).host.close()
            except (BundleError, HostMemoryError):
                return "refused"
            return "built"

    yield from watch(case, seeds, seconds=SECONDS, nbytes=NBYTES)


def check_modules(seeds: Sequence[int], good: Sequence[Files], scratch: Path) -> Iterator[Verdict]:
    """Make a bundle for every seed in which only a module is damaged. If the module is accepted, compile and execute it."""
    inspector = Inspector()
    devices: list[Device] = []

    def case(seed: int) -> str:
        if not devices:  # jax starts threads, so this is done in the child process.
            devices.append(JaxDevice("cpu"))
        (device,) = devices
        with _folder(scratch) as parent:
            path = write_module_mutant(seed, good, parent)
            try:
                model = _build(path, device, inspector)
                with closing(model.host) as host:
                    model.weights = device.upload([host.read(i) for i in range(len(host.tensors))])
                    warm_up(model, device)
            except BundleError:
                return "refused"
            except Exception:  # noqa: BLE001 - the runtime takes whatever the compiler raises
                return "failed"
            return "executed"

    yield from watch(case, seeds, seconds=COMPILING, nbytes=COMPILING_NBYTES)


def _build(path: Path, device: Device, inspector: Inspector) -> CompiledModel:
    target = identify("model", str(path), {})
    ((name, bundle),) = target.models.values()
    signatures = check_signatures(bundle, inspector)
    return compile_model(bundle, device, HostStore(HostMemory()), load_settings(), name, signatures)


@contextmanager
def _folder(scratch: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
