"""Interface between the runtime and its device. `jax_device` implements it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

from rsrv.histogram import LONG_SECONDS, Histogram
from rsrv_bundle.modules import Signature

Array = npt.NDArray[Any]
#: Shape and type of an array.
ArrayKind = tuple[tuple[int, ...], np.dtype[Any]]
# The following types are opaque outside of the device.
#: A compiled module.
Executable = NewType("Executable", object)
#: A tensor in device memory.
Buffer = NewType("Buffer", object)
#: A launched execution.
Launched = NewType("Launched", object)
#: Host arrays that receive an output, by the index of the output.
Targets = Mapping[int, Sequence[Array]]
NO_TARGETS: Targets = MappingProxyType({})
#: State tensors of all slots of a model, in device memory. They are opaque outside of the device.
Pools = NewType("Pools", object)


class DeviceError(Exception):
    """The device refused or failed. The message may reach clients, so it has no paths."""


class OutOfMemory(DeviceError):
    """The device's allocator has no room. Evicting weights and trying again may help."""


class Abandoned(Exception):
    """An upload was abandoned. Nothing of it is left on the device."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Platform of a device (cpu, cuda, or jax's name) and its CUDA compute capability (None: unknown)."""

    platform: str
    capability: tuple[int, int] | None = None

    @property
    def has_tf32(self) -> bool:
        """True if the device is known to have TF32."""
        return self.platform == "cuda" and self.capability is not None and self.capability >= (8, 0)

    def __str__(self) -> str:
        if self.platform != "cuda":
            return f"a device of the platform {self.platform}"
        known = "unknown" if self.capability is None else ".".join(map(str, self.capability))
        return f"a CUDA device of compute capability {known}"


def never() -> bool:
    return False


class DeviceRows(NamedTuple):
    """`rows` rows of a tensor on the device, from the row `first` on.

    They are placed in another tensor, from the row `at` on.
    """

    buffer: Buffer
    first: int
    rows: int
    at: int


class Device(Protocol):
    """Device of the runtime. Every method may block, and may be called from any thread.

    Executions run one after the other, in the order of their launches.
    """

    @property
    def name(self) -> str:
        """Name for operators."""

    @property
    def hardware(self) -> Hardware: ...

    @property
    def asynchronous(self) -> bool:
        """True if `launch` returns before the execution ends, so that launching ahead keeps the device busy."""

    @property
    def writes_host(self) -> bool:
        """True if the device copies outputs to page-locked memory by DMA. Otherwise `launch` accepts no `targets`."""

    @property
    def memory_limit(self) -> int | None:
        """Bytes that the device's allocator may take in total. None: unknown, as on a CPU."""

    @property
    def launcher(self) -> int | None:
        """Thread in which a synchronous device executes, or executed last. Other threads wait in `launch`."""

    def memory_in_use(self) -> int | None:
        """Return the allocated bytes: weights, and the scratch of executions that run. None: unknown."""

    def largest_free(self) -> int | None:
        """Return the bytes of the largest free piece of memory if nothing executes. None: unknown."""

    def compile(self, module: bytes, signature: Signature) -> Executable: ...

    def known_costs(self, model: str) -> Mapping[tuple[int, int], float] | None:
        """Return the costs of a model with this key on a device of this kind, from this or an earlier process.

        None: unknown.
        """

    def keep_costs(self, model: str, costs: Mapping[tuple[int, int], float]) -> None:
        """Keep a model's measured costs: seconds of an execution of each (variant, size)."""

    def known_start(self, model: str) -> float | None:
        """Return the seconds of the shortest build of a model with this key on a device of this kind. None: unknown."""

    def has_executables(self, model: str, name: str) -> bool:
        """Return True if the executables of the model are stored, so that its build compiles nothing."""

    def keep_start(self, model: str, seconds: float) -> None:
        """Keep the seconds that the build of a model took."""

    def scratch_bytes(self, executable: Executable, weight_bytes: int) -> int:
        """Return the bytes of inputs, outputs and intermediates of one execution, without its `weight_bytes`."""

    def upload(
        self,
        arrays: Iterable[Array],
        abandoned: Callable[[], bool] = never,
        kinds: Sequence[ArrayKind] | None = None,
    ) -> list[Buffer]:
        """Copy arrays to the device in order, and return when all copies are complete.

        `arrays` is consumed as the transfers proceed, and `abandoned` is called between tensors. `kinds` has the shapes and
        types of all arrays. Without `kinds`, a GPU consumes all arrays first, because it allocates their memory at once. Raises
        Abandoned, OutOfMemory, and any exception of `arrays`. After an exception, nothing is left on the device, and no
        transfer reads the arrays.
        """

    def free(self, buffers: Iterable[Buffer], *, reuse: bool = False) -> None:
        """Free the memory at once.

        With `reuse`, the next upload gets the memory instead. No execution may use these buffers.
        """

    def page_lock(self, address: int, nbytes: int, *, written: bool = False) -> Callable[[], None]:
        """Page-lock host memory, so that the device reads it by DMA. Return a function that unlocks it.

        `written`: the device also writes to the memory. The memory must stay mapped until the function is called. Raises
        DeviceError.
        """

    def launch(
        self,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: Sequence[Array | Buffer],
        unread: Collection[int] = (),
        pools: Pools | None = None,
        targets: Targets = NO_TARGETS,
    ) -> Launched:
        """Start an execution. `weights` are in the order of the arguments. Inputs must not change until `read` returns.

        Outputs with an index in `unread` are not copied to the host. `targets` has contiguous arrays in page-locked memory, by
        the index of an output. The output's bytes fill these arrays one after the other; they are complete when `read` returns.
        `pools` are the last arguments and the last results: the execution replaces their contents. If it fails, the contents
        may be lost. Raises OutOfMemory. On some devices, `read` raises it instead.
        """

    def make_pools(self, kinds: Sequence[ArrayKind]) -> Pools:
        """Allocate state tensors of zeros. Their first axis is the slot. Raises OutOfMemory."""

    def free_pools(self, pools: Pools) -> None:
        """Free state tensors, which no execution may use."""

    def holds(self, pools: Pools) -> bool:
        """Return whether state tensors still have their contents, after an execution that could not be launched."""

    def read_slot(self, pools: Pools, slot: int) -> list[Array]:
        """Return a slot's tensors on the host, after the executions that were launched before.

        The call may compile a program.
        """

    def write_slot(self, pools: Pools, slot: int, values: Sequence[Array]) -> None:
        """Replace a slot's tensors. The call may compile a program."""

    def keep(self, launched: Launched, index: int) -> Buffer:
        """Return an output of an execution that is not yet read. It stays on the device while the buffer is referenced."""

    def merge(self, base: Array, axis: int, pieces: Sequence[DeviceRows]) -> Buffer:
        """Copy `base` to the device, with the rows of `pieces` in place of its own along `axis`.

        The call may compile a program.

        Raises OutOfMemory.
        """

    def read(self, launched: Launched) -> tuple[list[Array], float]:
        """Return the outputs on the host, read-only, and the seconds for which the execution used the device.

        Call this once per launch. Unread outputs and outputs with targets are returned as empty arrays.
        """

    def start_profile(self, directory: Path) -> None:
        """Start a profile of the device in that directory. Only one profile may be recorded at a time."""

    def stop_profile(self) -> None:
        """Stop the profile. It is complete when this returns."""


def run(
    device: Device, executable: Executable, weights: Sequence[Buffer], inputs: Sequence[Array]
) -> tuple[list[Array], float]:
    """Execute once: launch, then read the outputs."""
    return device.read(device.launch(executable, weights, inputs))


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Numbers of executables since the start: compiled, read from the compilation cache, or shared with another model."""

    compiled: int = 0
    from_cache: int = 0
    shared: int = 0
    #: Reason why executables do not outlive the server, or "" if they do, or if no cache is configured.
    obstacle: str = ""
    #: Durations of the compilations. The device keeps updating the histogram.
    seconds: Histogram = field(default_factory=lambda: Histogram(LONG_SECONDS), compare=False)
