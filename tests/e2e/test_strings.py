"""Strings of standard clients, over both protocols, through hooks and a meta model."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from rsrv_bundle.export import export_bundle
from tests.builders import write_meta
from tests.e2e.calls import PROTOCOLS, Array, at_once, caller
from tests.e2e.harness import RunningTriton, make_repository, running_triton

TEXTS = ["", "two words", "snow: \N{SNOWMAN}", "line\nline", "x" * 70_000]
HOOKS = """
import numpy as np


def preprocess(inputs):
    return {"length": np.array([[len(text.decode())] for text in inputs["text"]], np.float32)}


def postprocess(outputs):
    return {"label": [f"{int(length)} characters".encode() for (length,) in outputs["same"]]}
"""
META = """
def run(inputs, call):
    shouted = [text.decode().upper() for text in inputs["text"]]
    return {"label": call("lengths", {"text": shouted})["label"], "text": [[one, one] for one in shouted]}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with a model of strings, and a meta model that calls it."""
    home = tmp_path_factory.mktemp("strings")
    text = {"name": "text", "dtype": "bytes", "shape": "n"}
    export_bundle(
        lambda params, length: {"same": length},
        {},
        {"length": np.zeros((1, 1), np.float32)},
        batch_sizes=[1, 8],
        out_dir=home / "lengths",
        hooks=HOOKS,
        client_inputs=[text],
        client_outputs=[{"name": "label", "dtype": "bytes", "shape": "n"}],
    )
    write_meta(
        home / "shout",
        META,
        ["lengths"],
        client="client_inputs: [{name: text, dtype: bytes, shape: n}]\n"
        "client_outputs: [{name: label, dtype: bytes, shape: n}, {name: text, dtype: bytes, shape: nk, dims: {k: 2}}]\n",
    )
    repository = make_repository(home, home / "lengths", home / "shout")
    with running_triton(repository, home / "server.log") as running:
        yield running


def column(texts: list[str]) -> Array:
    return np.array([[text.encode()] for text in texts], object)


def labels(texts: list[str]) -> list[list[bytes]]:
    return [[f"{len(text)} characters".encode()] for text in texts]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_strings_of_any_length_go_through_hooks(server: RunningTriton, protocol: str) -> None:
    """A batch of them, and eight clients at once, whose requests share executions."""
    with caller(server, protocol) as call:
        assert call("lengths", {"text": column(TEXTS)})["label"].tolist() == labels(TEXTS)

    for number, answers in enumerate(
        at_once(
            server,
            8,
            lambda call, number: [
                call("lengths", {"text": column(["y" * number, "z"])})["label"] for _ in range(5)
            ],
            protocol,
        )
    ):
        assert all(answer.tolist() == labels(["y" * number, "z"]) for answer in answers)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_meta_model_takes_passes_on_and_returns_strings(server: RunningTriton, protocol: str) -> None:
    """Several strings a row, too."""
    with caller(server, protocol) as call:
        answer = call("shout", {"text": column(TEXTS[:4])})

    shouted = [text.upper() for text in TEXTS[:4]]
    assert answer["label"].tolist() == labels(shouted)
    assert answer["text"].tolist() == [[one.encode()] * 2 for one in shouted]


def test_strings_that_end_early_are_refused(server: RunningTriton) -> None:
    """A string says that it is longer than its tensor, and a tensor holds too few; the next request is answered."""
    channel = grpc.insecure_channel(server.server.grpc_url)
    ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
    for raw, rows in ((b"\xff\xff\xff\x7fabcd", 1), (b"\2\0\0\0ab", 2), (b"\2\0", 1)):
        message = service_pb2.ModelInferRequest(model_name="lengths")
        message.inputs.add(name="text", datatype="BYTES", shape=[rows, 1])
        message.raw_input_contents.append(raw)
        with pytest.raises(grpc.RpcError) as refused:
            ask(message, timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value
    channel.close()
    with caller(server) as call:
        assert call("lengths", {"text": column(["ab"])})["label"].tolist() == labels(["ab"])
