"""Strings of standard clients over both protocols, with hooks and a meta model."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.e2e.calls import PROTOCOLS, Array, at_once, caller
from tests.e2e.harness import RunningTriton

TEXTS = ["", "two words", "snow: \N{SNOWMAN}", "line\nline", "x" * 70_000]


def column(texts: list[str]) -> Array:
    return np.array([[text.encode()] for text in texts], object)


def labels(texts: list[str]) -> list[list[bytes]]:
    return [[b"%d bytes" % len(text.encode())] for text in texts]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_strings_of_any_length_go_through_hooks(triton: RunningTriton, protocol: str) -> None:
    """Strings of any length pass through hooks: several in one request, and in requests of eight clients that share executions."""
    with caller(triton, protocol) as call:
        assert call("lengths", {"text": column(TEXTS)})["label"].tolist() == labels(TEXTS)

    for number, answers in enumerate(
        at_once(
            triton,
            8,
            lambda call, number: [
                call("lengths", {"text": column(["y" * number, "z"])})["label"] for _ in range(5)
            ],
            protocol,
        )
    ):
        assert all(answer.tolist() == labels(["y" * number, "z"]) for answer in answers)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_meta_model_takes_passes_on_and_returns_strings(triton: RunningTriton, protocol: str) -> None:
    """A meta model gets strings, passes them to its callee, and returns one or two strings for each row."""
    with caller(triton, protocol) as call:
        answer = call("shout", {"text": column(TEXTS[:4])})

    shouted = [text.upper() for text in TEXTS[:4]]
    assert answer["label"].tolist() == labels(shouted)
    assert answer["text"].tolist() == [[text.encode()] * 2 for text in shouted]


def test_strings_that_end_early_are_refused(triton: RunningTriton) -> None:
    """A request is refused if a string is said to be longer than its tensor, or if a tensor has too few strings.

    The next request is answered.
    """
    channel = grpc.insecure_channel(triton.server.grpc_url)
    ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
    for raw, rows in ((b"\xff\xff\xff\x7fabcd", 1), (b"\2\0\0\0ab", 2), (b"\2\0", 1)):
        message = service_pb2.ModelInferRequest(model_name="lengths")
        message.inputs.add(name="text", datatype="BYTES", shape=[rows, 1])
        message.raw_input_contents.append(raw)
        with pytest.raises(grpc.RpcError) as refused:
            ask(message, timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value
    channel.close()
    with caller(triton) as call:
        assert call("lengths", {"text": column(["ab"])})["label"].tolist() == labels(["ab"])
