"""Conversion of WAV files to the samples that a network takes, and of the frames that a network returns to text."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.hooks import BadInput

Array = npt.NDArray[Any]

#: Codes of the formats of samples in a WAV file: whole numbers, floats, and a format whose longer header has one of these two
#: codes.
_WHOLE, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
#: Maximum number of channels in a file. The mean of all channels becomes the only channel.
_MAX_CHANNELS = 8
#: Maximum number of parts in a file before its samples. An empty part takes only eight bytes.
_MAX_PARTS = 1000


@dataclass(frozen=True, slots=True)
class Sounds:
    """Samples f32 [n, length] with zeros after each sound, and the number of samples of each sound without these zeros, i32 [n]."""

    samples: Array
    lengths: Array


def decode(files: Array, rate: int, *, most: int) -> list[Array]:
    """Decode WAV files to samples from -1 to 1, f32 each. The channels of a file are averaged.

    files: strings [n] or [n, 1]. rate: samples per second that a file must have. most: maximum number of samples of a sound.
    Raises BadInput for files of other types, damaged files, and other rates, because rsrv does not resample.
    """
    return [_samples(row, bytes(file), rate, most) for row, file in enumerate(files.reshape(len(files)))]


def _samples(row: int, file: bytes, rate: int, most: int) -> Array:
    if file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        raise BadInput(f"sound {row} is not a WAV file")
    header, data, place = b"", b"", 12
    for _ in range(_MAX_PARTS):
        if place + 8 > len(file) or data:
            break
        kind, size = struct.unpack_from("<4sI", file, place)
        content = file[place + 8 : place + 8 + size]
        if len(content) < size:
            raise BadInput(f"sound {row} is damaged: it ends within its part {kind!r}")
        if kind == b"fmt ":
            header = content
        elif kind == b"data":
            data = content
        place += 8 + size + size % 2
    if len(header) < 16 or not data:
        raise BadInput(f"sound {row} is damaged: it has no header or no samples")
    code, channels, actual, _, block, bits = struct.unpack_from("<HHIIHH", header)
    if code == _EXTENSIBLE and len(header) >= 26:
        (code,) = struct.unpack_from("<H", header, 24)
    if not 0 < channels <= _MAX_CHANNELS or not 0 < block * 8 == channels * bits:
        raise BadInput(f"sound {row} is damaged: it has {channels} channels, and blocks of {block} bytes")
    if actual != rate:
        raise BadInput(f"sound {row} has {actual} samples per second; send {rate}")
    count = len(data) // block
    if count > most:
        raise BadInput(f"sound {row} has {count} samples; the model reads at most {most}")
    values = _numbers(data[: count * block], code, bits)
    if values is None:
        raise BadInput(
            f"sound {row} has samples of format {code} with {bits} bits; send whole numbers or floats"
        )
    # Finite numbers of 64 bits may be too large for 32 bits.
    with np.errstate(over="ignore", invalid="ignore"):
        mono: Array = values.reshape(-1, channels).mean(1).astype(np.float32)
    if not np.isfinite(mono).all():
        raise BadInput(f"sound {row} has samples that are not finite numbers of 32 bits")
    return mono


def _numbers(data: bytes, code: int, bits: int) -> Array | None:
    """Return samples from -1 to 1, or None if the format is unknown."""
    if code == _FLOAT and bits in (32, 64):
        return np.frombuffer(data, f"<f{bits // 8}").astype(np.float64)
    if code != _WHOLE:
        return None
    if bits == 8:
        return (np.frombuffer(data, np.uint8) - 128.0) / 128
    if bits in (16, 32):
        return np.frombuffer(data, f"<i{bits // 8}") / 2.0 ** (bits - 1)
    if bits == 24:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0] / 2.0**31
    return None


def pad(sounds: Sequence[Array], lengths: Sequence[int], *, least: int, normalise: bool) -> Sounds:
    """Put sounds into rows of the smallest of `lengths` that holds all of them.

    lengths: samples in a row that the model is compiled for. least: minimum number of samples of a sound. Shorter sounds raise
    BadInput. normalise: give each sound the mean 0 and the variance 1, as the feature extractors of wav2vec2 do.
    """
    for row, sound in enumerate(sounds):
        if len(sound) < least:
            raise BadInput(f"sound {row} has {len(sound)} samples; the model needs at least {least}")
        if len(sound) > max(lengths):
            raise BadInput(f"sound {row} has {len(sound)} samples; the model reads at most {max(lengths)}")
    counts = np.array([len(sound) for sound in sounds], np.int32)
    width = next(length for length in sorted(lengths) if length >= counts.max(initial=0))
    rows = np.zeros((len(sounds), width), np.float32)
    for samples, sound in zip(rows, sounds, strict=True):
        scaled = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7) if normalise else sound
        samples[: len(sound)] = scaled
    return Sounds(rows, counts)


def ctc(logits: Array, frames: Array, words: Sequence[str], *, blank: int, delimiter: str = "|") -> list[str]:
    """Return the likeliest text of each row: repeated tokens become one, and then blanks are left out (CTC, greedy).

    logits: [n, t, words]. frames: [n], the number of frames that belong to the sound. words: the text of each token. delimiter:
    the text of the token between words, which becomes a space.
    """
    texts = []
    for scores, count in zip(logits, frames, strict=True):
        best = scores[: int(count)].argmax(-1)
        changes = best[np.append(True, best[1:] != best[:-1])] if len(best) else best
        spoken = (words[token] for token in changes.tolist() if token != blank)
        texts.append("".join(" " if word == delimiter else word for word in spoken).strip())
    return texts
