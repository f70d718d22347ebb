"""Recipes for models that read text: embeddings, ranking, classification, entities and masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from rsrv_bundle.errors import BundleError
from rsrv_bundle.hf.directory import Directory
from rsrv_bundle.hf.loading import check_tokenizer, load_model, load_tokenizer
from rsrv_bundle.hf.recipe import HubOptions, HubRecipe, Request, label_scores, row, value

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
#: For each executable input, the array of `rsrv.hooks.text.Tokens` that it gets, and its value after a text's end.
_INPUTS: Final[Mapping[str, tuple[str, int]]] = {
    "input_ids": ("ids", 0),
    "attention_mask": ("mask", 0),
    "token_type_ids": ("types", 0),
    "starts": ("starts", -1),
    "ends": ("ends", -1),
}
#: Values of model_type of networks that number the positions in a text from the padding's id plus 1 on.
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
#: Function that takes the output of a network, `input_ids` and `attention_mask`, and returns the outputs of the bundle.
_Answer = Callable[[Any, Any, Any], dict[str, Any]]


class _TextReader(nn.Module):
    """A network that reads token ids. Its inputs are i32. It also returns the number of tokens of each text."""

    def __init__(self, network: nn.Module, answer: _Answer) -> None:
        super().__init__()
        self.network = network
        self.answer = answer

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any,
        starts: Any = None,
        ends: Any = None,
        token_type_ids: Any = None,
    ) -> dict[str, Any]:
        # Convert to 64-bit integers, which the network's own tokenizer makes.
        given = {"input_ids": input_ids.long(), "attention_mask": attention_mask.long()}
        if token_type_ids is not None:
            given["token_type_ids"] = token_type_ids.long()
        outputs = self.answer(self.call(given), input_ids, attention_mask)
        if starts is not None:
            # Copy these outputs: a module that returns one of its inputs would return the caller's memory.
            outputs |= {"ids": input_ids + 0, "starts": starts + 0, "ends": ends + 0}
        return {**outputs, "tokens": attention_mask.sum(1).int()}

    def call(self, given: dict[str, Any]) -> Any:
        return self.network(**given)


class _Sentences(_TextReader):
    """A model of sentence-transformers with all its modules. Each module changes the mapping of arrays that it gets."""

    def call(self, given: dict[str, Any]) -> Any:
        return self.network(given)


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
        """With `cuts`, texts that are too long are cut, unless the user decides otherwise.

        `limit` is the maximum number of tokens, in addition to other limits.
        """
        self.tokenizer = tokenizer
        self.prefix = prefix
        backend = tokenizer.backend_tokenizer
        self.too_long = options.too_long or ("cut" if cuts or backend.truncation else "refuse")
        backend.no_padding()
        backend.no_truncation()
        names = inspect.signature(network.forward).parameters
        self.with_types = "token_type_ids" in tokenizer.model_input_names and "token_type_ids" in names
        self.lengths = self._lengths(directory, options, limit)
        # Set the length at which the pipelines cut a text, so that it is the same as the hooks' length.
        tokenizer.model_max_length = self.lengths[-1]
        check_tokenizer(tokenizer, self.lengths[-1])

    def _lengths(self, directory: Directory, options: HubOptions, limit: int | None) -> tuple[int, ...]:
        limits = [limit or 10**9, self.tokenizer.model_max_length]
        positions = directory.config.get("max_position_embeddings")
        if isinstance(positions, int) and positions > 0:
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

    def recipe(
        self,
        kind: str,
        module: nn.Module,
        reference: Callable[[Request], Mapping[str, Any]],
        *outputs: str,
        pair: bool = False,
        spans: bool = False,
        check: str = "",
        post: str = "",
        samples: Mapping[str, Request] | None = None,
        **others: Any,
    ) -> HubRecipe:
        """Return the recipe of a module.

        `outputs` are the clients' outputs without `tokens`, which every recipe has. With `spans`, the module also gets
        the positions of the tokens in their text. `check` is code that `preprocess` runs after the tokenizer, and `post` is the
        code of `postprocess` and of its constants. By default, the samples are those of `texts`.
        """
        unused = {*([] if self.with_types else ["token_type_ids"]), *([] if spans else ["starts", "ends"])}
        inputs = [name for name in _INPUTS if name not in unused]
        pad_id = self.tokenizer.pad_token_id or 0
        options = f'pad_id={pad_id}, too_long="{self.too_long}"'
        options += f", prefix={self.prefix!r}" if self.prefix else ""
        options += ", spans=True" if spans else ""
        second = ', inputs["text_pair"]' if pair else ""
        returned = ", ".join(f'"{name}": tokens.{_INPUTS[name][0]}' for name in inputs)

        def hooks(lengths: str) -> str:
            return (
                f'"""Hooks of a model for {kind}: text to tokens{", and scores to an answer" if post else ""}."""\n\n'
                "from pathlib import Path\n\n"
                f"from rsrv.hooks import {'BadInput, ' if check else ''}text{', tokens as answers' if post else ''}\n\n"
                f'FILE = Path(__file__).with_name("tokenizer.json")\n'
                f"TOKENISER = text.Tokeniser(FILE, lengths={lengths}, {options})\n"
                "\n\ndef preprocess(inputs):\n"
                f'    tokens = TOKENISER(inputs["text"]{second})\n{check}'
                f"    return {{{returned}}}\n{post}"
            )

        compiled = hooks(str(list(self.lengths)))
        # With only one length, no axis is padded, because all requests have this length.
        padded = len(self.lengths) > 1
        fills = {**{name: _INPUTS[name][1] for name in inputs}, "input_ids": pad_id}
        values = "".join(f",{name}={fill}" for name, fill in fills.items() if fill)
        backend = self.tokenizer.backend_tokenizer
        # Long texts are cut at one end. Write this end into tokenizer.json, where the hooks read it.
        backend.enable_truncation(self.lengths[-1], direction=self.tokenizer.truncation_side)
        file = backend.to_str()
        backend.no_truncation()
        return HubRecipe(
            kind=kind,
            module=module.eval(),
            axes=dict.fromkeys(inputs, "nl"),
            hooks=hooks(f"range(1, {self.lengths[-1] + 1})") if padded else compiled,
            unpadded_hooks=compiled,
            inputs=("text", "text_pair") if pair else ("text",),
            outputs=(*outputs, "tokens"),
            samples=samples or {name: row(text=sample) for name, sample in self.texts().items()},
            reference=reference,
            input_shapes=[{"l": length} for length in self.lengths],
            pad=f"l=0,mask=attention_mask{values}" if padded else "",
            tokenizer=file,
            **others,
        )

    def encode(self, text: str, second: str | None = None) -> Any:
        return self.tokenizer.backend_tokenizer.encode(text, second)

    def texts(self, mask: str = "") -> dict[str, str]:
        """Return sample texts: several scripts, one text for each length, and one that is cut, unless long texts are refused.

        `mask` is a word that each sample contains once.
        """
        samples = {}
        behind = f" {mask}" if mask else ""
        for number, sentence in enumerate(_SENTENCES):
            text = sentence + behind
            if 0 < len(self.encode(self.prefix + text).ids) <= self.lengths[-1]:
                samples[f"sentence {number}"] = text
        for length in self.lengths:
            text = self._filled(length, mask)
            if text:
                samples[f"{length} tokens"] = text
        if self.too_long == "cut" and not mask:
            samples["too long"] = " ".join(_SENTENCES) * (1 + self.lengths[-1] // 20)
        return samples

    def _filled(self, length: int, mask: str) -> str:
        """Return the longest sample text that has at most `length` tokens. If there is a `mask`, it is the last word."""
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


def _text(request: Request, name: str = "text") -> str:
    return value(request, name).decode()


def embed(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for embeddings of a plain encoder: pooled vectors of its tokens."""
    from transformers import AutoModel, pipeline

    # The bundle pools the vectors of the tokens itself, so the weights of the pooler may be missing.
    network, tokenizer = load_model(AutoModel, directory, unused="pooler"), load_tokenizer(directory)
    text = Text(directory, options, network, tokenizer, cuts=True)
    pooling = options.pooling or "mean"
    ask = pipeline("feature-extraction", model=network, tokenizer=tokenizer, device="cpu")

    def reference(request: Request) -> dict[str, Any]:
        vectors = np.array(ask(_text(request), truncation=True)[0], np.float32)
        pooled = {"cls": vectors[0], "last": vectors[-1], "mean": vectors.mean(0)}[pooling]
        return {"embedding": pooled, "tokens": np.int32(len(vectors))}

    def answer(output: Any, _: Any, mask: Any) -> dict[str, Any]:
        hidden = output.last_hidden_state.float()
        counted = mask[:, :, None].to(hidden.dtype)
        if pooling == "cls":
            return {"embedding": hidden[:, 0]}
        if pooling == "last":
            places = torch.arange(hidden.shape[1])[None, :, None]
            last = (places == counted.sum(1, keepdim=True) - 1).to(hidden.dtype)
            return {"embedding": (hidden * last).sum(1)}
        return {"embedding": (hidden * counted).sum(1) / counted.sum(1).clamp(min=1)}

    dimensions = _dimensions(directory, options, network.config.hidden_size)
    module = _TextReader(network, answer)
    recipe = text.recipe("feature-extraction", module, reference, "embedding", dimensions=dimensions)
    note = (
        ""
        if options.pooling
        else "the embedding is the mean of the token vectors; rsrv-bundle export --pooling cls or last makes another"
    )
    return replace(recipe, note=note)


def sentences(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for a directory of sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    # Load the model here first, because sentence-transformers reports neither missing weights nor the size of a model.
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

    return text.recipe(
        "feature-extraction",
        _Sentences(model, lambda output, *_: {"embedding": output["sentence_embedding"].float()}),
        reference,
        "embedding",
        dimensions=_dimensions(directory, options, model.get_embedding_dimension()),
        source="sentence-transformers",
    )


#: Options of transformers, as in `load_model`. Fused attention would have branches that depend on the mask's values.
_EAGER = {"attn_implementation": "eager", "use_safetensors": True, "dtype": torch.float32}


def _dimensions(directory: Directory, options: HubOptions, width: int) -> list[int]:
    """Return the lengths to which the embedding may be cut, as the user or the configuration names them."""
    given: Sequence[Any] = options.dimensions
    for document in (directory.config, directory.json("config_sentence_transformers.json")):
        for key in ("matryoshka_dimensions", "matryoshka_dims"):
            sizes = document.get(key)
            given = given or (sizes if isinstance(sizes, list) else ())
    if wrong := [size for size in given if not isinstance(size, int) or not 0 < size <= width]:
        raise BundleError(
            f"dimensions: {wrong[0]!r:.40} is not a length from 1 to {width}, which the embedding has"
        )
    return sorted({*given, width}) if given else []


def _scores(activation: Callable[[Any], Any]) -> _Answer:
    return lambda output, *_: {"scores": activation(output.logits.float())}


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
        if text.too_long == "cut" or len(text.encode(first, second).ids) <= text.lengths[-1]
    }

    def reference(request: Request) -> dict[str, Any]:
        scores = model.predict([(_text(request), _text(request, "text_pair"))], show_progress_bar=False)
        return {"scores": np.asarray(scores, np.float32).reshape(1)}

    module = _TextReader(network, _scores(model.activation_fn))
    return text.recipe(
        "text-ranking",
        module,
        reference,
        "scores",
        pair=True,
        samples=pairs,
        source="sentence-transformers",
    )


def _activation(directory: Directory) -> Callable[[Any], Any]:
    """Return the function that the pipeline applies to a classifier's logits."""
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

    module = _TextReader(network, _scores(_activation(directory)))
    return text.recipe("text-classification", module, reference, "scores", labels=labels)


#: Code of the hooks. Texts from the model's files are inserted as literals, so that they cannot become code.
_GROUPS = """

LABELS = {labels!r}


def postprocess(outputs):
    names = ("scores", "ids", "starts", "ends")
    entities = answers.entities(*(outputs[name] for name in names), LABELS, TOKENISER)
    return {{"entities": text.as_json(entities), "tokens": outputs["tokens"]}}
"""


def tag(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for named entities: labels of tokens, grouped."""
    from transformers import AutoModelForTokenClassification, pipeline

    network = load_model(AutoModelForTokenClassification, directory)
    tokenizer = load_tokenizer(directory)
    text = Text(directory, options, network, tokenizer, cuts=True)
    labels = directory.labels
    # After the network, the hooks know the tokens, but not the text. Without `unk_token`, the pipeline also returns no original
    # text in place of an unknown token.
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

    module = _TextReader(network, _scores(nn.Softmax(-1)))
    post = _GROUPS.format(labels=labels)
    return text.recipe(
        "token-classification", module, reference, "entities", spans=True, post=post, labels=labels
    )


def _plain(entity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a pipeline's answer, with Python's numbers in place of numpy's."""
    return {key: value.item() if hasattr(value, "item") else value for key, value in entity.items()}


_CHECK = """    if not ((tokens.ids == MASK).sum(1) == 1).all():
        raise BadInput("each text needs the mask exactly once")
"""
_CHOICES = """

MASK = TOKENISER.id_of({mask!r})


def postprocess(outputs):
    names = ("scores", "candidates", "ids", "mask")
    candidates = answers.candidates(*(outputs[name] for name in names), MASK, TOKENISER)
    return {{"candidates": text.as_json(candidates), "tokens": outputs["tokens"]}}
"""


def fill(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for the likeliest tokens in place of a mask."""
    from transformers import AutoModelForMaskedLM, pipeline

    network = load_model(AutoModelForMaskedLM, directory)
    tokenizer = load_tokenizer(directory)
    text = Text(directory, options, network, tokenizer, cuts=False)
    word, mask_id = tokenizer.mask_token, tokenizer.mask_token_id
    if not word:
        raise BundleError("tokenizer_config.json: mask_token: is missing; a model for fill-mask needs it")
    ask = pipeline("fill-mask", model=network, tokenizer=tokenizer, device="cpu", top_k=_CANDIDATES)

    def reference(request: Request) -> dict[str, Any]:
        return {"candidates": [_plain(each) for each in ask(_text(request))]}

    def answer(output: Any, ids: Any, mask: Any) -> dict[str, Any]:
        place = ((ids == mask_id) & (mask != 0)).int().argmax(1)
        # Select the mask's position before the softmax, so that the softmax runs for one position per row.
        chosen = output.logits.float()[torch.arange(ids.shape[0]), place]
        scores, tokens = chosen.softmax(-1).topk(_CANDIDATES)
        return {"scores": scores, "candidates": tokens.int(), "ids": ids + 0, "mask": mask + 0}

    return text.recipe(
        "fill-mask",
        _TextReader(network, answer),
        reference,
        "candidates",
        check=_CHECK,
        post=_CHOICES.format(mask=word),
        samples={name: row(text=sample) for name, sample in text.texts(word).items()},
    )
