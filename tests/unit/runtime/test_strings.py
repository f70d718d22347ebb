"""Strings of clients: hooks get and return them. Modules do not get them."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rsrv.hooks.loader import Hooks
from rsrv.stub import replies
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.front_loop import digest_of
from rsrv.stub.meta_engine import MetaEngine
from rsrv.stub.tensors import encode_strings, size_of
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeError, FakePbUtils, FakeRequest, FakeResponse, FakeSender
from tests.unit.runtime.conftest import Runtime, StartMeta
from tests.unit.runtime.metas import answer_of, engine_of
from tests.waiting import PATIENCE_S

Array = npt.NDArray[Any]

#: Strings of any bytes, one per row.
TEXTS = np.array([b"one", "zwei \N{SNOWMAN}".encode(), b"", b"\xff\0"], object)
LABELS = (WireTensor("labels", "bytes", (-1, 1)),)
_CLIENT_TEXT = [{"name": "text", "dtype": "bytes", "shape": "n"}]
_CLIENT_LABELS = [{"name": "labels", "dtype": "bytes", "shape": "n"}]
#: The input `text` and the output `labels` in a meta model's manifest.
_CLIENT = "client_inputs: [{name: text, dtype: bytes, shape: n}]\nclient_outputs: [{name: labels, dtype: bytes, shape: n}]\n"


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of strings. Its module doubles the lengths of the strings and adds one."""
    path = tmp_path_factory.mktemp("bundles") / "lengths"
    export_bundle(
        lambda params, x: {"y": 2 * x + params["w"]},
        {"w": np.ones(3, np.float32)},
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1, 4],
        out_dir=path,
        hooks="def preprocess(inputs): ...\ndef postprocess(outputs): ...",
        client_inputs=_CLIENT_TEXT,
        client_outputs=_CLIENT_LABELS,
    )
    return path


def measured(inputs: Mapping[str, Array]) -> dict[str, Any]:
    assert all(type(text) is bytes for text in inputs["text"])
    return {"x": np.array([[len(text)] * 3 for text in inputs["text"]], np.float32)}


def labelled(outputs: Mapping[str, Array]) -> dict[str, Any]:
    return {"labels": [f"{int(y)} bytes" for y, *_ in outputs["y"]]}


def start(runtime: Runtime, lengths: Path, postprocess: Any = labelled) -> Engine:
    return engine_of(runtime.open, lengths, "lengths", Hooks(measured, postprocess), LABELS)


def ask(engine: Engine, texts: Array) -> FakeResponse:
    request = FakeRequest({"text": texts})
    answers = engine.execute([request])
    return answers[0] if answers is not None else answer_of(request)


def test_hooks_turn_strings_into_tensors_and_tensors_into_strings(runtime: Runtime, lengths: Path) -> None:
    """`preprocess` gets one string per row, as bytes. A text that `postprocess` returns is sent in UTF-8."""
    engine = start(runtime, lengths)

    answer = ask(engine, TEXTS.reshape(-1, 1))  # This is the shape that Triton passes.

    engine.close()
    assert answer.error is None
    assert answer.arrays["labels"].tolist() == [[b"7 bytes"], [b"17 bytes"], [b"1 bytes"], [b"5 bytes"]]


@pytest.mark.parametrize(
    "labels",
    [
        [b"one", "zwei"],
        np.array([b"one", b"zwei"]),
        np.array(["one", "zwei"]),
        [[b"one"], ["zwei"]],
        [str.__new__(type("Text", (str,), {"encode": None}), "one"), "zwei"],
    ],
)
def test_strings_of_all_kinds_are_sent_as_they_are(runtime: Runtime, lengths: Path, labels: Any) -> None:
    """Strings may be returned as lists of bytes or text, numpy's strings, a column, or a class with methods of its own."""
    engine = start(runtime, lengths, lambda outputs: {"labels": labels})

    answer = ask(engine, TEXTS[:2])

    engine.close()
    assert answer.error is None
    assert answer.arrays["labels"].tolist() == [[b"one"], [b"zwei"]]


def test_zeros_at_the_end_of_listed_strings_stay(runtime: Runtime, lengths: Path) -> None:
    """Zero bytes at the end of strings in a list are sent. A long string does not make the others longer.

    As an array of numpy's own strings, each one would take 8 MB.
    """
    long = [b"a\0", "x" * 2_000_000, *[b""] * 2]
    engine = start(runtime, lengths, lambda outputs: {"labels": long})

    answer = ask(engine, TEXTS)

    engine.close()
    assert answer.error is None
    assert answer.arrays["labels"].reshape(-1).tolist() == [b"a\0", b"x" * 2_000_000, b"", b""]


@pytest.mark.parametrize("labels", [[1.5], [b"a", "b"], np.array([None], object), ["\ud800"]])
def test_what_is_no_string_fails_its_request(runtime: Runtime, lengths: Path, labels: Any) -> None:
    """If `postprocess` returns numbers, None, text that is not valid UTF-8, or too many strings, its request fails."""
    engine = start(runtime, lengths, lambda outputs: {"labels": labels})

    answer = ask(engine, TEXTS[:1])

    engine.close()
    assert answer.error is not None
    assert answer.error.code == FakeError.INTERNAL
    assert "postprocess hook failed" in answer.error.message


def test_tensors_that_are_not_as_triton_writes_strings_are_refused(
    runtime: Runtime, lengths: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A string tensor that Triton cannot decode is refused as the client's fault."""
    engine = start(runtime, lengths)
    request = FakeRequest({"text": TEXTS[:1]})

    def torn() -> Array:
        raise EOFError("unpack_from requires a buffer of at least 4294967299 bytes")

    monkeypatch.setattr(request.inputs()[0], "as_numpy", torn)
    answers = engine.execute([request])
    answer = answers[0] if answers is not None else answer_of(request)

    engine.close()
    assert answer.error is not None
    assert answer.error.code == FakeError.INVALID_ARG
    assert "input 'text' holds no strings" in answer.error.message


@pytest.mark.parametrize("of_meta", [False, True])
def test_long_strings_end_their_request_even_if_they_find_no_room(
    runtime: Runtime, lengths: Path, start_meta: StartMeta, monkeypatch: pytest.MonkeyPatch, of_meta: bool
) -> None:
    """If long strings do not fit in Triton's shared memory, the answer and its end are sent separately.

    If both were sent together, Triton would lose both. The size of the strings matters, not that of the module's
    outputs.
    """
    monkeypatch.setattr(replies, "free_shared_memory", lambda: 1 << 20)
    sent: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(FakeSender, "send", lambda sender, response=None, flags=0: sent.put(flags))
    long = {"labels": ["x" * (1 << 20)]}
    engine: Engine | MetaEngine
    if of_meta:
        engine = start_meta(
            runtime, lambda inputs, call: long, bundles={}, calls=[], client=_CLIENT, outputs=LABELS
        )
    else:
        engine = start(runtime, lengths, lambda outputs: long)

    engine.execute_later([FakeRequest({"text": TEXTS[:1]})])

    assert [sent.get(timeout=PATIENCE_S), sent.get(timeout=PATIENCE_S)] == [
        0,
        FakePbUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    ]
    engine.close()


def test_a_meta_model_passes_strings_on(runtime: Runtime, lengths: Path, start_meta: StartMeta) -> None:
    """A meta model may call a model with text. Strings that it returns are sent as strings."""

    def run(inputs: Mapping[str, Array], call: Any) -> dict[str, Any]:
        texts = [text.decode(errors="replace") for text in inputs["text"]]
        return {"labels": call("lengths", {"text": texts})["labels"].reshape(-1)}

    engine = start_meta(
        runtime,
        run,
        ["lengths"],
        bundles={"lengths": lengths},
        client=_CLIENT,
        outputs=LABELS,
        hooks={"lengths": Hooks(measured, labelled)},
    )
    request = FakeRequest({"text": TEXTS[:2]})
    answers = engine.execute([request])
    answer = answers[0] if answers is not None else answer_of(request)

    assert answer.error is None, answer.error
    assert answer.arrays["labels"].tolist() == [[b"7 bytes"], [b"17 bytes"]]


def test_no_strings_are_strings() -> None:
    """An empty list is sent as strings, although numpy gives it another type."""
    none = encode_strings(np.asarray([]))
    assert none is not None
    assert (none.shape, none.dtype.kind) == ((0,), "O")


def test_strings_count_with_their_bytes() -> None:
    """The size of a string tensor includes its bytes, so limits of memory apply to it."""
    assert size_of(np.array([b"a" * 1000, b""], object)) == 1016
    assert size_of(np.zeros(10, np.float32)) == 40


def test_equal_strings_are_recognized_after_a_death() -> None:
    """Equal strings have the same digest in each request, even if their objects differ.

    The digest also depends on where one string ends and the next begins.
    """
    digest = digest_of({"text": np.array([b"a" * 40, b"b"], object)})

    assert digest_of({"text": np.array([b"a" * 40, b"b"], object)}) == digest
    assert digest_of({"text": np.array([b"a" * 40 + b"b", b""], object)}) != digest
