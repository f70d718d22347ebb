"""Make directories as `save_pretrained` and sentence-transformers write them, with tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
}


def wordpiece(folder: Path) -> None:
    """Save a tokenizer like BERT's. Its words are single characters and a few syllables."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [
        chr(code) for code in [*range(33, 127), *range(0x430, 0x450), *range(0x3042, 0x3060), 0x6771, 0x4EAC]
    ]
    words = [*marks, *letters, *(f"##{letter}" for letter in letters), "the", "cat", "##ing", "on"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    _save(tokenizer, folder, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names)


def bytepair(folder: Path) -> None:
    """Save a tokenizer like RoBERTa's. Its tokens are bytes."""
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: n for n, word in enumerate([*marks, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>", "mask": "<mask>"}
    _save(tokenizer, folder, model_input_names=["input_ids", "attention_mask"], **names)


def _save(tokenizer: Tokenizer, folder: Path, model_input_names: list[str], **names: str) -> None:
    special: Any = {f"{name}_token": token for name, token in names.items()}
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(
        tokenizer_object=tokenizer, model_max_length=72, model_input_names=model_input_names, **special
    ).save_pretrained(folder)


def save(folder: Path, model: Any) -> Path:
    """Save a model with weights so large that its answers depend on its inputs."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    return folder


def bert(folder: Path, head: str = "BertModel", labels: tuple[str, ...] = (), **config: Any) -> Path:
    """Save a BERT with this class."""
    import transformers

    wordpiece(folder)
    return save(
        folder, getattr(transformers, head)(transformers.BertConfig(**_labelled(labels), **SIZES, **config))
    )


def roberta(folder: Path, head: str = "RobertaModel", labels: tuple[str, ...] = (), **config: Any) -> Path:
    """Save a RoBERTa with this class."""
    import transformers

    bytepair(folder)
    ids: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    made = transformers.RobertaConfig(**_labelled(labels), **ids, **SIZES, **config)
    return save(folder, getattr(transformers, head)(made))


def distilbert(folder: Path, head: str = "DistilBertModel", labels: tuple[str, ...] = ()) -> Path:
    """Save a DistilBERT with this class. The model has no input for types of tokens."""
    import transformers

    wordpiece(folder)
    sizes: dict[str, Any] = {"vocab_size": 400, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    made = transformers.DistilBertConfig(**_labelled(labels), **sizes, max_position_embeddings=80)
    return save(folder, getattr(transformers, head)(made))


def gpt2(folder: Path, labels: tuple[str, ...]) -> Path:
    """Save a GPT-2 that classifies texts. It finds the end of a text by the padding's id, and not by the mask."""
    import transformers

    bytepair(folder)
    sizes: dict[str, Any] = {"vocab_size": 400, "n_positions": 80, "n_embd": 32, "n_layer": 2, "n_head": 4}
    made = transformers.GPT2Config(**_labelled(labels), **sizes, pad_token_id=1)
    return save(folder, transformers.GPT2ForSequenceClassification(made))


def _labelled(labels: tuple[str, ...]) -> dict[str, Any]:
    if not labels:
        return {}
    return {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}


def sentence_transformer(folder: Path, mode: str, *, dense: bool = False, normalise: bool = True) -> Path:
    """Save a model of sentence-transformers over a BERT."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    encoder = bert(folder.with_name(f"{folder.name}-encoder"))
    modules: list[Any] = [Transformer(str(encoder)), Pooling(32, pooling_mode=mode)]
    modules += [Dense(32, 16)] if dense else []
    modules += [Normalize()] if normalise else []
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))
    return folder


def plain(folder: Path, **files: str | bytes) -> Path:
    """Write a directory that looks like a model's but has no model: config.json, and a safetensors file of one number."""
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    contents: dict[str, str | bytes] = {
        "config.json": json.dumps({"architectures": ["BertModel"], "model_type": "bert"}),
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(4),
        **files,
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def picture(
    folder: Path, model: str, processor: str, sizes: dict[str, Any], backbone: Any = None, **config: Any
) -> Path:
    """Save a model for pictures: the class `model`, its processor with `sizes`, and a configuration of five classes.

    `backbone` is the configuration of another network that computes the features.
    """
    import transformers

    made = getattr(transformers, f"{processor}ImageProcessorPil")
    made(**sizes).save_pretrained(folder)
    network = getattr(transformers, model)
    labels = tuple(f"class {n}" for n in range(5)) if "For" in model else ()
    others = {} if backbone is None else {"backbone_config": backbone}
    return save(folder, network(network.config_class(**_labelled(labels), **others, **config)))


def detr(folder: Path, family: str) -> Path:
    """Save a detector of this family, such as Detr. Its network takes a mask of the pixels that are not padding."""
    import transformers

    sizes: dict[str, Any] = {"d_model": 32, "num_queries": 7}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
    library: Any = transformers
    backbone = library.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    # COCO has several classes with the name "N/A".
    names = _labelled(("N/A", "cat", "N/A", "dog", "bird"))
    config = getattr(library, f"{family}Config")(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        **sizes,
        **names,
    )
    model = getattr(library, f"{family}ForObjectDetection")(config)
    library.DetrImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(folder)
    save(folder, model)
    # Larger weights make some class likely enough for an answer.
    with torch.no_grad():
        model.class_labels_classifier.weight.mul_(10)
    model.save_pretrained(folder)
    return folder


#: Sizes of a vision transformer.
PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}


def decoder(folder: Path, family: str, template: str = "", **config: Any) -> Path:
    """Save a decoder of a family, such as Llama, with this chat template."""
    import transformers

    bytepair(folder)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    sizes = {**SIZES, "max_position_embeddings": 256, "num_key_value_heads": 2}
    made = getattr(transformers, f"{family}Config")(**{**sizes, **ids, **config})
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return save(folder, getattr(transformers, f"{family}ForCausalLM")(made))
