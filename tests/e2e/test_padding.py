"""A model with a padded axis, over both fronts: requests of every length get the answers of their own length."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import native_front
from rsrv_bundle.export import export_bundle
from rsrv_bundle.from_torch import export_torch
from tests.e2e.calls import Arrays, Caller, at_once, at_once_behind_a_pause, caller, refusal
from tests.e2e.harness import RunningTriton, StartTriton, make_repository, running_triton
from tests.status import read_status

LENGTHS = (4, 8, 16)
FRONTS = ("python", "native")
TABLE = np.random.default_rng(0).standard_normal((100, 4)).astype(np.float32)


def attend(params: Any, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Attention over the tokens that the mask keeps: a vector per token, and one per row."""
    x = params[jnp.clip(ids, 0, 99)]
    scores = jnp.einsum("nqd,nkd->nqk", x, x) + jnp.where(mask == 0, -1e9, 0.0)[:, None, :]
    hidden = jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(scores), x)
    return {"hidden": hidden, "first": hidden[:, 0]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with the model on each front."""
    native_front.ensure()
    folder = tmp_path_factory.mktemp("padding")
    ids = np.arange(32, dtype=np.int32).reshape(2, 16)
    for front in FRONTS:
        export_bundle(
            attend,
            TABLE,
            {"ids": ids, "mask": np.ones_like(ids)},
            batch_sizes=(1, 8),
            axes={"ids": "nt", "mask": "nt"},
            input_shapes=[{"t": length} for length in LENGTHS],
            pad="t=7,mask=mask",
            out_dir=folder / "bundles" / front,
        )
    settings = "models:\n  native: {front: native}\n  python: {max_delay_us: 20000}\n"
    with running_triton(
        make_repository(folder, settings=settings), folder / "server.log", expected=["waits_in_triton"]
    ) as running:
        yield running


def request(length: int, rows: int = 1) -> Arrays:
    """Return tokens whose mask has a hole where there is room for one."""
    rng = np.random.default_rng(100 * length + rows)
    mask = np.ones((rows, length), np.int32)
    mask[:, 1 : length // 3] = 0
    return {"ids": rng.integers(0, 100, (rows, length)).astype(np.int32), "mask": mask}


def check(answer: Arrays, asked: Arrays) -> None:
    """Compare an answer with the model alone, at the request's own length."""
    expected = attend(TABLE, **{name: jnp.asarray(array) for name, array in asked.items()})
    for name, array in expected.items():
        assert answer[name].shape == array.shape
        np.testing.assert_allclose(answer[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_every_length_gets_the_answer_of_the_model_alone(
    server: RunningTriton, front: str, protocol: str
) -> None:
    """Requests of 1 to 16 tokens and of one and three rows, one after the other."""
    with caller(server, protocol) as call:
        for length in range(1, LENGTHS[-1] + 1):
            for rows in (1, 3):
                asked = request(length, rows)
                check(call(front, asked), asked)


@pytest.mark.parametrize("front", FRONTS)
def test_requests_of_several_lengths_share_executions(server: RunningTriton, front: str) -> None:
    """64 requests of all lengths that have waited get their own answers, in fewer executions than they are."""
    before = read_status(server.pid)["models"][front]
    asked = [request(1 + number % LENGTHS[-1], 1 + number % 2) for number in range(64)]

    def ask(call: Caller, number: int) -> Arrays:
        return call(front, asked[number])

    for answer, own in zip(at_once_behind_a_pause(server, front, 64, ask), asked, strict=True):
        check(answer, own)
    after = read_status(server.pid)["models"][front]
    assert after["dispatches"] - before["dispatches"] < 64


@pytest.mark.parametrize("front", FRONTS)
def test_a_request_of_many_rows_is_split_and_padded(server: RunningTriton, front: str) -> None:
    """500 rows of 5 tokens, of which one execution takes eight."""
    asked = request(5, 500)
    with caller(server) as call:
        check(call(front, asked), asked)


def test_a_wrong_length_is_refused_alike_by_both_fronts(server: RunningTriton) -> None:
    """A request that is too long, and inputs that disagree."""
    good = request(3)
    wrong = [request(17), {**good, "mask": np.ones((1, 4), np.int32)}]
    for protocol in ("grpc", "http"):
        with caller(server, protocol) as call:
            for asked in wrong:
                python, native = (str(refusal(lambda: call(front, asked))) for front in FRONTS)  # noqa: B023
                assert python == native
                assert "along the padded axis; give all of them one length, from 1 to 16" in python


class Embedder(nn.Module):
    """A BERT with random weights, and the mean of its vectors."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "attn_implementation": "eager",
        }
        config = BertConfig(vocab_size=400, num_hidden_layers=2, **options)
        self.network = BertModel(config, add_pooling_layer=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.network(input_ids=ids.long(), attention_mask=mask.long()).last_hidden_state
        counted = mask[:, :, None].float()
        return {"embedding": (hidden * counted).sum(1) / counted.sum(1).clamp(min=1)}


@pytest.mark.long
def test_an_encoder_answers_every_length_as_the_model_alone(
    start_triton: StartTriton, tmp_path: Path
) -> None:
    """512 requests of 1 to 512 tokens to each front, 16 at a time, get the embeddings of BERT in PyTorch."""
    torch.manual_seed(0)
    network = Embedder().eval()
    ids = np.arange(64, dtype=np.int32)[None]
    bundle = export_torch(
        network,
        {"ids": ids, "mask": np.ones_like(ids)},
        batch_sizes=(1, 8),
        axes={"ids": "nt", "mask": "nt"},
        input_shapes=[{"t": length} for length in (64, 512)],
        pad="t=0,mask=mask",
        out_dir=tmp_path / "bundles" / "python",
    )
    shutil.copytree(bundle.path, bundle.path.with_name("native"))
    server = start_triton(make_repository(tmp_path, settings="models:\n  native: {front: native}\n"))
    lengths = np.random.default_rng(0).permutation(np.arange(1, 513))

    def tokens(length: int) -> Any:
        return np.random.default_rng(length).integers(0, 400, (1, length)).astype(np.int32)

    for front in FRONTS:

        def ask(call: Caller, client: int, front: str = front) -> list[Any]:
            sent = (tokens(length) for length in lengths[client::16])
            return [call(front, {"ids": ids, "mask": np.ones_like(ids)})["embedding"] for ids in sent]

        for client, found in enumerate(at_once(server, 16, ask)):
            for length, embedding in zip(lengths[client::16], found, strict=True):
                alone = torch.from_numpy(tokens(length))
                with torch.no_grad():
                    expected = network(alone, torch.ones_like(alone))["embedding"].numpy()
                np.testing.assert_allclose(embedding, expected, rtol=0, atol=1e-5)
