"""Part `contexts`: compare how much of the card's memory models take, in one runtime or as plain models with a context each."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pynvml
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from rsrv.gpu.memory import nvml_card
from rsrv.gpu.plain import MODEL, example, export_networks, place_plain
from rsrv.gpu.report import Finding, PartInput, Tell
from rsrv.gpu.runtimes import ModelClient, runtime
from rsrv.gpu.server import NoTriton, ask, plain_server
from rsrv.text import amount

_COUNTS = (1, 2, 4, 8)
#: Starts the model of a bundle, and returns when the model has executed once.
_Start = Callable[[Path], None]


class _Meter:
    """Measures the card's memory that processes have taken since the meter was made."""

    def __init__(self) -> None:
        self._used, self._processes = _read()
        #: How the latest figure was measured.
        self.how = ""

    def added(self) -> int:
        """Return the bytes of the new processes, or of the whole card if NVML has no figures of processes."""
        used, processes = _read()
        if added := sum(processes[pid] for pid in processes.keys() - self._processes.keys()):
            self.how = "NVML's figures of the processes"
            return added
        self.how = "NVML's figure of the card, because it has none of the processes"
        return max(0, used - self._used)


def _read() -> tuple[int, Mapping[int, int]]:
    """Return the used bytes of the card, and the used bytes of each process, as far as NVML knows them."""
    with nvml_card() as card:
        used = int(pynvml.nvmlDeviceGetMemoryInfo(card).used)
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
        except pynvml.NVMLError:
            processes = []
        return used, {process.pid: process.usedGpuMemory or 0 for process in processes}


def contexts(part_input: PartInput, tell: Tell) -> None:
    """Measure the memory of 1, 2, 4 and 8 small networks: in a runtime, and as plain models, in Triton if Triton starts."""
    if part_input.on_cpu:
        tell(Finding("memory", "NOT RUN", reason="a CPU has no contexts"))
        return
    bundles = export_networks(
        part_input.folder / "networks", [f"n{i}" for i in range(_COUNTS[-1])], sizes=[1]
    )
    here = _in_runtime(part_input, bundles, tell)
    try:
        before = _Meter()
        with plain_server(part_input) as server:
            own = before.added()
            reason = f"its context, by {before.how}; it is in neither figure below"
            tell(Finding("tritonserver itself", "MEASURED", amount(own), reason, {"bytes": own}))
            with InferenceServerClient(server.address) as client:

                def load(bundle: Path) -> None:
                    place_plain(server.repository, bundle.name, bundle, part_input.device.platform, largest=1)
                    client.load_model(bundle.name)
                    ask(client, bundle.name, example())

                plain = _measure("plain Python-backend models", bundles, load, "in tritonserver", tell)
    except (NoTriton, InferenceServerException) as error:
        tell(Finding("plain models in tritonserver", "NOT RUN", reason=str(error)))
        with _processes(part_input) as start:
            plain = _measure("plain models", bundles, start, "in processes without Triton", tell)
    first, last = _COUNTS[0], _COUNTS[-1]
    each = {
        "plain": (plain[last] - plain[first]) / (last - first),
        "rsrv": (here[last] - here[first]) / (last - first),
    }
    value = f"plain {amount(each['plain'])}, rsrv {amount(each['rsrv'])}"
    tell(Finding("an added model", "MEASURED", value, "weights of 262 kB", each))


def _in_runtime(part_input: PartInput, bundles: Sequence[Path], tell: Tell) -> Mapping[int, int]:
    # A runtime takes most of the card at its start unless jax is told not to.
    environment = {**part_input.environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with ExitStack() as stack:

        def register(bundle: Path) -> None:
            client = ModelClient(process.launcher.open, bundle.name, bundle)
            stack.enter_context(closing(client)).ask([example()])

        meter = _Meter()
        process = stack.enter_context(
            runtime(replace(part_input, environment=environment), "contexts", part_input.device.platform)
        )
        return _measure("models in rsrv", bundles, register, "one runtime", tell, meter)


def _measure(
    title: str, bundles: Sequence[Path], start: _Start, where: str, tell: Tell, meter: _Meter | None = None
) -> Mapping[int, int]:
    """Start the models one after the other. Return the used bytes for each number of models in `_COUNTS`."""
    meter = meter or _Meter()
    used: dict[int, int] = {}
    for count, bundle in enumerate(bundles, start=1):
        start(bundle)
        if count in _COUNTS:
            used[count] = meter.added()
            value = ", ".join(f"{amount(nbytes)} for {number}" for number, nbytes in used.items())
            figures = {f"bytes_{number}": nbytes for number, nbytes in used.items()}
            tell(Finding(title, "MEASURED", value, f"{where}, by {meter.how}", figures))
    return used


@contextmanager
def _processes(part_input: PartInput) -> Iterator[_Start]:
    """Run plain models without Triton until the block ends."""
    with ExitStack() as stack:

        def start(bundle: Path) -> None:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", str(MODEL), str(bundle), part_input.device.platform],
                    env=part_input.environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{MODEL.name} did not start; its output on stderr has the reason")

        yield start
