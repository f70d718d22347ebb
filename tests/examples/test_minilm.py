"""The text pipeline without a server. Its `run` on the built bundles is compared with a direct computation."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

import example_bundles
from examples.build import MINILM
from rsrv.hooks.text import as_text
from rsrv_bundle import read_bundle
from tests.examples.built import Model

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

pytestmark = pytest.mark.long

CLS, SEP, UNKNOWN = 101, 102, 100
WEATHER = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
ODD = ("", "   ", "a", "\U0001f600 \U0001f680", "漢字とかな", "Naïve — résumé", "tab\tbell\x07", "x" * 5000)
#: A text of 512 tokens, which are more than the encoder's largest compiled length.
LONG = " ".join(["north south east west"] * 128)


@dataclass(frozen=True)
class Handle:
    """A tensor on the device, whose data `run` cannot see."""

    shape: tuple[int, ...]
    dtype: Any
    held: Array = field(repr=False)


class Pipeline:
    """The meta model in the folder `name`. Its calls execute in this process."""

    def __init__(self, root: Path, name: str) -> None:
        bundle = read_bundle(root / name, digest=False)
        assert bundle.hooks is not None
        self.module = runpy.run_path(str(bundle.hooks))
        self.models: dict[str, Callable[[Arrays], Arrays]] = {
            callee: Model(root / callee) for callee in bundle.manifest.meta_calls
        }
        #: Name and inputs of each call, in order.
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, name: str, inputs: dict[str, Any], keep_on_device: Any = False) -> dict[str, Any]:
        """Call a model as meta models do. A Handle represents a tensor that stays on the device."""
        self.calls.append((name, inputs))
        arrays = {key: value.held if isinstance(value, Handle) else value for key, value in inputs.items()}
        outputs = self.models[name](arrays)
        keep = set(outputs) if keep_on_device is True else set(keep_on_device or ())
        return {
            key: Handle(value.shape, value.dtype, value) if key in keep else value
            for key, value in outputs.items()
        }

    def run(self, sentences: Sequence[str | bytes]) -> Array:
        """Return the embeddings of sentences, f32 [n, 384]."""
        run: Callable[..., Arrays] = self.module["run"]
        self.calls.clear()
        outputs = run({"text": as_text(sentences)}, self.call)
        assert list(outputs) == ["embedding"]
        return outputs["embedding"]

    def tokens(self, sentence: str | bytes) -> list[int]:
        """Return the token ids that the encoder gets for one sentence, without padding."""
        self.run([sentence])
        name, inputs = self.calls[0]
        assert name == "minilm_encoder"
        ids: list[int] = inputs["input_ids"][0, : inputs["attention_mask"][0].sum()].tolist()
        assert not inputs["input_ids"][0, len(ids) :].any()
        return ids


@pytest.fixture(scope="module")
def root() -> Path:
    """Return the built examples."""
    return example_bundles.ensure(MINILM)


@pytest.fixture(scope="module")
def minilm(root: Path) -> Pipeline:
    """Return the pipeline."""
    return Pipeline(root, "minilm")


@pytest.fixture(scope="module")
def unexecuted(root: Path) -> Pipeline:
    """Return a pipeline whose models compute nothing, for tests of the inputs that they get."""
    pipeline = Pipeline(root, "minilm")
    pipeline.models = {
        "minilm_encoder": lambda inputs: {"hidden": np.zeros((*inputs["input_ids"].shape, 384), np.float32)},
        "minilm_pool": lambda inputs: {"embedding": inputs["hidden"][:, 0]},
    }
    return pipeline


class Direct:
    """transformers' BERT with the weights of the built encoder. It computes one sentence at a time, in 64 bits."""

    def __init__(self, root: Path) -> None:
        network: Any = BertModel
        config = BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        self.network = network(config, add_pooling_layer=False).eval().double()
        self.network.load_state_dict(load_file(root / "minilm_encoder" / "weights.safetensors"))
        self.tokenizer = Tokenizer.from_file(str(root / "minilm" / "tokenizer.json"))
        self.tokenizer.no_padding()

    def embedding(self, sentence: str) -> Array:
        """Return the embedding of a sentence, [384]. Its length is 1."""
        with torch.no_grad():
            hidden = self.network(torch.tensor([self.tokenizer.encode(sentence).ids])).last_hidden_state
        mean = hidden[0].mean(0).numpy()
        unit: Array = mean / np.linalg.norm(mean)
        return unit


@pytest.fixture(scope="module")
def direct(root: Path) -> Direct:
    """Return the direct computation, with the weights of the built encoder."""
    return Direct(root)


def test_embeddings_and_their_similarities_agree_with_a_direct_computation(
    minilm: Pipeline, direct: Direct
) -> None:
    """Embeddings of ordinary, odd and long sentences agree with those that transformers computes in 64 bits with the same weights."""
    sentences = [
        *WEATHER,
        *ODD,
        "Central banks raised interest rates again, by half a percent this time.",
        LONG,
    ]
    embeddings = np.concatenate([minilm.run([sentence]) for sentence in sentences])
    expected = np.stack([direct.embedding(sentence) for sentence in sentences])
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(embeddings @ embeddings.T, expected @ expected.T, rtol=0, atol=1e-4)


def test_similarities_are_those_that_the_authors_publish(minilm: Pipeline) -> None:
    """The similarities of Sentence Transformers' quick start are reproduced to about four digits."""
    embeddings = minilm.run(WEATHER)
    published = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
    np.testing.assert_allclose(embeddings @ embeddings.T, published, rtol=0, atol=1e-4)


def test_the_encoders_output_goes_to_the_pooling_without_coming_back(minilm: Pipeline) -> None:
    """`run` gets a handle with the shape and dtype of the encoder's output, and passes the handle to the pooling."""
    minilm.run(WEATHER)
    (first, _), (second, inputs) = minilm.calls
    assert (first, second) == ("minilm_encoder", "minilm_pool")
    assert isinstance(inputs["hidden"], Handle)
    assert (inputs["hidden"].shape, inputs["hidden"].dtype) == ((3, 16, 384), np.float32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \t\n", []),
        (b"\0\0\0", []),
        ("Hello, world", [7592, 1010, 2088]),
        (b"hello\0\0, WORLD\0", [7592, 1010, 2088]),
        ("résumé", [13746]),
        ("embeddings", [7861, 8270, 4667, 2015]),
        ("\U0001f600", [UNKNOWN]),
        ("中国", [1746, 1799]),
        ("中国".encode()[:-1], [1746]),
        (b"\xff\xfehello", [7592]),
        ("x" * 101, [UNKNOWN]),
    ],
    ids=str,
)
def test_a_text_becomes_the_tokens_of_the_vocabulary(
    unexecuted: Pipeline, text: str | bytes, expected: list[int]
) -> None:
    """Case, accents, zero bytes and broken UTF-8 are ignored. Each ideograph is a word, and an unknown word is one token."""
    assert unexecuted.tokens(text) == [CLS, *expected, SEP]


def test_a_long_text_is_cut_to_the_longest_compiled_row(unexecuted: Pipeline) -> None:
    """A long text is cut to 126 tokens between the special tokens CLS and SEP. The rest of the text has no effect."""
    tokens = unexecuted.tokens(LONG)
    assert (len(tokens), tokens[0], tokens[-1]) == (128, CLS, SEP)
    assert unexecuted.tokens(LONG * 500) == tokens


@pytest.mark.parametrize(
    ("words", "length"), [(0, 16), (14, 16), (15, 32), (30, 32), (31, 64), (62, 64), (63, 128), (300, 128)]
)
def test_rows_are_as_short_as_the_longest_sentence_allows(
    unexecuted: Pipeline, words: int, length: int
) -> None:
    """All rows have the smallest compiled length that fits the longest sentence and its two special tokens."""
    unexecuted.run(["short", " ".join(["north"] * words)])
    assert unexecuted.calls[0][1]["input_ids"].shape == (2, length)


@settings(max_examples=10)
@given(
    st.text(max_size=60) | st.sampled_from([*WEATHER, *ODD, LONG]),
    st.lists(st.integers(0, 140).map(lambda words: "north " * words), min_size=1, max_size=15),
)
def test_a_sentence_has_one_embedding_whatever_comes_with_it(
    minilm: Pipeline, sentence: str, others: list[str]
) -> None:
    """A sentence has the same embedding in any batch, and the embedding has length 1."""
    together = minilm.run([sentence, *others])
    assert (together.shape, together.dtype) == ((1 + len(others), 384), np.float32)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(together[:1], minilm.run([sentence]), rtol=0, atol=1e-5)
    np.testing.assert_allclose(together[-1:], minilm.run(others[-1:]), rtol=0, atol=1e-5)


def test_what_is_masked_changes_nothing(minilm: Pipeline) -> None:
    """Tokens where the mask is 0 do not affect the rest of the row, even if these tokens are invalid."""
    ids = np.full((1, 16), 2088, np.int32)
    mask = (np.arange(16) < 6).astype(np.int32)[None]
    other = np.where(mask, ids, np.arange(-3, 13, dtype=np.int32) * 10_000_000)
    encode, pool = minilm.models["minilm_encoder"], minilm.models["minilm_pool"]
    hidden = [encode({"input_ids": each, "attention_mask": mask})["hidden"] for each in (ids, other)]
    np.testing.assert_allclose(hidden[0][:, :6], hidden[1][:, :6], rtol=0, atol=1e-5)
    pooled = [pool({"hidden": each, "attention_mask": mask})["embedding"] for each in hidden]
    np.testing.assert_allclose(pooled[0], pooled[1], rtol=0, atol=1e-5)


def test_a_row_of_padding_only_is_no_reason_for_nan(minilm: Pipeline) -> None:
    """A row that consists of padding causes no NaN."""
    nothing = np.zeros((1, 16), np.int32)
    hidden = minilm.models["minilm_encoder"]({"input_ids": nothing, "attention_mask": nothing})["hidden"]
    assert np.isfinite(hidden).all()
    pooled = minilm.models["minilm_pool"]({"hidden": hidden, "attention_mask": nothing})["embedding"]
    assert not pooled.any()
