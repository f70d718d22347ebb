"""The parts of a real server that strangers can reach."""

from __future__ import annotations

import os
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from local_triton import TritonServer
from tests.e2e.calls import PROTOCOLS, caller
from tests.e2e.harness import RunningTriton


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_clients_cannot_have_the_server_map_shared_memory(triton: RunningTriton, protocol: str) -> None:
    """Clients can register neither their own shared memory nor Triton's. Inference works."""
    client = triton.grpc if protocol == "grpc" else triton.http
    theirs = SharedMemory(create=True, size=4096)
    try:
        # Whoever writes to the memory of stubs and server can execute code in them. This once allowed a takeover.
        own = [name for name in os.listdir("/dev/shm") if "triton" in name]
        for key in (theirs.name, *own[:1]):
            with pytest.raises(InferenceServerException) as refused:
                client.register_system_shared_memory("region", f"/{key}", 4096)
            assert refused.value.status() in ("StatusCode.UNAVAILABLE", "403")
        with pytest.raises(InferenceServerException):
            client.register_cuda_shared_memory("region", b"\0" * 64, 0, 4096)
        with pytest.raises(InferenceServerException):
            client.get_system_shared_memory_status()
    finally:
        theirs.close()
        theirs.unlink()
    with caller(triton, protocol) as call:
        x = np.arange(8, dtype=np.float32).reshape(2, 4) + 1000
        np.testing.assert_array_equal(call("hooked", {"x": x})["y"], 2 * x)


def test_an_option_allows_clients_to_share_memory(triton: RunningTriton) -> None:
    """With the option `client_shared_memory`, no flag keeps clients from registering shared memory."""
    server = triton.server
    flags = [flag for flag in server.command() if "restricted" in flag]
    assert len(flags) == 2
    command = TritonServer(server.model_repository, client_shared_memory=True).command()
    assert not [flag for flag in command if "restricted" in flag]
