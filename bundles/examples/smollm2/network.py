"""The network of SmolLM2-135M: a Llama of 30 blocks, which keeps keys and values of its sequences in pools."""

from __future__ import annotations

import numpy as np

from rsrv_bundle.hf.decoder import Decoder

#: Number of values in a head.
HEAD = 64
_ROPE_BASE = 100_000.0

NETWORK = Decoder(
    layers=30,
    heads=9,
    kv_heads=3,
    head=HEAD,
    # The weights were trained on up to 8,192 tokens.
    context=512,
    epsilon=1e-5,
    frequencies=(_ROPE_BASE ** (-np.arange(0, HEAD, 2, dtype=np.float32) / HEAD)).astype(np.float32),
)
