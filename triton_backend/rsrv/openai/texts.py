"""Embeddings, rankings, scores and classes of texts: answers as JSON objects."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rsrv.openai.bodies import ApiBody, ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from rsrv.openai.chat import ChatTemplates
from rsrv.openai.errors import invalid
from rsrv.openai.inference import Backend, TaskModel, Terms, Value, each

B = TypeVar("B", bound=ApiBody)
Array = npt.NDArray[np.float32]


@dataclass(slots=True)
class ModelCall(Generic[B]):
    """A client's call of a model."""

    backend: Backend
    model: TaskModel
    body: B
    terms: Terms
    created: int
    templates: ChatTemplates
    #: Number of the prompts' tokens, or None if the model has not reported any.
    prompt_tokens: int | None = None
    #: Number of generated tokens, or None if the model has not reported any.
    completion_tokens: int | None = None

    @property
    def usage(self) -> dict[str, int] | None:
        """The answer's `usage`, or None if the model reports no tokens."""
        if self.prompt_tokens is None:
            return None
        counts = {"prompt_tokens": self.prompt_tokens}
        if self.completion_tokens is not None:
            counts["completion_tokens"] = self.completion_tokens
        return {**counts, "total_tokens": sum(counts.values())}

    def answer(self, object: str, **values: Any) -> dict[str, Any]:
        """Return an answer with these values and the fields that all answers have."""
        return {
            "id": self.terms.request_id,
            "object": object,
            "created": self.created,
            "model": self.body.model,
            **values,
            "usage": self.usage,
        }

    async def rows(self, field: str, items: Sequence[Mapping[str, Value]]) -> list[dict[str, Any]]:
        """Return the model's outputs by role for each item, and count its tokens. Raises ApiError."""

        async def infer(index: int, item: Mapping[str, Value]) -> dict[str, Any]:
            suffix = f"/{index}" if len(items) > 1 else ""
            return await self.backend.infer(self.model, item, self.terms, suffix)

        rows = await each(field, items, infer)
        if "tokens" in self.model.outputs:
            self.prompt_tokens = sum(int(row["tokens"][0]) for row in rows)
        return rows


async def embeddings(call: ModelCall[EmbeddingsBody]) -> dict[str, Any]:
    """Answer /v1/embeddings. Raises ApiError."""
    items = [_text_or_ids(call.model, item) for item in call.body.input]
    cut, known = call.body.dimensions, call.model.dimensions
    if cut is not None and cut not in known:
        lengths = f"can be cut to {', '.join(map(str, known))}" if known else "cannot be cut"
        raise invalid(f"embeddings of {call.model.name} {lengths}", "dimensions")
    rows = [row["embedding"] for row in await call.rows("input", items)]
    if cut is not None:
        rows = [shortened(row, cut) for row in rows]
    base64 = call.body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(row) if base64 else row.tolist()}
        for index, row in enumerate(rows)
    ]
    return call.answer("list", data=data)


def shortened(embedding: Array, length: int) -> Array:
    """Return the first `length` numbers of an embedding, scaled so that their Euclidean norm is 1."""
    head = embedding[:length]
    scaled: Array = head / max(float(np.linalg.norm(head)), 1e-30)
    return scaled


def _base64(embedding: Array) -> str:
    return b64encode(embedding.astype("<f4", copy=False).tobytes()).decode()


def _text_or_ids(model: TaskModel, item: str | list[int]) -> dict[str, Value]:
    role, value = ("text", item.encode()) if isinstance(item, str) else ("ids", item)
    if model.inputs.keys() != {role}:
        takes = " and ".join({"text": "texts", "ids": "token ids"}.get(role, role) for role in model.inputs)
        raise invalid(
            f"{model.name} takes {takes}, not {'texts' if role == 'text' else 'token ids'}", "input"
        )
    return {role: value}


async def rerank(call: ModelCall[RerankBody]) -> dict[str, Any]:
    """Answer /v1/rerank: the documents' indices, the most relevant first. Raises ApiError."""
    texts = call.body.texts
    scores = await _scores(call, "documents", [(call.body.query, text) for text in texts])
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: call.body.top_n]
    results = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": texts[index]}} if call.body.return_documents else {}),
        }
        for index in order
    ]
    return call.answer("list", results=results)


async def score(call: ModelCall[ScoreBody]) -> dict[str, Any]:
    """Answer /v1/score: a score for each pair. Raises ApiError."""
    firsts, seconds = call.body.text_1, call.body.text_2
    if len(firsts) not in (1, len(seconds)):
        raise invalid(
            f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}: give text_1 one text, or as many as text_2",
            "text_1",
        )
    pairs = list(zip(repeat(firsts[0]) if len(firsts) == 1 else firsts, seconds, strict=False))
    scores = await _scores(call, "text_2", pairs)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return call.answer("list", data=data)


async def _scores(call: ModelCall[Any], field: str, pairs: Sequence[tuple[str, str]]) -> list[float]:
    items = [{"text": first.encode(), "text_pair": second.encode()} for first, second in pairs]
    return [float(row["scores"][0]) for row in await call.rows(field, items)]


async def classify(call: ModelCall[ClassifyBody]) -> dict[str, Any]:
    """Answer /v1/classify: the scores of all labels, and the best one's label. Raises ApiError."""
    if "text_pair" in call.model.inputs:
        raise invalid(f"{call.model.name} classifies pairs of texts; call it over KServe v2", "model")
    labels = call.model.labels
    data = []
    for index, row in enumerate(
        await call.rows("input", [{"text": text.encode()} for text in call.body.input])
    ):
        scores = row["scores"]
        best = int(scores.argmax())
        data.append(
            {"index": index, "label": labels[best], "probs": scores.tolist(), "num_classes": len(scores)}
        )
    return call.answer("list", data=data)
