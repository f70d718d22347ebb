"""Recipes for models that read text: embeddings, ranking, classification, entities and masks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rsrv_bundle.errors import BundleError
from rsrv_bundle.hf.directory import Directory
from rsrv_bundle.hf.loading import check_tokenizer, load_model, load_tokenizer
from rsrv_bundle.hf.recipe import (
    Array,
    HubOptions,
    HubRecipe,
    Request,
    label_scores,
    numbers,
    row,
    strings,
    value,
)

_SENTENCES = (
    "A cat sat on the mat.",
    "Berlin, 3 May: Angela Merkel met Barack Obama in Germany!",
    "Ünïcödé — naïve café, Größe und Fußball.",
    "東京は日本の首都です。今日は良い天気ですね。",
    "Это короткое предложение.",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "🙂🚀 <b>html</b> x = y + 1; https://example.com/?q=1",
    "a",
)
_DEFAULT_LENGTHS = (32, 128, 512)
_CANDIDATES = 5


class _TextReader(nn.Module):
    """A network of token ids, with inputs i32 and the number of tokens as an output."""

    def __init__(self, network: nn.Module, with_types: bool) -> None:
        super().__init__()
        self.network = network
        self.with_types = with_types

    def read(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
        """Run the network on 64-bit integers, as its own tokenizer makes them."""
        types = {"token_type_ids": token_type_ids.long()} if self.with_types else {}
        return self.network(input_ids=input_ids.long(), attention_mask=attention_mask.long(), **types)


def _count(attention_mask: Any) -> Any:
    return attention_mask.sum(1).int()


class _TextEmbedder(_TextReader):
    """Token vectors of a network, made one vector by pooling."""

    def __init__(self, network: nn.Module, with_types: bool, pooling: str) -> None:
        super().__init__(network, with_types)
        self.pooling = pooling

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> dict[str, Any]:
        hidden = self.read(input_ids, attention_mask, token_type_ids).last_hidden_state.float()
        counted = attention_mask[:, :, None].to(hidden.dtype)
        if self.pooling == "cls":
            vector = hidden[:, 0]
        elif self.pooling == "last":
            places = torch.arange(hidden.shape[1])[None, :, None]
            last = (places == counted.sum(1, keepdim=True) - 1).to(hidden.dtype)
            vector = (hidden * last).sum(1)
        else:
            vector = (hidden * counted).sum(1) / counted.sum(1).clamp(min=1)
        return {"embedding": vector, "tokens": _count(attention_mask)}


class _Sentences(_TextReader):
    """A model of sentence-transformers, with all its modules."""

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> dict[str, Any]:
        features = {"input_ids": input_ids.long(), "attention_mask": attention_mask.long()}
        if self.with_types:
            features["token_type_ids"] = token_type_ids.long()
        found = self.network(features)["sentence_embedding"]
        return {"embedding": found.float(), "tokens": _count(attention_mask)}


class _TextScorer(_TextReader):
    """Scores of classes, for the whole text."""

    def __init__(self, network: nn.Module, with_types: bool, activation: Callable[[Any], Any]) -> None:
        super().__init__(network, with_types)
        self.activation = activation

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> dict[str, Any]:
        scores = self.activation(self.read(input_ids, attention_mask, token_type_ids).logits.float())
        return {"scores": scores, "tokens": _count(attention_mask)}


class _Tagger(_TextReader):
    """Scores of each token, with its id and its place in the text for the hook that groups entities."""

    def forward(
        self, input_ids: Any, attention_mask: Any, starts: Any, ends: Any, token_type_ids: Any = None
    ) -> dict[str, Any]:
        logits = self.read(input_ids, attention_mask, token_type_ids).logits.float()
        # Outputs of their own: a module whose output is its input would return the caller's memory.
        return {
            "scores": logits.softmax(-1),
            "ids": input_ids + 0,
            "starts": starts + 0,
            "ends": ends + 0,
            "tokens": _count(attention_mask),
        }


class _Filler(_TextReader):
    """The likeliest tokens in place of each row's mask."""

    def __init__(self, network: nn.Module, with_types: bool, mask_id: int) -> None:
        super().__init__(network, with_types)
        self.mask_id = mask_id

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> dict[str, Any]:
        logits = self.read(input_ids, attention_mask, token_type_ids).logits.float()
        place = (input_ids == self.mask_id).int().argmax(1)
        # Select the masks before the softmax, so that it runs for one place per row.
        chosen = logits[torch.arange(logits.shape[0]), place]
        scores, tokens = chosen.softmax(-1).topk(_CANDIDATES)
        return {
            "scores": scores,
            "candidates": tokens.int(),
            "ids": input_ids + 0,
            "mask": attention_mask + 0,
            "tokens": _count(attention_mask),
        }


class Text:
    """Parts that all recipes for text share: the tokenizer, its lengths, samples and hooks."""

    def __init__(
        self,
        directory: Directory,
        options: HubOptions,
        network: nn.Module,
        tokenizer: Any,
        *,
        cuts: bool,
        limit: int | None = None,
        prefix: str = "",
    ) -> None:
        """`cuts`: texts that are too long are cut unless the user decides. `limit`: most tokens, beside other limits."""
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.prefix = prefix
        backend = tokenizer.backend_tokenizer
        self.too_long = options.too_long or ("cut" if cuts or backend.truncation else "refuse")
        backend.no_padding()
        backend.no_truncation()
        names = inspect.signature(network.forward).parameters
        self.with_types = "token_type_ids" in tokenizer.model_input_names and "token_type_ids" in names
        self.lengths = self._lengths(directory, options, limit)
        # The pipelines then cut at the same length.
        tokenizer.model_max_length = self.lengths[-1]

    def _lengths(self, directory: Directory, options: HubOptions, limit: int | None) -> tuple[int, ...]:
        limits = [limit or 10**9, self.tokenizer.model_max_length]
        positions = directory.config.get("max_position_embeddings")
        if isinstance(positions, int) and positions > 0:
            # RoBERTa and its relatives count positions from the padding's id on.
            shifted = directory.config.get("model_type") in _SHIFTED
            limits.append(positions - (1 + (directory.config.get("pad_token_id") or 0) if shifted else 0))
        most = min(limits)
        if options.lengths:
            if max(options.lengths) > most:
                raise BundleError(
                    f"--lengths: {max(options.lengths)} is more than the {most} tokens that the model reads"
                )
            return tuple(sorted(set(options.lengths)))
        most = min(most, _DEFAULT_LENGTHS[-1])
        return (*(length for length in _DEFAULT_LENGTHS if length < most), most)

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id or 0

    def inputs(self, spans: bool = False) -> tuple[str, ...]:
        """Return the names of the executable inputs."""
        types = ("token_type_ids",) if self.with_types else ()
        return ("input_ids", "attention_mask", *(("starts", "ends") if spans else ()), *types)

    def hooks(
        self, task: str, pair: bool = False, spans: bool = False, check: str = "", post: str = ""
    ) -> str:
        """Return the text of model.py."""
        options = f', pad_id={self.pad_id}, too_long="{self.too_long}"'
        options += f", prefix={self.prefix!r}" if self.prefix else ""
        options += ", spans=True" if spans else ""
        parts = {
            "input_ids": "tokens.ids",
            "attention_mask": "tokens.mask",
            "token_type_ids": "tokens.types",
            "starts": "tokens.starts",
            "ends": "tokens.ends",
        }
        returned = ", ".join(f'"{name}": {parts[name]}' for name in self.inputs(spans))
        second = ', inputs["text_pair"]' if pair else ""
        imports = "text, tokens as answers" if post else "text"
        return (
            f'"""Hooks of a model for {task}: text to tokens{", and scores to an answer" if post else ""}."""\n\n'
            f"import json\nfrom pathlib import Path\n\nfrom rsrv.hooks import BadInput, {imports}\n\n"
            if post
            else f'"""Hooks of a model for {task}: text to tokens."""\n\nfrom pathlib import Path\n\nfrom rsrv.hooks import text\n\n'
        ) + (
            "HERE = Path(__file__).parent\n"
            f'TOKENISER = text.Tokeniser(HERE / "tokenizer.json", lengths={list(self.lengths)}{options})\n'
            f"{check and _MASK}"
            "\n\ndef preprocess(inputs):\n"
            f'    tokens = TOKENISER(inputs["text"]{second})\n{check}'
            f"    return {{{returned}}}\n{post}"
        )

    def files(self, **others: Any) -> dict[str, str]:
        """Return the tokenizer, and other files as JSON."""
        return {"tokenizer.json": self.tokenizer.backend_tokenizer.to_str()} | {
            f"{name}.json": json.dumps(content, ensure_ascii=False, indent=1)
            for name, content in others.items()
        }

    def encode(self, text: str, second: str | None = None) -> Any:
        return self.tokenizer.backend_tokenizer.encode(text, second)

    def examples(self, texts: Sequence[str], pair: bool = False, spans: bool = False) -> dict[str, Array]:
        """Return executable inputs of real texts, at the smallest length."""
        length = self.lengths[0]
        rows = [self.encode(text, text if pair else None) for text in texts]
        found = {name: np.zeros((len(rows), length), np.int32) for name in self.inputs(spans)}
        found["input_ids"] += self.pad_id
        for index, encoding in enumerate(rows):
            count = min(length, len(encoding.ids))
            found["input_ids"][index, :count] = encoding.ids[:count]
            found["attention_mask"][index, :count] = 1
            if self.with_types:
                found["token_type_ids"][index, :count] = encoding.type_ids[:count]
            if spans:
                found["starts"][index, :count], found["ends"][index, :count] = np.array(
                    encoding.offsets[:count]
                ).T
        return found

    def axes(self, spans: bool = False) -> dict[str, str]:
        return dict.fromkeys(self.inputs(spans), "nl")

    @property
    def input_shapes(self) -> list[dict[str, int]]:
        return [{"l": length} for length in self.lengths]

    def texts(self, mask: str = "") -> dict[str, str]:
        """Return samples: several scripts, a text for each length, and one that is cut, unless such are refused.

        mask: a word that each has once.
        """
        found = {}
        behind = f" {mask}" if mask else ""
        for number, sentence in enumerate(_SENTENCES):
            text = sentence + behind
            if 0 < len(self.encode(self.prefix + text).ids) <= self.lengths[-1]:
                found[f"sentence {number}"] = text
        for length in self.lengths:
            text = self._filled(length, mask)
            if text:
                found[f"{length} tokens"] = text
        if self.too_long == "cut" and not mask:
            found["too long"] = " ".join(_SENTENCES) * (1 + self.lengths[-1] // 20)
        return found

    def _filled(self, length: int, mask: str) -> str:
        """Return the longest beginning of a text, in words, that fits into a length with the mask behind it."""
        words = (" ".join(_SENTENCES[:3]) + " ").split() * (1 + length // 8)
        low, high = 0, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            text = " ".join([*words[:middle], mask]).strip()
            if len(self.encode(self.prefix + text).ids) <= length:
                low = middle
            else:
                high = middle - 1
        return " ".join([*words[:low], mask]).strip()


_SHIFTED = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "longformer",
    "data2vec-text",
    "xlm-roberta-xl",
    "ibert",
)
_MASK = 'MASK = TOKENISER.id_of(json.loads((HERE / "mask.json").read_text(encoding="utf-8")))\n'


def _text(request: Request, name: str = "text") -> str:
    return value(request, name).decode()


def embed(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for embeddings of a plain encoder: pooled vectors of its tokens."""
    from transformers import AutoModel, pipeline

    # The vectors of the tokens are pooled here.
    network, tokenizer = load_model(AutoModel, directory, unused="pooler"), load_tokenizer(directory)
    text = Text(directory, options, network, tokenizer, cuts=True)
    pooling = options.pooling or "mean"
    ask = pipeline("feature-extraction", model=network, tokenizer=tokenizer, device="cpu")

    def reference(request: Request) -> dict[str, Any]:
        vectors = np.array(ask(_text(request), truncation=True)[0], np.float32)
        pooled = {"cls": vectors[0], "last": vectors[-1], "mean": vectors.mean(0)}[pooling]
        return {"embedding": pooled, "tokens": np.int32(len(vectors))}

    module = _TextEmbedder(network, text.with_types, pooling)
    return _embedding(directory, options, text, module, reference, "transformers.pipeline")


def sentences(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for a directory of sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    # sentence-transformers does not say which weights are missing, nor how large a model will be.
    load_model(AutoModel, directory, unused="pooler")
    model: Any = SentenceTransformer(
        str(directory.path), device="cpu", local_files_only=True, trust_remote_code=False, model_kwargs=_EAGER
    )
    if options.pooling:
        raise BundleError("--pooling: modules.json says how the vectors are pooled; leave the option out")
    if directory.modules[:1] != ("Transformer",) or "Pooling" not in directory.modules:
        raise BundleError(
            f"modules.json: has {', '.join(directory.modules)}; a model of text begins with Transformer and has Pooling"
        )
    model.eval()
    first = model[0]
    prompt = model.prompts.get(model.default_prompt_name or "", "")
    text = Text(
        directory, options, first.model, first.tokenizer, cuts=True, limit=model.max_seq_length, prefix=prompt
    )
    model.max_seq_length = text.lengths[-1]

    def reference(request: Request) -> dict[str, Any]:
        vector = model.encode([_text(request)], show_progress_bar=False)[0]
        return {"embedding": vector}

    module = _Sentences(model, text.with_types)
    return _embedding(directory, options, text, module, reference, "sentence-transformers")


#: As in `load_model`. Fused operations of attention have branches that depend on the mask's values.
_EAGER = {"attn_implementation": "eager", "use_safetensors": True, "dtype": torch.float32}


def _embedding(
    directory: Directory,
    options: HubOptions,
    text: Text,
    module: nn.Module,
    reference: Callable[[Request], Mapping[str, Any]],
    source: str,
) -> HubRecipe:
    samples = {name: row(text=sample) for name, sample in text.texts().items()}
    examples = text.examples(_SENTENCES[:2])
    with torch.no_grad():
        found = module(**{name: torch.from_numpy(array) for name, array in examples.items()})
    width = found["embedding"].shape[1]
    task: dict[str, Any] = {
        "kind": "feature-extraction",
        "inputs": {"text": "text"},
        "outputs": {"embedding": "embedding", "tokens": "tokens"},
    }
    if dimensions := _dimensions(directory, options, width):
        task["dimensions"] = dimensions
    return HubRecipe(
        module=module.eval(),
        examples=examples,
        axes=text.axes(),
        input_shapes=text.input_shapes,
        hooks=text.hooks("feature-extraction"),
        files=text.files(),
        client_inputs=[strings("text")],
        client_outputs=[numbers("embedding", "f32", "d", [width]), numbers("tokens", "i32")],
        task=task,
        samples=samples,
        reference=reference,
        source=source,
    )


def _dimensions(directory: Directory, options: HubOptions, width: int) -> list[int]:
    """Return the lengths to which the embedding may be cut, by the user or by the configuration."""
    given: Sequence[Any] = options.dimensions
    for document in (directory.config, directory.json("config_sentence_transformers.json")):
        for key in ("matryoshka_dimensions", "matryoshka_dims"):
            found = document.get(key)
            given = given or (found if isinstance(found, list) else ())
    if wrong := [size for size in given if not isinstance(size, int) or not 0 < size <= width]:
        raise BundleError(
            f"dimensions: {wrong[0]!r:.40} is no length from 1 to {width}, which the embedding has"
        )
    return sorted({*given, width}) if given else []


def rank(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for a cross-encoder: one score for a query and a document."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSequenceClassification

    load_model(AutoModelForSequenceClassification, directory)
    model: Any = CrossEncoder(
        str(directory.path), device="cpu", local_files_only=True, trust_remote_code=False, model_kwargs=_EAGER
    )
    model.eval()
    network, tokenizer = model.model, model.tokenizer
    text = Text(directory, options, network, tokenizer, cuts=True, limit=model.max_seq_length)
    model.max_seq_length = text.lengths[-1]
    pairs = {
        f"{name}, {order}": row(text=first, text_pair=second)
        for name, sample in text.texts().items()
        for order, (first, second) in {
            "first": (sample, _SENTENCES[0]),
            "second": (_SENTENCES[1], sample),
        }.items()
    }
    if text.too_long == "refuse":
        pairs = {
            name: pair
            for name, pair in pairs.items()
            if len(text.encode(_text(pair), _text(pair, "text_pair")).ids) <= text.lengths[-1]
        }

    def reference(request: Request) -> dict[str, Any]:
        found = model.predict([(_text(request), _text(request, "text_pair"))], show_progress_bar=False)
        return {"scores": np.asarray(found, np.float32).reshape(1)}

    return HubRecipe(
        module=_TextScorer(network, text.with_types, model.activation_fn).eval(),
        examples=text.examples(_SENTENCES[:2], pair=True),
        axes=text.axes(),
        input_shapes=text.input_shapes,
        hooks=text.hooks("text-ranking", pair=True),
        files=text.files(),
        client_inputs=[strings("text"), strings("text_pair")],
        client_outputs=[numbers("scores", "f32", "k", [1]), numbers("tokens", "i32")],
        task={
            "kind": "text-ranking",
            "inputs": {"text": "text", "text_pair": "text_pair"},
            "outputs": {"scores": "scores", "tokens": "tokens"},
        },
        samples=pairs,
        reference=reference,
        source="sentence-transformers",
    )


def _activation(directory: Directory) -> Callable[[Any], Any]:
    """Return what the pipeline applies to a classifier's logits."""
    problem = directory.config.get("problem_type")
    if problem == "regression":
        return nn.Identity()
    if problem == "multi_label_classification" or len(directory.labels) == 1:
        return nn.Sigmoid()
    return nn.Softmax(-1)


def classify(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for a classifier of texts."""
    from transformers import AutoModelForSequenceClassification, pipeline

    network = load_model(AutoModelForSequenceClassification, directory)
    tokenizer = load_tokenizer(directory)
    text = Text(directory, options, network, tokenizer, cuts=False)
    labels = directory.labels
    ask: Any = pipeline("text-classification", model=network, tokenizer=tokenizer, device="cpu", top_k=None)

    def reference(request: Request) -> dict[str, Any]:
        return {"scores": label_scores(ask([_text(request)], truncation=True)[0], labels)}

    return HubRecipe(
        module=_TextScorer(network, text.with_types, _activation(directory)).eval(),
        examples=text.examples(_SENTENCES[:2]),
        axes=text.axes(),
        input_shapes=text.input_shapes,
        hooks=text.hooks("text-classification"),
        files=text.files(),
        client_inputs=[strings("text")],
        client_outputs=[numbers("scores", "f32", "k", [len(labels)]), numbers("tokens", "i32")],
        task={
            "kind": "text-classification",
            "inputs": {"text": "text"},
            "outputs": {"scores": "scores", "tokens": "tokens"},
            "labels": labels,
        },
        samples={name: row(text=sample) for name, sample in text.texts().items()},
        reference=reference,
    )


_GROUPS = """

LABELS = json.loads((HERE / "labels.json").read_text(encoding="utf-8"))


def postprocess(outputs):
    names = ("scores", "ids", "starts", "ends")
    entities = answers.entities(*(outputs[name] for name in names), LABELS, TOKENISER)
    return {"entities": text.as_json(entities), "tokens": outputs["tokens"]}
"""


def tag(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for named entities: labels of tokens, grouped."""
    from transformers import AutoModelForTokenClassification, pipeline

    network = load_model(AutoModelForTokenClassification, directory)
    tokenizer = load_tokenizer(directory)
    text = Text(directory, options, network, tokenizer, cuts=True)
    labels = directory.labels
    # Hooks after the network see tokens only. With `unk_token`, the pipeline returns the text of an unknown token.
    tokenizer.unk_token = None
    ask = pipeline(
        "token-classification",
        model=network,
        tokenizer=tokenizer,
        device="cpu",
        aggregation_strategy="simple",
    )

    def reference(request: Request) -> dict[str, Any]:
        return {"entities": [_plain(entity) for entity in ask(_text(request))]}

    return HubRecipe(
        module=_Tagger(network, text.with_types).eval(),
        examples=text.examples(_SENTENCES[:2], spans=True),
        axes=text.axes(spans=True),
        input_shapes=text.input_shapes,
        hooks=text.hooks("token-classification", spans=True, post=_GROUPS),
        files=text.files(labels=labels),
        client_inputs=[strings("text")],
        client_outputs=[strings("entities"), numbers("tokens", "i32")],
        task={
            "kind": "token-classification",
            "inputs": {"text": "text"},
            "outputs": {"entities": "entities", "tokens": "tokens"},
            "labels": labels,
        },
        samples={name: row(text=sample) for name, sample in text.texts().items()},
        reference=reference,
    )


def _plain(entity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipeline's answer with Python's numbers."""
    return {key: value.item() if hasattr(value, "item") else value for key, value in entity.items()}


_CHECK = """    if not ((tokens.ids == MASK).sum(1) == 1).all():
        raise BadInput("each text needs the mask exactly once")
"""
_CHOICES = """

def postprocess(outputs):
    names = ("scores", "candidates", "ids", "mask")
    candidates = answers.candidates(*(outputs[name] for name in names), MASK, TOKENISER)
    return {"candidates": text.as_json(candidates), "tokens": outputs["tokens"]}
"""


def fill(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for the likeliest words in place of a mask."""
    from transformers import AutoModelForMaskedLM, pipeline

    network = load_model(AutoModelForMaskedLM, directory)
    tokenizer = load_tokenizer(directory)
    text = Text(directory, options, network, tokenizer, cuts=False)
    mask = tokenizer.mask_token
    if not mask:
        raise BundleError("tokenizer_config.json: mask_token: is missing; a model for fill-mask needs it")
    ask = pipeline("fill-mask", model=network, tokenizer=tokenizer, device="cpu", top_k=_CANDIDATES)

    def reference(request: Request) -> dict[str, Any]:
        return {"candidates": [_plain(each) for each in ask(_text(request))]}

    samples = {name: row(text=sample) for name, sample in text.texts(mask).items()}
    examples = text.examples([f"{mask} {sentence}" for sentence in _SENTENCES[:2]])
    return HubRecipe(
        module=_Filler(network, text.with_types, tokenizer.mask_token_id).eval(),
        examples=examples,
        axes=text.axes(),
        input_shapes=text.input_shapes,
        hooks=text.hooks("fill-mask", check=_CHECK, post=_CHOICES),
        files=text.files(mask=mask),
        client_inputs=[strings("text")],
        client_outputs=[strings("candidates"), numbers("tokens", "i32")],
        task={
            "kind": "fill-mask",
            "inputs": {"text": "text"},
            "outputs": {"candidates": "candidates", "tokens": "tokens"},
        },
        samples=samples,
        reference=reference,
    )
