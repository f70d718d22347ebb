"""A model without a server, in a separate process: rows per second in eager PyTorch, or compiled as in its bundle.

    python -m tests.bench.real.direct eager|compiled MODEL FOLDER ROWS...

First, the process prints which of the ROWS the model can execute in one call. For each line `ROWS SECONDS` of its input, it calls
the model for this time, and prints the rate.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from examples.resnet18 import hooks
from tests.bench.real.cases import CASES, Arrays

Run = Callable[[], Any]


def eager(name: str, folder: Path, request: Arrays) -> Run | None:
    """Return a function that computes with the same architecture in eager PyTorch, on all cores.

    It includes all steps from the client's input to the client's output. Return None if there is no such network.
    """
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    torch.set_grad_enabled(False)
    match name:
        case "resnet18":
            from examples import resnet18

            network = resnet18.source()

            def classify() -> Any:
                image = torch.from_numpy(hooks.preprocess(request)["image"])
                return hooks.postprocess({"logits": network(image).numpy()})

            return classify
        case "vit_tiny":
            return _vit(torch.from_numpy(request["image"]))
        case "minilm":
            return _bert(folder, request)
        case _:
            from tests.bench.real.twins import TWINS, weights_of

            if (twin := TWINS.get(name.partition("_")[0])) is None:
                return None
            weights = weights_of(folder / name)
            (batch,) = map(torch.from_numpy, request.values())
            return lambda: twin(weights, batch).numpy()


def _vit(image: Any) -> Run:
    from transformers import ViTConfig, ViTForImageClassification

    from examples.vit.network import CLASSES, HEADS, LAYERS, PATCH, SIDE, WIDTH

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=SIDE,
        patch_size=PATCH,
        id2label={number: str(number) for number in range(CLASSES)},
    )
    network: Any = ViTForImageClassification(config)
    network.eval()
    pixels = image.permute(0, 3, 1, 2).contiguous()
    return lambda: network(pixel_values=pixels).logits.numpy()


def _bert(folder: Path, request: Arrays) -> Run:
    """Return a function with tokenizer, encoder and mean. The tokenizer and the weights are the bundles' own."""
    import torch
    from transformers import BertConfig, BertModel

    from examples.minilm_encoder import LENGTHS
    from rsrv.hooks.text import Tokeniser
    from rsrv_bundle import load_weights, read_bundle

    bundle = read_bundle(folder / "minilm_encoder", digest=False)
    state = {
        weight.name: torch.from_numpy(np.array(array))
        for weight, array in zip(bundle.weights, load_weights(bundle), strict=True)
    }
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    network: Any = BertModel(config, add_pooling_layer=False)
    network.eval()
    if unknown := network.load_state_dict(state, strict=False).unexpected_keys:
        raise ValueError(f"weights that BertModel does not know: {unknown}")
    tokenise = Tokeniser(folder / "minilm" / "tokenizer.json", LENGTHS)

    def embed() -> Any:
        tokens = tokenise(request["text"])
        ids, mask = (torch.from_numpy(each.astype(np.int64)) for each in (tokens.ids, tokens.mask))
        hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean).numpy()

    return embed


def compiled(name: str, folder: Path, request: Arrays) -> Run | None:
    """Return a function with the bundle's module and hooks. It has no batching, scheduling or transport. Return None for a meta model."""
    from tests.examples.built import Model

    model = Model(folder / name)
    if model.bundle.manifest.meta_calls:
        return None
    if name == "resnet18":
        return lambda: hooks.postprocess(model(hooks.preprocess(request)))
    return lambda: model(request)


def rate(run: Run, rows: int, seconds: float) -> float:
    """Return rows per second of successive calls. The first call is not counted."""
    run()
    calls, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        run()
        calls += 1
    return calls * rows / passed


def main() -> None:
    """Print the possible numbers of rows, and then the requested rates."""
    how, name, folder, *sizes = sys.argv[1:]
    start = {"eager": eager, "compiled": compiled}[how]
    runs = {rows: start(name, Path(folder), CASES[name].inputs(rows)) for rows in map(int, sizes)}
    there = {rows: run for rows, run in runs.items() if run is not None}
    for run in there.values():
        for _ in range(3):
            run()
    print(*there, flush=True)
    for line in sys.stdin:
        rows, seconds = line.split()
        print(rate(there[int(rows)], int(rows), float(seconds)), flush=True)


if __name__ == "__main__":
    main()
