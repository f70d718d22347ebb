"""What the runtime needs of a device, and what it hears from one. `device` has the one that there is."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NewType, Protocol

import numpy.typing as npt

from rsrv.histogram import LONG_SECONDS, Histogram
from rsrv_bundle.modules import Signature

Array = npt.NDArray[Any]
#: a compiled module, one tensor in device memory, and an execution under way: opaque to everyone but the
#: device that made them
Executable = NewType("Executable", object)
Buffer = NewType("Buffer", object)
Launched = NewType("Launched", object)


class DeviceError(Exception):
    """The device refused or failed; the message is for the log, not for clients."""


class OutOfMemory(DeviceError):
    """The device's allocator has no room. Giving something up and trying again may help."""


class Abandoned(Exception):
    """Whoever wanted an upload does not want it any more; nothing of it is left on the device."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What computes. `platform`: cpu, cuda, or as jax calls it; `capability`: CUDA's, None if it is not known."""

    platform: str
    capability: tuple[int, int] | None = None

    @property
    def has_tf32(self) -> bool:
        """For sure."""
        return self.platform == "cuda" and self.capability is not None and self.capability >= (8, 0)

    def __str__(self) -> str:
        if self.platform != "cuda":
            return f"a device of the platform {self.platform}"
        known = "unknown" if self.capability is None else ".".join(map(str, self.capability))
        return f"a CUDA device of compute capability {known}"


def never() -> bool:
    return False


class DeviceRows(NamedTuple):
    """Rows of a tensor on the device, `first` and following, that become those at `at` and following of another."""

    buffer: Buffer
    first: int
    rows: int
    at: int


class Device(Protocol):
    """What the runtime needs of a device. Every method may block and be called from any thread.

    Executions run one after the other, in the order of their launches.
    """

    @property
    def hardware(self) -> Hardware: ...

    @property
    def asynchronous(self) -> bool:
        """Whether `launch` returns before the execution is done, so that launching ahead keeps the device busy."""

    @property
    def memory_limit(self) -> int | None:
        """Bytes that the device's allocator may take in all. None: not known, as on a CPU."""

    @property
    def launcher(self) -> int | None:
        """The thread that a device that is not asynchronous executes for, or did last: others wait in `launch`."""

    def memory_in_use(self) -> int | None:
        """Bytes that it has given out: weights, and what executions take while they run. None: not known."""

    def compile(self, module: bytes, signature: Signature) -> Executable: ...

    def scratch_bytes(self, executable: Executable, weight_bytes: int) -> int:
        """Bytes that one execution takes beside its `weight_bytes` of weights: inputs, outputs, intermediates."""

    def upload(self, arrays: Iterable[Array], abandoned: Callable[[], bool] = never) -> list[Buffer]:
        """Copy arrays to the device, in order; returns when they are there.

        `arrays` is consumed as the transfers proceed; between tensors `abandoned` is asked. Raises Abandoned,
        OutOfMemory, and whatever `arrays` raises; then nothing is left on the device, nor reads from the arrays.
        """

    def free(self, buffers: Iterable[Buffer], *, reuse: bool = False) -> None:
        """Give the memory back at once, or for the next upload to use. Nothing may execute on these buffers."""

    def page_lock(self, address: int, nbytes: int) -> Callable[[], None]:
        """Keep host memory where it is, so that the device reads it by itself; returns what undoes it.

        The memory must stay mapped until then. Raises DeviceError.
        """

    def launch(
        self,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: Sequence[Array | Buffer],
        unread: Collection[int] = (),
    ) -> Launched:
        """Start an execution; `weights` in argument order. Nobody may write to its inputs before it is read.

        Outputs whose index is in `unread` are not copied to the host.
        Raises OutOfMemory, as `read` does: where the device finds out is its own affair.
        """

    def keep(self, launched: Launched, index: int) -> Buffer:
        """An output of an execution that is not read yet: it stays on the device for as long as this is held."""

    def merge(self, base: Array, axis: int, pieces: Sequence[DeviceRows]) -> Buffer:
        """`base` on the device, with rows (along `axis`) replaced by those of `pieces`. May compile something.

        Raises OutOfMemory.
        """

    def read(self, launched: Launched) -> tuple[list[Array], float]:
        """Once per launch: the outputs on the host, read-only, and the seconds that the execution had the device.

        Unread outputs are empty arrays.
        """

    def start_profile(self, directory: Path) -> None:
        """Record what the device does, into that directory, from now on. At most one such record is made at a time."""

    def stop_profile(self) -> None:
        """End the record; it is there when this returns."""


def run(
    device: Device, executable: Executable, weights: Sequence[Buffer], inputs: Sequence[Array]
) -> tuple[list[Array], float]:
    """One execution from its launch to its outputs."""
    return device.read(device.launch(executable, weights, inputs))


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Executables since the start: compiled anew, read from the compilation cache, and those of another model."""

    compiled: int = 0
    from_cache: int = 0
    shared: int = 0
    #: of those compiled anew; who compiles goes on counting in it
    seconds: Histogram = field(default_factory=lambda: Histogram(LONG_SECONDS), compare=False)
