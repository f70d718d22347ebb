"""The entry of Triton's Python backend for a meta model: `TritonPythonModel`, which a generated model.py imports."""

import asyncio  # noqa: F401  Triton's stub imports it lazily, as in `model`
import json
from collections.abc import Sequence
from typing import Any

from rsrv.hooks.loader import HookError, load_hooks, load_run
from rsrv.stub.bls import CALL_TIMEOUT_S, MAX_CALLS, Bls, limit, read_pool_size
from rsrv.stub.hook_import import HookImport
from rsrv.stub.meta_engine import MetaEngine, MetaModel
from rsrv.stub.model import ModelStub, ServedModel, Setup, check_strings
from rsrv.stub.replica import StubProcess
from rsrv.stub.replies import Responses
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors


class MetaModelStub(ModelStub):
    """One meta model's stub. `MetaEngine` and the runtime do its work."""

    def serve(self, setup: Setup, pb_utils: Any) -> ServedModel:
        folder = setup.bundle.parent / "calls"
        callees = sorted(folder.iterdir()) if folder.is_dir() else []
        repository = setup.bundle.parents[2]
        parameters = setup.config["parameters"]
        external = parameters.get("rsrv_external", {"string_value": "[]"})
        tensors = Tensors(pb_utils)
        process = StubProcess(tensors, Responses(pb_utils))
        check_strings([*setup.config["input"], *setup.config["output"]], tensors)
        carried_only = [path.name for path in callees if not (repository / path.name).is_dir()]
        shared: list[Bls] = []

        def make_bls(settings: dict[str, Any]) -> Bls:
            # Make one object for all replicas, because its limit of threads holds for the whole process.
            if not shared:
                most = limit(read_pool_size(setup.launcher.server_pid))
                shared.append(_make_bls(pb_utils, tensors, most, carried_only, settings))
            return shared[0]

        def load() -> MetaModel:
            return MetaModel(
                load_run(file),
                {path.name: load_hooks(path / "model.py") for path in callees},
                setup.outputs,
                setup.batched,
                external=json.loads(external["string_value"]),
                restartable="rsrv_restartable" in parameters,
            )

        file = setup.bundle / "model.py"
        model = HookImport(file, load, more=[path / "model.py" for path in callees])

        def make(session: Session, attachment: Attachment) -> MetaEngine:
            return MetaEngine(session, attachment, process, model.result(session, attachment), make_bls)

        calls = {path.name: str(path) for path in callees}
        return setup.serve(make, process, calls, calls)


def _make_bls(
    pb_utils: Any, tensors: Tensors, most: int, carried_only: Sequence[str], settings: dict[str, Any]
) -> Bls:
    """Make the object that calls models through Triton. Raises HookError.

    `most` limits the calls in flight. `carried_only` are callees that are not in the model repository.
    """
    if carried_only and settings["transport"] == "bls":
        raise HookError(
            f"meta.transport is bls, but the model repository was made for direct and has no model {carried_only[0]!r}; "
            "run rsrv-gen with meta.transport: bls in the file of --config, or set meta.transport back to direct"
        )
    try:
        return Bls(pb_utils, tensors, min(MAX_CALLS, most), CALL_TIMEOUT_S)
    except ValueError as error:
        raise HookError(str(error)) from None


#: Triton's Python backend looks for this name.
TritonPythonModel = MetaModelStub

__all__ = ["TritonPythonModel"]
