"""Errors of CUDA that end its context. The runtime ends, the model is blamed, and the next runtime serves."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rsrv.stub.engine import Engine
from rsrv.wire import paths
from tests.fakes import FakeRequest
from tests.gpu.conftest import StartServed
from tests.gpu.fake_gpu import GIB, FakeGpu
from tests.unit.runtime.engines import ramp


def answered(engine: Engine) -> bool:
    request = FakeRequest({"x": ramp(1)})
    (answer,) = engine.execute([request]) or [request.answers.get(timeout=120)]
    return answer.error is None


def test_an_illegal_address_ends_the_runtime_and_the_next_one_serves(
    gpu: FakeGpu, serve: StartServed, doubling: Path
) -> None:
    """CUDA reports the error for every call of the process, so only another process can use the card.

    The next runtime gets the same amount of memory, although the driver still holds the memory of the first one when it starts.
    """
    # Even on a busy machine, a runtime starts within these 90 seconds.
    engine = serve(doubling, "guilty", "{platform: cuda}\nstub: {retry_s: 90}")
    assert answered(engine)
    gpu.settings.held_ns = 5 * 10**9
    gpu.settings.launches_until_fault = 0

    # This request waits for the next runtime.
    assert answered(engine)

    directory = paths.runtime_directory(os.getpid(), "0")
    ((key, deaths),) = json.loads((directory / paths.DEATHS).read_text()).items()
    assert key.startswith("guilty@")
    assert [(death["phase"], death["how"]) for death in deaths] == [("EXECUTING", "crashed")]
    assert [call.bytes for call in gpu.calls("alloc", "no-room")] == [72 * GIB, 72 * GIB]
