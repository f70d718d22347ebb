"""A model with a padded axis, over both fronts. A request of any length gets the answer of its own length."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv_bundle.export import export_bundle
from tests.e2e.bundles import OUTPUT, ensure_made
from tests.e2e.calls import Arrays, Caller, at_once_behind_a_pause, caller, refusal
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.status import read_status

LENGTHS = (4, 8, 16)
FRONTS = ("python", "native")
TABLE = np.random.default_rng(0).standard_normal((100, 4)).astype(np.float32)


def attend(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Return the attention over the tokens that the mask keeps: a vector for each token, and the vector of each row's first token."""
    x = params[jnp.clip(ids, 0, 99)]
    scores = jnp.einsum("nqd,nkd->nqk", x, x) + (-1e9 * (mask == 0).astype(np.float32))[:, None, :]
    hidden = jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(scores), x)
    return {"hidden": hidden, "first": hidden[:, 0]}


def _export(out_dir: Path) -> None:
    ids = np.arange(32, dtype=np.int32).reshape(2, 16)
    export_bundle(
        attend,
        TABLE,
        {"ids": ids, "mask": np.ones_like(ids)},
        batch_sizes=(1, 8),
        axes={"ids": "nt", "mask": "nt"},
        input_shapes=[{"t": length} for length in LENGTHS],
        pad="t=7,mask=mask",
        out_dir=out_dir,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with the model on each front."""
    folder = tmp_path_factory.mktemp("padding")
    made = ensure_made(OUTPUT.with_name("padded_bundles"), {"padded": _export}, [Path(__file__)])
    for front in FRONTS:
        shutil.copytree(made / "padded", folder / "bundles" / front)
    settings = "models:\n  native: {front: native}\n  python: {max_delay_us: 20000}\n"
    with running_triton(
        make_repository(folder, settings=settings), folder / "server.log", expected=["waits_in_triton"]
    ) as running:
        yield running


def request(length: int, rows: int = 1) -> Arrays:
    """Return tokens and their mask. In longer requests, the mask has zeros in the middle."""
    rng = np.random.default_rng(100 * length + rows)
    mask = np.ones((rows, length), np.int32)
    mask[:, 1 : length // 3] = 0
    return {"ids": rng.integers(0, 100, (rows, length)).astype(np.int32), "mask": mask}


def check(answer: Arrays, inputs: Arrays) -> None:
    """Compare an answer with the attention at the request's own length.

    NumPy computes this attention, because jax would compile a program for every shape.
    """
    x = TABLE[np.clip(inputs["ids"], 0, 99)]
    scores = x @ x.transpose(0, 2, 1) + np.where(inputs["mask"] == 0, np.float32(-1e9), 0)[:, None, :]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    hidden = (weights / weights.sum(-1, keepdims=True)) @ x
    for name, array in {"hidden": hidden, "first": hidden[:, 0]}.items():
        assert answer[name].shape == array.shape
        np.testing.assert_allclose(answer[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_every_length_gets_the_answer_of_the_model_alone(
    server: RunningTriton, front: str, protocol: str
) -> None:
    """Requests with 1 to 16 tokens and with one or three rows, sent one after the other, get the answers of their own lengths."""
    with caller(server, protocol) as call:
        for length in range(1, LENGTHS[-1] + 1):
            for rows in (1, 3):
                inputs = request(length, rows)
                check(call(front, inputs), inputs)


@pytest.mark.parametrize("front", FRONTS)
def test_requests_of_several_lengths_share_executions(server: RunningTriton, front: str) -> None:
    """64 requests of all lengths wait, and then share executions. Each gets the answer of its own length."""
    before = read_status(server.pid)["models"][front]
    requests = [request(1 + number % LENGTHS[-1], 1 + number % 2) for number in range(64)]

    def ask(call: Caller, number: int) -> Arrays:
        return call(front, requests[number])

    for answer, own in zip(at_once_behind_a_pause(server, front, 64, ask), requests, strict=True):
        check(answer, own)
    after = read_status(server.pid)["models"][front]
    assert after["dispatches"] - before["dispatches"] < 64


@pytest.mark.parametrize("front", FRONTS)
def test_a_request_of_many_rows_is_split_and_padded(server: RunningTriton, front: str) -> None:
    """A request has 500 rows of 5 tokens, and one execution takes eight rows. The answer is right."""
    inputs = request(5, 500)
    with caller(server) as call:
        check(call(front, inputs), inputs)


def test_a_wrong_length_is_refused_alike_by_both_fronts(server: RunningTriton) -> None:
    """Both fronts refuse a request that is too long, and a request whose inputs have different lengths, with the same texts."""
    good = request(3)
    wrong = [request(17), {**good, "mask": np.ones((1, 4), np.int32)}]
    for protocol in ("grpc", "http"):
        with caller(server, protocol) as call:
            for inputs in wrong:
                python, native = (str(refusal(lambda: call(front, inputs))) for front in FRONTS)  # noqa: B023
                assert python == native
                assert "along the padded axis; give all of them one length, from 1 to 16" in python
