"""Conversion of scores of tokens to named entities and to words for a mask, in the form of transformers' pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.hooks.text import Tokeniser

Array = npt.NDArray[Any]


def entities(
    scores: Array, ids: Array, starts: Array, ends: Array, labels: Sequence[str], tokeniser: Tokeniser
) -> list[list[dict[str, Any]]]:
    """Group neighbouring tokens with the same label in each row, as the aggregation strategy `simple` of transformers does.

    scores: [n, l, labels], probabilities. ids, starts, ends: [n, l] of `Tokeniser` with spans. A label may begin with `B-`,
    which begins an entity, or `I-`. The label `O` is left out.
    """
    best, most = scores.argmax(-1), scores.max(-1)
    return [
        [
            {
                "entity_group": label,
                "score": float(np.mean([most[row, place] for place in places])),
                "word": tokeniser.words([int(ids[row, place]) for place in places]),
                "start": int(starts[row, places[0]]),
                "end": int(ends[row, places[-1]]),
            }
            for label, places in _groups(best[row], starts[row], labels)
            if label != "O"
        ]
        for row in range(len(ids))
    ]


def _groups(best: Array, starts: Array, labels: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the label and the places of each group of a row's tokens. Special tokens and padding are left out."""
    groups: list[tuple[str, list[int]]] = []
    last = None
    for place in np.flatnonzero(starts >= 0).tolist():
        label = labels[best[place]]
        tag = label[2:] if label.startswith(("B-", "I-")) else label
        if groups and tag == last and not label.startswith("B-"):
            groups[-1][1].append(place)
        else:
            # Like the pipeline, name a group by the text after the first hyphen of the label.
            groups.append((label.partition("-")[2] or label, [place]))
        last = tag
    return groups


def candidates(
    scores: Array, tokens: Array, ids: Array, mask: Array, mask_id: int, tokeniser: Tokeniser
) -> list[list[dict[str, Any]]]:
    """Return the likeliest tokens for the place of each row's mask, each with the row's text after the token replaces the mask.

    scores, tokens: [n, k], best first. ids, mask: [n, l] of `Tokeniser`.
    """
    rows = []
    for row in range(len(ids)):
        text = ids[row, : int(mask[row].sum())]
        rows.append(
            [
                {
                    "score": float(score),
                    "token": int(token),
                    "token_str": tokeniser.decode([int(token)], skip_special=False),
                    "sequence": tokeniser.decode(np.where(text == mask_id, token, text).tolist()),
                }
                for score, token in zip(scores[row], tokens[row], strict=True)
            ]
        )
    return rows
