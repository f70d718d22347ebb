"""Threads that read, compile and warm up models. They post messages to the loop when work ends."""

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf

from rsrv.limits import spare_mappings
from rsrv.logs import fields
from rsrv.runtime.activity import Activity
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.device import Device, DeviceError, OutOfMemory
from rsrv.runtime.host_memory import HostMemoryError, memory_limit, open_host_memory
from rsrv.runtime.host_weights import HostStore
from rsrv.runtime.models import CompiledModel, RequestedModels, about, compile_model, identify, warm_up
from rsrv.runtime.numerics import Computes, probe
from rsrv.runtime.start_queue import BuildStep, Demand, StartQueue, Urgency
from rsrv.runtime.threads import Inbox, WorkerThread, lower_priority
from rsrv.runtime.transport import PeerConnection
from rsrv.runtime.weight_mover import WeightMover
from rsrv.settings import Settings
from rsrv.wire.blackbox import Phase
from rsrv_bundle import Bundle, BundleError
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import check_signatures, signature_of

log = logging.getLogger(__name__)

_CLEAN_UP = Demand(Urgency.CLEAN_UP)
#: Expected seconds of a compilation for each byte of its module, if nothing else is known: 5 to 20 s for 100 kB on a CPU.
_BYTE_S = 1e-4

#: Number of mappings that a large executable takes on a CPU.
_MAPPINGS = 100
#: Share of all mappings that is reserved for other uses.
_MAPPINGS_KEPT = 1 / 32


@dataclass(frozen=True, slots=True)
class DeviceReady:
    """The device and the thread that moves weights are ready."""

    device: Device
    weight_mover: WeightMover
    #: Default precision of the device's f32 products, or None on a CPU.
    computes: Computes | None


@dataclass(frozen=True, slots=True)
class BundlesRead:
    """The bundles of a connection are read. If the read failed, `result` is the reason.

    If `connection` is None, the runtime itself starts the model (`Registry.start`).
    """

    connection: PeerConnection | None
    result: RequestedModels | str
    #: Reasons not to build models that have ended too many runtimes, by the model's key.
    verdicts: Mapping[str, str]
    #: Demand when the read began. A connection's demand may have changed since then.
    demand: Demand
    #: Name of the requested model or meta model.
    name: str = ""
    is_meta: bool = False
    #: Expected seconds of each model's build, by key.
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModulesRead:
    """A model's modules are read and inspected."""

    key: str


@dataclass(frozen=True, slots=True)
class ModuleCompiled:
    """Another module of a model is compiled."""

    key: str
    done: int
    of: int


@dataclass(frozen=True, slots=True)
class ModelCompiled:
    """A model is compiled. If its build failed, `result` is the reason."""

    key: str
    result: CompiledModel | str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The build thread has finished a step for a model after `seconds`, and is free."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelWarmedUp:
    """A warm-up ended. `costs` is None if it failed."""

    model: CompiledModel
    costs: Mapping[tuple[int, int], float] | None
    error: str = ""
    #: True if the device had no memory for the model, so that another try may succeed.
    out_of_memory: bool = False


class ModelBuilder:
    """The build thread, with the device that it makes, and the warm-up thread.

    `make_device` runs on the build thread, because importing jax takes seconds, and stubs may connect during this time.
    `inspector` inspects modules before they are compiled. Without it, they are inspected on the build thread.
    """

    def __init__(
        self,
        make_device: Callable[[], Device],
        settings: Settings,
        inbox: Inbox,
        activity: Activity,
        blackbox: BlackBox,
        inspector: Inspector | None = None,
    ) -> None:
        self._make_device = make_device
        self._settings = settings
        self._inbox = inbox
        self._activity = activity
        self._crash_history = blackbox.history
        self._owner = blackbox.owner
        self._inspector = inspector
        self._device: Device | None = None
        self._whole: tuple[Device, WeightMover] | None = None
        #: Number of mappings that executables may take before the mappings of this process are counted again.
        self._mappings = 0
        self._build_thread = WorkerThread("build")
        self._queue = StartQueue()
        # Warm-ups have their own thread, because weights stay on the device until a warm-up is done, and the build thread
        # may be busy with a compilation for minutes.
        self._warm_up_thread = WorkerThread("warm up")
        if inspector is not None:
            self._build_thread.put(inspector.start)
        #: True while the build thread has a step. The thread gets one step at a time, so that an urgent step can overtake waiting
        #: steps.
        self._busy = True
        self._build_thread.put(partial(self._do, "", self._start_device))

    # --- orders of the loop -------------------------------------------------------------------------------

    def read(
        self,
        connection: PeerConnection | None,
        name: str,
        path: str,
        calls: Mapping[str, str],
        demand: Demand,
    ) -> None:
        """Read the bundle of a model, or of a meta model and the models that it calls. Ends in `BundlesRead`."""
        action = partial(self._read, connection, name, path, calls, demand)
        id = f"read {path}" if connection is None else connection.id
        self._put(BuildStep(id, name, demand, action, reads=True))

    def waiting(self) -> set[str]:
        """Return the models whose next step waits for the build thread."""
        return self._queue.names()

    def waits(self, connection: PeerConnection) -> bool:
        """Return whether a connection's bundles wait to be read."""
        return connection.id in self._queue

    def order(self) -> list[BuildStep]:
        """Return the steps that wait for the build thread, in their order."""
        return self._queue.order(time.monotonic())

    def forget(self, connection: PeerConnection) -> None:
        """Cancel the read of a closed connection's bundles, unless it has begun."""
        self._queue.drop(connection.id)

    def build(
        self, key: str, name: str, bundle: Bundle, settings: Settings, demand: Demand, seconds: float
    ) -> None:
        """Read a model's modules and compile them, which is expected to take `seconds`.

        Posts `ModulesRead`, then `ModuleCompiled` for each module, and `ModelCompiled`. After an error, `ModelCompiled` follows
        at once.
        """
        action = partial(self._build, key, name, bundle, settings)
        self._put(BuildStep(key, name, demand, action, seconds=seconds))

    def change_demand(self, of: str | PeerConnection, demand: Demand) -> None:
        """Set the demand of a step that has not begun: a model's build, by its key, or the read of a connection's bundles."""
        self._queue.change(of if isinstance(of, str) else of.id, demand, time.monotonic())

    def drop(self, key: str) -> bool:
        """Cancel the build of a model. Return False if the build has begun."""
        return self._queue.drop(key)

    def step_ended(self, message: StepEnded) -> None:
        """Begin the next step of the build thread."""
        self._busy = False
        self._queue.charge(message.name, message.seconds, time.monotonic())
        self._begin()

    def warm_up(self, model: CompiledModel, device: Device, *, again: bool) -> None:
        """Execute every size of a model whose weights are on the device. Ends in `ModelWarmedUp`.

        `again`: True if this is a retry, because the device had no memory for the first attempt.
        """
        self._warm_up_thread.put(partial(self._warm_up, model, device, again))

    def clean_up(self, host: HostStore) -> None:
        """Free resources that only builds need, after all waiting steps."""
        if self._inspector is not None:
            self._put(BuildStep("inspector", "", _CLEAN_UP, self._inspector.close))
        self._put(BuildStep("sweep", "", _CLEAN_UP, host.sweep))

    def _put(self, step: BuildStep) -> None:
        self._queue.put(step, time.monotonic())
        self._begin()

    def _begin(self) -> None:
        if not self._busy and (step := self._queue.pop(time.monotonic())) is not None:
            self._busy = True
            self._build_thread.put(partial(self._do, step.name, step.action))

    # --- on the threads -----------------------------------------------------------------------------------

    def _do(self, name: str, action: Callable[[], object]) -> None:
        started = time.monotonic()
        action()
        self._inbox.post(StepEnded(name, time.monotonic() - started))

    def _start_device(self) -> None:
        """Start the device before the first model is built. After a failure, each build tries again."""
        try:
            self._get_device()
        except (DeviceError, HostMemoryError) as error:
            log.error("%s", error)
        _freeze()
        # Do this last, because the device's own threads would inherit the priority.
        lower_priority()

    def _get_device(self) -> tuple[Device, WeightMover]:
        """Return the device and the weight mover. Make them if they do not exist yet.

        Raises DeviceError and HostMemoryError.
        """
        if self._whole is None:
            if self._device is None:
                try:
                    self._device = self._make_device()
                except DeviceError as error:
                    raise DeviceError(f"the runtime has no device: {error}") from None
                except Exception as error:
                    log.exception("opening the device failed")
                    raise DeviceError(
                        f"the runtime has no device: {type(error).__name__}: {error}"
                    ) from error
            computes = probe(self._device, self._settings.runtime.numerics)
            runtime = self._settings.runtime
            memory = open_host_memory(runtime.shared_host_weights, self._owner)
            host = HostStore(memory, self._device.page_lock, memory_limit(runtime.host_memory_bytes))
            weight_mover = WeightMover(self._device, host, self._inbox, self._activity.weights)
            self._whole = self._device, weight_mover
            self._inbox.post(DeviceReady(self._device, weight_mover, computes))
        return self._whole

    def _read(
        self,
        connection: PeerConnection | None,
        name: str,
        path: str,
        calls: Mapping[str, str],
        demand: Demand,
    ) -> None:
        result: RequestedModels | str
        verdicts: dict[str, str] = {}
        seconds: dict[str, float] = {}
        try:
            result = identify(name, path, calls)
            seconds = {key: self._expect(key, *model) for key, model in result.models.items()}
            verdicts = {key: why for key in result.models if (why := self._crash_history.verdict(key))}
        except BundleError as error:
            result = str(error)
        except Exception as error:
            log.exception("%s: cannot read the bundle", name, extra=fields(model=name))
            result = f"{type(error).__name__}: {error}"
        if isinstance(result, str):
            log_not_loaded(name, None, result)
        self._inbox.post(BundlesRead(connection, result, verdicts, demand, name, bool(calls), seconds))

    def _expect(self, key: str, name: str, bundle: Bundle) -> float:
        """Return the expected seconds of a model's build, or 0 if its executables are stored."""
        if self._device is not None:
            if self._device.has_executables(key, name):
                return 0.0
            if (known := self._device.known_start(key)) is not None:
                return known
        return _BYTE_S * sum(path.stat().st_size for path in set(bundle.modules.values()))

    def _build(self, key: str, name: str, bundle: Bundle, settings: Settings) -> None:
        result: CompiledModel | str
        try:
            device, weight_mover = self._get_device()
            started = time.monotonic()
            with (slot := self._activity.build).doing(Phase.BUILDING, key, expected=inf):
                signatures = check_signatures(bundle, self._inspector or signature_of)
                self._inbox.post(ModulesRead(key))
                self._require_mappings(len(signatures))
                host, progress = weight_mover.host, partial(self._compiled, key)
                result = compile_model(bundle, device, host, settings, name, signatures, slot, progress)
                if result.measured:
                    self._crash_history.survived(key)
            device.keep_start(key, time.monotonic() - started)
        except (BundleError, InspectorError, DeviceError, HostMemoryError) as error:
            result = str(error)
        except Exception as error:
            log.exception("%s: cannot be loaded", name, extra=fields(model=name, version=key))
            result = f"{type(error).__name__}: {error}"
        self._inbox.post(ModelCompiled(key, result))
        _freeze()

    def _compiled(self, key: str, done: int, of: int) -> None:
        self._inbox.post(ModuleCompiled(key, done, of))

    def _require_mappings(self, executables: int) -> None:
        """Raise DeviceError if the kernel allows this process few more mappings. XLA aborts a process that gets none."""
        if self._mappings < _MAPPINGS * executables:
            left, most = spare_mappings()
            self._mappings = left - int(most * _MAPPINGS_KEPT)
            if self._mappings <= 0:
                raise DeviceError(
                    f"the runtime has no memory mappings left for more executables ({most - left} of vm.max_map_count: "
                    f"{most}): raise that limit of the kernel, or serve fewer models on this device"
                )
        self._mappings -= _MAPPINGS * executables

    def _warm_up(self, model: CompiledModel, device: Device, again: bool) -> None:
        try:
            costs = warm_up(model, device, self._activity.warm_up)
            device.keep_costs(model.key, costs)
            self._crash_history.survived(model.key)
            ended = ModelWarmedUp(model, costs)
        except Exception as error:
            if isinstance(error, OutOfMemory) and not again:
                text = "%s: no memory on the device to warm it up: %s"
                log.warning(text, model.name, error, extra=about(model))
                ended = ModelWarmedUp(model, None, out_of_memory=True)
            else:
                log.exception("%s: cannot be warmed up", model.name, extra=about(model))
                ended = ModelWarmedUp(model, None, f"{type(error).__name__}: {error}")
        self._inbox.post(ended)


def _freeze() -> None:
    """Exempt all present objects from garbage collection.

    Modules and models live long, and a collection blocks the interpreter.
    """
    gc.collect()
    gc.freeze()


def log_not_loaded(name: str, key: str | None, reason: str) -> None:
    log.error("%s: not loaded: %s", name, reason, extra=fields(model=name, version=key, event="not_loaded"))
