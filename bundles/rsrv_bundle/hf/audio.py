"""Recipes for models of sound: speech to text with CTC, and classes of sounds. The models read samples, as wav2vec2 does."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from rsrv.hooks.audio import decode
from rsrv_bundle.errors import BundleError, summary
from rsrv_bundle.hf.directory import Directory
from rsrv_bundle.hf.loading import load_model
from rsrv_bundle.hf.recipe import HubOptions, HubRecipe, Request, label_scores, row

#: Lengths to compile for, in seconds, unless the user gives lengths.
_SECONDS = (5, 15)
#: Minimum number of frames of a sound.
_LEAST_FRAMES = 2
#: Maximum number of samples per second.
_MAX_RATE = 192_000


class _MaskedGroupNorm(nn.Module):
    """A norm of each channel over time. It ignores the padding after the end of a sound.

    The first layer of wav2vec2's smaller models has such a norm. Zeros after a sound would change its mean and variance.
    """

    def __init__(self, norm: nn.GroupNorm, frames: Callable[[Any], Any]) -> None:
        super().__init__()
        self.norm = norm
        self.frames = frames
        #: Number of samples of each row's sound, without padding. The module around this one sets it before each call.
        self.lengths: Any = None

    def forward(self, hidden: Any) -> Any:
        counted = torch.arange(hidden.shape[-1])[None, None] < self.frames(self.lengths)[:, None, None]
        counted = counted.to(hidden.dtype)
        total = counted.sum(-1, keepdim=True).clamp(min=1)
        mean = (hidden * counted).sum(-1, keepdim=True) / total
        spread = ((hidden - mean) ** 2 * counted).sum(-1, keepdim=True) / total
        scaled = (hidden - mean) / torch.sqrt(spread + self.norm.eps)
        return scaled * self.norm.weight[:, None] + self.norm.bias[:, None]


class _Listener(nn.Module):
    """A network that reads samples. In each row, only the first `lengths` samples belong to the sound."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        base = getattr(network, network.base_model_prefix)
        self.norms: list[_MaskedGroupNorm] = []
        first = base.feature_extractor.conv_layers[0]
        if isinstance(first.layer_norm, nn.GroupNorm):
            kernel, stride = first.conv.kernel_size[0], first.conv.stride[0]
            masked = _MaskedGroupNorm(
                first.layer_norm,
                lambda lengths: torch.div(lengths - kernel, stride, rounding_mode="floor") + 1,
            )
            first.layer_norm = masked
            self.norms = [masked]

    def hear(self, samples: Any, lengths: Any) -> Any:
        mask = (torch.arange(samples.shape[1])[None] < lengths[:, None]).long()
        for norm in self.norms:
            norm.lengths = lengths
        return self.network(input_values=samples, attention_mask=mask).logits.float()


class _Speech(_Listener):
    def forward(self, samples: Any, lengths: Any) -> dict[str, Any]:
        frames = self.network._get_feat_extract_output_lengths(lengths.long()).int()
        return {"logits": self.hear(samples, lengths), "frames": frames}


class _SoundScorer(_Listener):
    def forward(self, samples: Any, lengths: Any) -> dict[str, Any]:
        return {"scores": self.hear(samples, lengths).softmax(-1)}


class _Sound:
    """Parts that both recipes share: the feature extractor, lengths, samples and hooks."""

    def __init__(self, directory: Directory, options: HubOptions, network: Any) -> None:
        from transformers import AutoFeatureExtractor

        try:
            loader: Any = AutoFeatureExtractor
            self.extractor = loader.from_pretrained(
                str(directory.path), local_files_only=True, trust_remote_code=False
            )
        except Exception as e:
            raise BundleError(f"preprocessor_config.json: transformers cannot read it: {summary(e)}") from e
        base = getattr(network, network.base_model_prefix, None)
        if type(self.extractor).__name__ != "Wav2Vec2FeatureExtractor" or not hasattr(
            base, "feature_extractor"
        ):
            raise BundleError(
                f"preprocessor_config.json: {type(self.extractor).__name__} is not supported: only networks of samples are, such as"
                " wav2vec2, HuBERT and WavLM"
            )
        self.rate = int(self.extractor.sampling_rate)
        if not 0 < self.rate <= _MAX_RATE:
            raise BundleError(
                f"preprocessor_config.json: sampling_rate: {self.rate!s:.20} must be from 1 to {_MAX_RATE:,}"
            )
        self.lengths = options.lengths or tuple(seconds * self.rate for seconds in _SECONDS)
        frames: Callable[[int], Any] = network._get_feat_extract_output_lengths
        shortest = min(self.lengths)
        try:
            self.least = next(n for n in range(1, shortest + 1) if int(frames(n)) >= _LEAST_FRAMES)
        except StopIteration:
            raise BundleError(f"--lengths: {shortest} samples are less than the model needs") from None
        self.normalise = bool(self.extractor.do_normalize)

    def recipe(
        self,
        kind: str,
        module: nn.Module,
        ask: Any,
        reference: Callable[[Any], Any],
        output: str,
        *,
        post: str = "",
        **others: Any,
    ) -> HubRecipe:
        """Return the recipe of a module. `ask` is the pipeline, and `reference` converts its answer to the output."""
        hooks = (
            f'"""Hooks of a model for {kind}: WAV files to samples."""\n\n'
            f"from rsrv.hooks import {'audio, text' if post else 'audio'}\n\n"
            f"RATE = {self.rate}\nLENGTHS = {list(self.lengths)}\n\n\n"
            "def preprocess(inputs):\n"
            '    sounds = audio.decode(inputs["audio"], RATE, most=max(LENGTHS))\n'
            f"    padded = audio.pad(sounds, LENGTHS, least={self.least}, normalise={self.normalise})\n"
            f'    return {{"samples": padded.samples, "lengths": padded.lengths}}\n{post}'
        )
        return HubRecipe(
            kind=kind,
            module=module.eval(),
            axes={"samples": "nl", "lengths": "n"},
            hooks=hooks,
            inputs=("audio",),
            outputs=(output,),
            samples=self.samples(),
            reference=lambda request: {output: reference(ask(self.heard(request)))},
            input_shapes=[{"l": length} for length in sorted(self.lengths)],
            **others,
        )

    def samples(self) -> dict[str, Request]:
        """Return sounds of several formats and lengths, including each compiled length."""
        counts = {"short": self.least, "third": max(self.least, min(self.lengths) // 3)}
        counts |= {f"{length} samples": length for length in self.lengths}
        counts |= {"nearly all": max(self.lengths) - 17}
        sounds = {
            name: row(audio=_wav(seed, count, self.rate, 1, 2))
            for seed, (name, count) in enumerate(counts.items())
        }
        sounds["stereo, 24 bits"] = row(audio=_wav(9, counts["third"], self.rate, 2, 3))
        return sounds

    def heard(self, request: Request) -> dict[str, Any]:
        """Return a request's sound in the form that the pipelines take."""
        (samples,) = decode(request["audio"], self.rate, most=max(self.lengths))
        return {"raw": samples, "sampling_rate": self.rate}


def _wav(seed: int, count: int, rate: int, channels: int, width: int) -> bytes:
    """Return a WAV file: tones that change, with noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(count)[:, None] / rate
    pitch = rng.uniform(100, 800, (1, channels)) * (1 + 0.3 * np.sin(7 * time))
    sound = 0.4 * np.sin(2 * np.pi * pitch * time) + rng.normal(0, 0.05, (count, channels))
    whole = np.clip(sound * 2 ** (8 * width - 1), -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1).astype(
        "<i4"
    )
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(whole.reshape(-1, 1).view(np.uint8)[:, :width].tobytes())
    return file.getvalue()


#: Code of the hooks. Texts from the model's files are inserted as literals, so that they cannot become code.
_TEXT = """

WORDS = {words!r}


def postprocess(outputs):
    found = audio.ctc(outputs["logits"], outputs["frames"], WORDS, blank={blank}, delimiter={delimiter!r})
    return {{"text": text.as_strings(found)}}
"""


def speech(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for speech to text with CTC."""
    from transformers import AutoModelForCTC, AutoTokenizer, pipeline

    network = load_model(AutoModelForCTC, directory)
    sound = _Sound(directory, options, network)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(directory.path), local_files_only=True, trust_remote_code=False
        )
    except Exception as e:
        raise BundleError(
            f"{directory.path.name}: transformers finds no tokenizer in it: {summary(e)}"
        ) from e
    words = tokenizer.convert_ids_to_tokens(range(network.config.vocab_size))
    if getattr(tokenizer, "do_lower_case", False):
        words = [word.lower() for word in words]
    make: Any = pipeline
    # The module below changes the first norm, so the pipeline needs a separate network.
    ask = make(
        "automatic-speech-recognition",
        model=load_model(AutoModelForCTC, directory),
        feature_extractor=sound.extractor,
        tokenizer=tokenizer,
        device="cpu",
    )

    if tokenizer.pad_token_id is None:
        raise BundleError("tokenizer_config.json: pad_token: is missing; CTC needs it as the blank")
    delimiter = str(getattr(tokenizer, "word_delimiter_token", "|"))
    post = _TEXT.format(words=words, blank=int(tokenizer.pad_token_id), delimiter=delimiter)
    module = _Speech(network)
    return sound.recipe(
        "automatic-speech-recognition", module, ask, lambda answer: answer["text"], "text", post=post
    )


def classify(directory: Directory, options: HubOptions) -> HubRecipe:
    """Return the recipe for a classifier of sounds."""
    from transformers import AutoModelForAudioClassification, pipeline

    network = load_model(AutoModelForAudioClassification, directory)
    sound = _Sound(directory, options, network)
    labels = directory.labels
    make: Any = pipeline
    ask = make(
        "audio-classification",
        model=load_model(AutoModelForAudioClassification, directory),
        feature_extractor=sound.extractor,
        device="cpu",
        top_k=len(labels),
    )

    module = _SoundScorer(network)
    return sound.recipe(
        "audio-classification",
        module,
        ask,
        lambda answer: label_scores(answer, labels),
        "scores",
        labels=labels,
    )
