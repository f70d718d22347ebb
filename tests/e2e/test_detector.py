"""The two-stage detector through the real server: it finds what is there, one image or many a request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from examples import detector
from examples.detector_scenes import SIDE, recall_and_precision
from tests.e2e.calls import PROTOCOLS, Arrays, Caller, at_once, caller
from tests.e2e.harness import RunningTriton


def in_batches(
    images: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], sizes: Iterator[int]
) -> Iterator[Arrays]:
    at = 0
    while at < len(images):
        size = next(sizes)
        yield {"image": images[at : at + size]}
        at += size


def ask(call: Caller, requests: list[Arrays]) -> Arrays:
    """The answers of some requests, put together."""
    answers = [call("detector", request) for request in requests]
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_it_finds_the_shapes_in_unseen_images(triton: RunningTriton, protocol: str) -> None:
    """Recall and precision as its maker measured them, for requests of 1 to 20 images, of several clients at once."""
    known = detector.held_out()
    rng = np.random.default_rng(5)
    requests = list(in_batches(known.images, iter(lambda: int(rng.integers(1, 21)), 0)))
    shares = [requests[start::4] for start in range(4)]

    parts = at_once(triton, 4, lambda call, number: ask(call, shares[number]), protocol)

    order = np.concatenate(
        [
            np.concatenate([starts(requests)[start::4][i] for i in range(len(shares[start]))])
            for start in range(4)
        ]
    )
    found = {name: np.empty_like(np.concatenate([part[name] for part in parts])) for name in parts[0]}
    for name, values in found.items():
        values[order] = np.concatenate([part[name] for part in parts])
    recall, precision = recall_and_precision(known, found)
    assert recall >= detector.REQUIRED_RECALL
    assert precision >= detector.REQUIRED_PRECISION


def starts(requests: list[Arrays]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.intp]]]:
    """The images' numbers of each request."""
    ends = np.cumsum([len(request["image"]) for request in requests])
    return [np.arange(end - len(request["image"]), end) for end, request in zip(ends, requests, strict=True)]


def test_an_image_has_one_answer_whatever_comes_with_it(triton: RunningTriton) -> None:
    """Alone and among others, with nothing in it or with much."""
    known = detector.held_out()
    images = np.concatenate([np.full((1, SIDE, SIDE, 3), 128, np.uint8), known.images[:6]])
    with caller(triton) as call:
        together = call("detector", {"image": images})
        for number, image in enumerate(images):
            alone = call("detector", {"image": image[np.newaxis]})
            assert alone["count"][0] == together["count"][number]
            np.testing.assert_array_equal(alone["classes"][0], together["classes"][number])
            np.testing.assert_allclose(alone["boxes"][0], together["boxes"][number], atol=1e-3)
            np.testing.assert_allclose(alone["scores"][0], together["scores"][number], atol=1e-4)
    assert together["count"][0] == 0
