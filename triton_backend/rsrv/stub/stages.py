"""The models that a meta model calls, and what it may send them: the same rules on every way there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rsrv.stub.calls import Keep
from rsrv.stub.endpoint import Endpoint
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.hooks import Hooks
from rsrv.stub.metrics import Meters
from rsrv.stub.replies import Failure
from rsrv.stub.session import Remote
from rsrv.wire.frames import Status
from rsrv.wire.layout import NUMPY


class Elsewhere:
    """Stands for a tensor that is not in this process."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"


@dataclass(frozen=True, slots=True)
class Stage:
    """A model that a meta model calls."""

    #: its place in the list of REGISTERED
    index: int
    remote: Remote
    endpoint: Endpoint


def make_stages(
    remotes: Sequence[Remote], hooks: Mapping[str, Hooks], guard: HookGuard, meters: Meters
) -> dict[str, Stage]:
    """By name."""
    return {
        remote.name: Stage(
            index,
            remote,
            Endpoint(remote.interface, hooks[remote.name], guard, partial(meters.hook, remote.name)),
        )
        for index, remote in enumerate(remotes)
    }


def check_inputs(stage: Stage, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What is sent, by name, checked as Triton checks what clients send. Raises Failure."""
    arrays = {
        name: value if isinstance(value, Elsewhere) else np.asarray(value) for name, value in inputs.items()
    }
    for wire in stage.remote.inputs:
        array = arrays.get(wire.name)
        if array is None:
            raise Failure(Status.INVALID, f"input {wire.name!r} is missing")
        if array.dtype != NUMPY[wire.dtype]:
            raise Failure(Status.INVALID, f"input {wire.name!r} is {array.dtype}, expected {wire.dtype}")
        if not wire.fits(array.shape):
            raise Failure(
                Status.INVALID,
                f"input {wire.name!r}: expected shape {list(wire.dims)}, got {list(array.shape)}",
            )
        if isinstance(array, Elsewhere) and stage.endpoint.hooks.preprocess is not None:
            raise Failure(
                Status.INTERNAL, f"its preprocess hook needs input {wire.name!r}: it cannot be on the device"
            )
    unknown = sorted(arrays.keys() - {wire.name for wire in stage.remote.inputs})
    if unknown:
        raise Failure(Status.INVALID, f"there is no input {unknown[0]!r}")
    return arrays


def check_keep(stage: Stage, keep: Keep) -> frozenset[str]:
    """Names of the outputs that stay on the device. Raises Failure."""
    names = [tensor.name for tensor in stage.remote.interface.variants[0].outputs.tensors]
    wanted = frozenset(names if keep is True else keep or ())
    if wanted and stage.endpoint.hooks.postprocess is not None:
        raise Failure(
            Status.INTERNAL, "its postprocess hook needs the outputs: they cannot stay on the device"
        )
    if unknown := sorted(wanted - set(names)):
        raise Failure(Status.INTERNAL, f"keep_on_device names {unknown[0]!r}, which is no output")
    return wanted
