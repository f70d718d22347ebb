"""minilm: a meta model that computes embeddings of sentences with minilm_encoder and minilm_pool."""

from __future__ import annotations

import json
from pathlib import Path

from examples import minilm_files
from examples.minilm_encoder import LENGTHS, WIDTH
from rsrv_bundle.meta import write_meta_bundle


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one."""
    write_meta_bundle(
        # Pass the path, because importing the file needs the package tokenizers, which need not be installed where bundles
        # are built.
        Path(__file__).with_name("minilm_run.py"),
        calls=["minilm_encoder", "minilm_pool"],
        client_inputs=[{"name": "text", "dtype": "bytes", "shape": "n"}],
        client_outputs=[{"name": "embedding", "dtype": "f32", "shape": "ne", "dims": {"e": WIDTH}}],
        files={"tokenizer.json": minilm_files.fetched().tokenizer, "lengths.json": json.dumps(LENGTHS)},
        task={
            "kind": "feature-extraction",
            "inputs": {"text": "text"},
            "outputs": {"embedding": "embedding"},
        },
        out_dir=out_dir,
        description="Sentences to embeddings (all-MiniLM-L6-v2).",
        overwrite=True,
    )
