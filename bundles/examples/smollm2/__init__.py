"""smollm2: a published language model of 135 million weights, which answers questions in a chat."""

from __future__ import annotations

import tempfile
from pathlib import Path

from examples.smollm2.network import NETWORK
from examples.smollm2.published import fetched
from rsrv_bundle.stateful import export_generative

BATCH_SIZES = (1, 4, 8)
#: Numbers of tokens that are read at once. The bundle has a variant for each.
CHUNKS = (1, 16, 128)
#: Maximum number of sequences on the device at once. Each takes 24 MB.
SLOTS = 8


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one. Fetches the weights."""
    published = fetched()
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "tokenizer.json")).write_text(published.tokenizer, encoding="utf-8")
        export_generative(
            NETWORK.apply,
            NETWORK.state(),
            published.weights,
            slots=SLOTS,
            context=NETWORK.context,
            max_tokens=128,
            stop=[published.stop],
            chunks=CHUNKS,
            batch_sizes=BATCH_SIZES,
            tokenizer=file,
            template=published.template,
            in_place=True,
            out_dir=out_dir,
            description="SmolLM2-135M-Instruct: answers to questions.",
            overwrite=True,
        )
