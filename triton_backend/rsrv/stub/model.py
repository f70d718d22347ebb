"""The entry of Triton's Python backend for a model: `TritonPythonModel`, which a generated model.py imports."""

import asyncio  # noqa: F401  Triton's stub imports it lazily, which would cost the first request 25 ms
import json
import locale
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

from rsrv import logs
from rsrv.hooks.loader import HookError, Hooks, load_hooks
from rsrv.hooks.text import PromptTokeniser
from rsrv.stub.connection import LaunchError
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.generation import GenerationEngine
from rsrv.stub.hook_guard import bound_exit
from rsrv.stub.hook_import import HookImport
from rsrv.stub.replica import ModelReplica, StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.sequences import SequenceHomes
from rsrv.stub.session import UNREACHABLE, Attachment, Launcher, Session, server_pid
from rsrv.stub.tensors import BrokenPairing, Tensors
from rsrv.wire.paths import PLACEMENT, read_devices, runtime_directory, start_time
from rsrv.wire.placement_table import PlacementReader
from rsrv.wire.stub_process import StubCommand, remove_regions

#: rsrv's data types by Triton's data types.
_DTYPES = {
    "TYPE_BOOL": "bool", "TYPE_UINT8": "u8", "TYPE_UINT16": "u16", "TYPE_UINT32": "u32", "TYPE_UINT64": "u64",
    "TYPE_INT8": "i8", "TYPE_INT16": "i16", "TYPE_INT32": "i32", "TYPE_INT64": "i64",
    "TYPE_STRING": "bytes", "TYPE_FP16": "f16", "TYPE_FP32": "f32", "TYPE_FP64": "f64", "TYPE_BF16": "bf16",
}  # fmt: skip


class ModelStub:
    """One model's stub. `Engine` and the runtime do its work.

    Triton 26.03 and later would call `is_ready` before each BLS call. The stub does not define this method: while the runtime
    restarts, requests wait in the stub, so the stub is ready as long as its process runs.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model. Return when it is ready or cold. The first request starts a cold model.

        Raises TritonModelException with the reason if the model cannot be loaded.
        """
        import triton_python_backend_utils as pb_utils

        try:
            setup = set_up(args, pb_utils)
            try:
                self._served = self.serve(setup, pb_utils)
            except (*UNREACHABLE, BrokenPairing, HookError) as error:
                raise pb_utils.TritonModelException(f"{setup.name}: {error}") from None
        except BaseException:
            end_if_orphaned(os.getpid())
            raise

    def serve(self, setup: "Setup", pb_utils: Any) -> "ServedModel":
        """Return the object that answers Triton's requests. Raises one of UNREACHABLE, BrokenPairing, HookError."""
        return serve_model(setup, StubProcess(Tensors(pb_utils), Responses(pb_utils)), pb_utils)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        return self._served.execute(requests)

    def finalize(self) -> None:
        try:
            self._served.close()
            logs.flush()
        finally:
            bound_exit()


def end_if_orphaned(pid: int, leave: Callable[[int], object] = os._exit) -> None:
    """If the server has ended, remove this stub's shared memory and end the process. Otherwise, Triton's code waits forever."""
    command = StubCommand.read(pid)
    if command is not None and not start_time(command.server):
        remove_regions([command.region])
        leave(1)


class ServedModel(Protocol):
    """A model on all of its devices, or the targets of an alias."""

    def execute(self, requests: Sequence[Any], /) -> list[Any] | None:
        """Answer Triton's requests, as `EntryPoint.execute`."""

    def close(self) -> None: ...


def serve_model(
    setup: "Setup", process: StubProcess, pb_utils: Any, hooks: HookImport[Hooks] | None = None
) -> Replicas:
    """Load a model that is not a meta model, and return it when it is ready or cold.

    `hooks` is the import of its `model.py`. A caller that makes several attempts passes the same import to each attempt.

    Raises one of UNREACHABLE, BrokenPairing, HookError.
    """
    check_strings(setup.config["input"], process.tensors)
    if batching := setup.config.get("sequence_batching"):
        process.homes = SequenceHomes(int(batching["max_sequence_idle_microseconds"]) / 1e6)
    prompts = cache(setup.prompts)
    hooks = hooks or import_hooks(setup.bundle)

    def make(session: Session, attachment: Attachment) -> ModelReplica[Any]:
        facts = attachment.models[0].generate
        replica: Engine | GenerationEngine
        if facts is not None:
            made = facts["tokenizer"] and prompts(facts["tokenizer"], facts["template"])
            replica = GenerationEngine(session, attachment, process, made)
        else:
            # The outputs of a generating model are not checked. If it generates text, its input is also text, and was checked.
            # Otherwise, `finish_reason` is its only string output, and it leaves this output out if numpy cannot carry text.
            check_strings(setup.config["output"], process.tensors)
            internal = "rsrv_internal" in setup.config["parameters"]
            setup_hooks = hooks.result(session, attachment)
            replica = Engine(
                session, attachment, process, setup_hooks, setup.outputs, setup.batched, internal=internal
            )
        replica.meters.alias, replica.meters.copies = setup.alias, setup.copies
        return replica

    return setup.serve(make, process)


def check_strings(wires: Sequence[Mapping[str, Any]], tensors: Tensors) -> None:
    """Raise BrokenPairing if clients send or get strings that the stub's numpy cannot carry."""
    if any(wire["data_type"] == "TYPE_STRING" for wire in wires):
        tensors.check_text()


def import_hooks(bundle: Path) -> HookImport[Hooks]:
    """Return the import of a bundle's `model.py`. It begins with the first call of its `result`."""
    return HookImport(file := bundle / "model.py", partial(load_hooks, file))


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a stub, from the arguments that Triton passes at its start."""

    name: str
    #: Content of config.pbtxt.
    config: dict[str, Any]
    bundle: Path
    outputs: list[WireTensor]
    #: True if Triton batches this model.
    batched: bool
    launcher: Launcher
    #: The model's version in Triton.
    version: str
    #: The alias of which the model is a target. Empty: the model is served by its own name.
    alias: str = ""
    #: True if the model is a target that gets copies of requests.
    copies: bool = False

    def prompts(self, file: str, template: str) -> PromptTokeniser:
        """Read the tokeniser of a model that generates text. Raises HookError."""
        try:
            return PromptTokeniser(self.bundle / file, template)
        except (ImportError, ValueError) as error:
            raise HookError(str(error)) from None

    def serve(
        self,
        make: Callable[[Session, Attachment], ModelReplica[Any]],
        process: StubProcess,
        callees: Iterable[str] = (),
        calls: Mapping[str, str] | None = None,
    ) -> Replicas:
        """Load the model, and return it when it is ready or cold. `make` makes its replicas.

        `callees` are the models that a meta model calls, and `calls` are their bundles by name. Hooks are imported only in
        `make`, because a cold model does not need them. Raises one of UNREACHABLE, and the errors of `make`.
        """
        os.register_at_fork(after_in_child=partial(_become_child, process))

        def open_session(device: int) -> Session:
            launcher = replace(self.launcher, device=str(device))
            return Session(launcher.open, self.name, str(self.bundle), calls, device)

        @cache
        def set_up_logs(form: Any) -> None:
            # From here on, a thread writes the log, so that failed requests do not wait for it.
            logs.setup(form, self.alias or self.name, aside=True)

        def make_replica(session: Session, attachment: Attachment) -> ModelReplica[Any]:
            set_up_logs(attachment.settings["logs"]["format"])
            return make(session, attachment)

        placement = self.placement(callees)
        model = Replicas(open_session, make_replica, self.name, process, placement, self.devices)
        model.load()
        return model

    def placement(self, callees: Iterable[str] = ()) -> PlacementReader:
        """Return a reader of the server's placement table for the devices of the model and its callees."""
        directory = runtime_directory(self.launcher.server_pid, "0")
        return PlacementReader(directory / PLACEMENT, self.name, callees)

    def devices(self) -> int:
        """Return the number of the server's devices; 1 before its first runtime has found them."""
        try:
            return len(read_devices(runtime_directory(self.launcher.server_pid, "0")))
        except (OSError, ValueError):
            return 1


def _become_child(process: StubProcess) -> None:
    """Prepare a process that a hook has forked, such as a worker of a Pool."""
    # The runtime must notice the end of the stub even if this child process still runs.
    process.abandon()
    # Triton's stub ignores these signals, but Python ends the workers of a Pool with them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _use_utf8() -> None:
    """Make this process read and write text in UTF-8, as Python does by default. Triton starts its stubs with ASCII.

    The encoding of file names stays ASCII, because it is fixed when Python starts.
    """
    with suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def set_up(args: dict[str, str], pb_utils: Any) -> Setup:
    """Read `initialize`'s arguments, and begin to log. Raises TritonModelException."""
    _use_utf8()
    # The imports of a hook must not leave .pyc files in the model's directory, because Triton's poll mode would regard them
    # as a change of the model.
    sys.dont_write_bytecode = True
    name = args["model_name"]
    logs.setup(model=name)
    config = json.loads(args["model_config"])
    if (count := instances(config)) > 1:
        # With several processes, the runtime would count each request several times, and would not notice the crash of one.
        raise pb_utils.TritonModelException(
            f"{name}: instance_group in {args['model_repository']}/config.pbtxt makes {count} instances, and rsrv "
            "serves a model from one. The runtime executes requests of one instance together: set count to 1 in a "
            "single group of KIND_CPU, or run rsrv-gen again"
        )
    # Make the path absolute, because hooks may change the working directory.
    directory = Path(args["model_repository"]).absolute()
    try:
        server = server_pid()
    except LaunchError as error:
        raise pb_utils.TritonModelException(f"{name}: {error}") from None
    batched = config["max_batch_size"] > 0
    return Setup(
        name,
        config,
        directory / args["model_version"] / "bundle",
        [_wire(tensor, batched) for tensor in config["output"]],
        batched,
        # A runtime that the launcher starts ends with the server.
        Launcher(
            server,
            args["model_instance_device_id"],
            directory.parent / "rsrv.yaml",
            Path.cwd(),
            dict(os.environ),
        ),
        args["model_version"],
    )


def instances(config: Mapping[str, Any]) -> int:
    """Return how many processes Triton starts for the model: for each group `count`, or `count` on each of its `gpus`."""
    groups = config["instance_group"]
    return sum(int(group["count"]) * max(1, len(group.get("gpus", ()))) for group in groups)


def _wire(tensor: dict[str, Any], batched: bool) -> WireTensor:
    dims = (int(extent) for extent in tensor["dims"])
    return WireTensor(tensor["name"], _DTYPES[tensor["data_type"]], (-1, *dims) if batched else tuple(dims))


#: Triton's Python backend looks for this name.
TritonPythonModel = ModelStub

__all__ = ["TritonPythonModel"]
