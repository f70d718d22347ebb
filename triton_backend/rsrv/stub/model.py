"""The class that Triton's Python backend looks for in a generated model.py."""

import asyncio  # noqa: F401  Triton's stub imports it lazily, which would cost the first request 25 ms
import json
import logging
import sys
from pathlib import Path
from typing import Any

from rsrv.stub.engine import Engine, WireTensor
from rsrv.stub.hooks import HookError, Hooks, load_hooks
from rsrv.stub.launch import Launcher, LaunchError, server_pid
from rsrv.stub.replies import Responses
from rsrv.stub.session import UNREACHABLE, Session
from rsrv.stub.tensors import BrokenPairing, Tensors

#: Triton's data types -> ours
_DTYPES = {
    "TYPE_BOOL": "bool", "TYPE_UINT8": "u8", "TYPE_UINT16": "u16", "TYPE_UINT32": "u32", "TYPE_UINT64": "u64",
    "TYPE_INT8": "i8", "TYPE_INT16": "i16", "TYPE_INT32": "i32", "TYPE_INT64": "i64",
    "TYPE_FP16": "f16", "TYPE_FP32": "f32", "TYPE_FP64": "f64", "TYPE_BF16": "bf16",
}  # fmt: skip


class TritonPythonModel:
    """One model's stub. Everything that matters happens in `Engine` and in the runtime."""

    def initialize(self, args: dict[str, str]) -> None:
        """Returns when the model is compiled, warm and ready; raises with the reason when it cannot be."""
        import triton_python_backend_utils as pb_utils

        # Whatever a hook imports must not leave .pyc files in the model's directory: to Triton's poll mode
        # they would look like a change.
        sys.dont_write_bytecode = True
        _log_to_server(args["model_name"])
        config = json.loads(args["model_config"])
        directory = Path(args["model_repository"])
        bundle = directory / args["model_version"] / "bundle"
        hooks_file = bundle / "model.py"
        try:
            server = server_pid()
        except LaunchError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from None
        session = Session(
            # The runtime lives and dies with the server.
            Launcher(server, args["model_instance_device_id"], directory.parent / "rsrv.yaml").open,
            args["model_name"],
            str(bundle),
        )
        batched = config["max_batch_size"] > 0
        try:
            self._engine = Engine(
                Tensors(pb_utils),
                Responses(pb_utils),
                load_hooks(hooks_file) if hooks_file.exists() else Hooks(),
                [_wire(tensor, batched) for tensor in config["input"]],
                [_wire(tensor, batched) for tensor in config["output"]],
                batched,
                session,
            )
        except (*UNREACHABLE, BrokenPairing, HookError) as error:
            session.close()
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from None

    def execute(self, requests: list[Any]) -> list[Any] | None:
        return self._engine.execute(requests)

    def is_ready(self) -> bool:
        """Asked by Triton 26.03 and later for the model's readiness."""
        return self._engine.ready

    def finalize(self) -> None:
        self._engine.close()


def _wire(tensor: dict[str, Any], batched: bool) -> WireTensor:
    dims = (int(extent) for extent in tensor["dims"])
    return WireTensor(tensor["name"], _DTYPES[tensor["data_type"]], (-1, *dims) if batched else tuple(dims))


def _log_to_server(model: str) -> None:
    """The stub's stderr is the server's log."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s %(levelname).1s %(name)s {model}: %(message)s",
    )


__all__ = ["TritonPythonModel"]
