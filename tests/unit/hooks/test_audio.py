"""WAV files as samples, and frames as text."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from rsrv.hooks import BadInput
from rsrv.hooks.audio import ctc, decode, pad

Array = np.ndarray[Any, Any]
SOUND = np.sin(np.arange(100) / 5) * 0.9


def wav(
    data: bytes, code: int = 1, bits: int = 16, channels: int = 1, rate: int = 16_000, extra: bytes = b""
) -> bytes:
    """Return a WAV file with these samples. Another chunk comes before the samples."""
    block = channels * bits // 8
    header = struct.pack("<HHIIHH", code, channels, rate, rate * block, block, bits) + extra
    parts = b"WAVEfmt " + struct.pack("<I", len(header)) + header
    parts += b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


def decoded(file: bytes, most: int = 1000) -> Array:
    (samples,) = decode(np.array([[file]], object), 16_000, most=most)
    return samples


def whole(bits: int) -> bytes:
    """Return the sound as integers of 16, 24 or 32 bits."""
    numbers = np.round(SOUND * 2.0 ** (bits - 1)).astype("<i4").reshape(-1, 1)
    return numbers.view(np.uint8)[:, : bits // 8].tobytes()


FILES = {
    "8 bits": (wav(np.round(SOUND * 128 + 128).astype(np.uint8).tobytes(), bits=8), 1e-2),
    "16 bits": (wav(whole(16)), 1e-4),
    "24 bits": (wav(whole(24), bits=24), 1e-6),
    "32 bits": (wav(whole(32), bits=32), 1e-7),
    "floats": (wav(SOUND.astype("<f4").tobytes(), code=3, bits=32), 1e-7),
    "long header": (wav(SOUND.astype("<f4").tobytes(), code=0xFFFE, bits=32, extra=bytes(8) + b"\3\0"), 1e-7),
    "stereo": (wav(np.repeat(SOUND.astype("<f4"), 2).tobytes(), code=3, bits=32, channels=2), 1e-7),
}


@pytest.mark.parametrize(("file", "rounding"), FILES.values(), ids=FILES)
def test_a_file_becomes_its_samples(file: bytes, rounding: float) -> None:
    """All common formats give the same sound, except for rounding."""
    samples = decoded(file)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, SOUND, atol=rounding)


BAD = {
    "another format": (b"OggS" + bytes(100), "sound 0 is not a WAV file"),
    "cut off": (wav(whole(16))[:-1], "it ends within its part b'data'"),
    "empty": (wav(b""), "it has no header or no samples"),
    "another rate": (wav(whole(16), rate=44_100), "has 44100 samples per second; send 16000"),
    "many channels": (wav(whole(16), channels=9), "is damaged: it has 9 channels"),
    "no channels": (wav(whole(16), channels=0), "is damaged: it has 0 channels"),
    "compressed": (wav(whole(16), code=2), "samples of format 2 with 16 bits"),
    "no numbers": (wav(np.full(4, np.nan, "<f4").tobytes(), code=3, bits=32), "not finite numbers"),
    "too long": (wav(bytes(4000)), "has 2000 samples; the model reads at most 1000"),
    "no bits": (wav(whole(16), bits=0), "is damaged: it has 1 channels, and blocks of 0 bytes"),
    "beyond 32 bits": (wav(np.full(4, 1e300, "<f8").tobytes(), code=3, bits=64), "not finite numbers of 32"),
    "infinite mean": (
        wav(np.full(4, 1.7e308).tobytes(), code=3, bits=64, channels=2),
        "not finite numbers of 32",
    ),
    "many parts": (
        b"RIFF\0\0\0\0WAVE" + b"JUNK\0\0\0\0" * 1000 + wav(whole(16))[12:],
        "no header or no samples",
    ),
    "a huge part": (b"RIFF\0\0\0\0WAVEdata" + struct.pack("<I", 2**32 - 1), "it ends within its part"),
}


@pytest.mark.parametrize(("file", "reason"), BAD.values(), ids=BAD)
def test_a_damaged_file_is_the_clients_mistake(file: bytes, reason: str) -> None:
    """A file that is not a sound, or that is too long, is refused, and the error names its row."""
    with pytest.raises(BadInput, match=reason):
        decoded(file)


def test_sounds_are_padded_to_the_smallest_length() -> None:
    """Each sound is normalised alone, and zeros follow it. Too short and too long sounds are refused."""
    padded = pad([np.array([1, 3], np.float32), np.ones(5, np.float32)], [4, 8], least=2, normalise=True)
    assert padded.lengths.tolist() == [2, 5]
    assert padded.samples.shape == (2, 8)
    np.testing.assert_allclose(padded.samples[0], [-1, 1, 0, 0, 0, 0, 0, 0], atol=1e-6)
    for count, reason in ((1, "needs at least 2"), (9, "reads at most 8")):
        with pytest.raises(BadInput, match=f"sound 0 has {count} samples; the model {reason}"):
            pad([np.ones(count, np.float32)], [4, 8], least=2, normalise=False)


def test_frames_become_text() -> None:
    """Repeated tokens are one letter, unless a blank is between them. Frames after the end of the sound are ignored."""
    words = ["<pad>", "|", "A", "B"]
    frames = [2, 2, 0, 2, 1, 1, 3, 0, 3]
    logits = np.eye(4, dtype=np.float32)[[frames, [1, 3, 3, 1, 0, 0, 2, 2, 2]]]
    assert ctc(logits, np.array([9, 5]), words, blank=0) == ["AA BB", "B"]
    assert ctc(logits, np.array([0, 1]), words, blank=0) == ["", ""]
