"""Record which states of a model occur together while a test runs, and compare them with the known combinations.

If a model stays in an unknown combination, the test fails. Short unknown combinations are only printed, because the samples are
too rare to show every short combination. Durations are counted in samples. On a busy machine, states last longer, but the process
that answers for a sample is also slower.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from rsrv.control.sentences import lives, state_of, weights_of
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from tests.combinations import ROWS, Combination
from tests.e2e.harness import RunningTriton

#: Seconds between two samples.
_SAMPLE_S = 0.1
#: Number of consecutive samples in which a model may have an unknown combination.
_PASSING = 10


@contextmanager
def recorded(server: RunningTriton) -> Iterator[None]:
    """Record a server's combinations during the block. At its end, fail if a model stayed in an unknown combination."""
    longest: dict[Combination, int] = {}
    stop = threading.Event()

    def sample() -> None:
        turns: dict[tuple[str, Combination], int] = {}
        while not stop.wait(_SAMPLE_S):
            try:
                seen = _read(server)
            except (OSError, ValueError, grpc.RpcError):
                continue  # The server or its control process is being replaced.
            turns = {pair: turns.get(pair, 0) + 1 for pair in seen.items()}
            for (_, combination), count in turns.items():
                longest[combination] = max(longest.get(combination, 0), count)

    watching = threading.Thread(target=sample)
    watching.start()
    try:
        yield
    finally:
        stop.set()
        watching.join()
    unknown = {
        combination: samples
        for combination, samples in longest.items()
        if not any(row.has(combination) for row in ROWS)
    }
    print(f"{len(longest)} combinations of states met; unknown: {unknown}")
    lasting = sorted(combination for combination, samples in unknown.items() if samples > _PASSING)
    assert not lasting, "tests/combinations.py lacks these:\n" + "\n".join(map(str, lasting))


def _read(server: RunningTriton) -> dict[str, Combination]:
    """Return the current combination of each model. Return nothing if Triton's index changes while the control process answers."""
    address = server._control_address()
    if address is None:
        return {}
    before = _index(server)
    with grpc.insecure_channel(address) as channel:
        answer = control_pb2_grpc.ControlStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5)
    if _index(server) != before:
        return {}
    words = lives(answer)
    asleep = all(device.HasField("asleep_since_unix_s") for device in answer.devices)
    combinations = {}
    for model in (*answer.models, *answer.metas):
        text = words[model.name]
        known = any(version.key for version in model.versions)
        combinations[model.name] = Combination(
            text.partition(",")[0]
            + (", in an older version" if text.endswith("in an older version") else ""),
            model.bundle,
            before.get(model.name, "absent"),
            "connected" if any(version.stubs for version in model.versions) else "waiting",
            "asleep" if asleep else state_of(model.versions) if known else "none",
            weights_of(model.record) or "none",
        )
    return combinations


def _index(server: RunningTriton) -> dict[str, str]:
    request = urllib.request.Request(f"http://{server.server.http_url}/v2/repository/index", b"{}")
    with urllib.request.urlopen(request, timeout=5) as answer:
        entries: list[dict[str, Any]] = json.load(answer)
    return {entry["name"]: entry.get("state", "UNAVAILABLE") or "UNAVAILABLE" for entry in entries}
