"""`make demo`: the example bundles in a real tritonserver, and standard clients that use them.

Builds the bundles, generates the repository, starts the server, and classifies handwritten digits that the model
has never seen, one image a request from several clients at once, over gRPC and over HTTP. Then a chain of models turns
sentences into embeddings.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http

import example_bundles
from examples import digits
from examples.build import SMALL
from local_triton import LOOPBACK, ServerFailed, TritonServer, free_ports
from rsrv.hooks.text import as_text
from rsrv.serve.triton_install import InstallError
from rsrv.wire.socket import read_status
from rsrv_gen import cli as rsrv_gen

ROOT = Path(__file__).resolve().parent.parent
MODEL = "digits"
#: output with the digit; the model's hooks make it from the network's ten numbers
OUTPUT = "class"
CLIENTS = 8
#: flags for a server that follows changes of the bundles
FOLLOW = ("--model-control-mode=explicit", "--load-model=*")

TEXT_MODEL = "minilm"
TEXT_STAGES = ("tokeniser", "encoder", "pooling")
#: From the quick start of Sentence Transformers, with the cosines that it prints.
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
PUBLISHED = (0.6660, 0.1046)

Array = npt.NDArray[Any]


def main() -> int:
    """Run the demo; return the exit status."""
    step("example bundles")
    bundles = example_bundles.ensure(SMALL)
    step("rsrv-gen: bundles to a Triton model repository")
    repository = ROOT / "gen"
    sources = [str(bundles / name) for name in SMALL]
    if rsrv_gen.main([*sources, "-o", str(repository), "--prune"]) != 0:
        return 1
    log_path = ROOT / "build" / "demo.log"
    log_path.unlink(missing_ok=True)
    page = f"{LOOPBACK}:{free_ports(1)[0]}"
    step(f"tritonserver on {repository.name}/ (its log: {log_path.relative_to(ROOT)})")
    started = time.monotonic()
    try:
        env = {"RSRV_METRICS__LISTEN": page}
        with TritonServer(repository, log_path=log_path, extra_args=FOLLOW, env=env) as server:
            server.wait_ready(timeout=600, progress=lambda model: print(f"   loaded {model}", flush=True))
            print(
                f"   ready after {time.monotonic() - started:.1f} s; live page until it stops: http://{page}/"
            )
            good = classify(server) and compare(server)
            step("stopping tritonserver")
    except (ServerFailed, InstallError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    step("live page, while `make serve` runs: http://localhost:8004/")
    return 0 if good else 1


def step(title: str) -> None:
    """Print a headline."""
    print(f"== {title}", flush=True)


def classify(server: TritonServer) -> bool:
    """Send every held-out image over both protocols; return whether enough answers are right."""
    images, labels = digits.held_out()
    client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    metadata = client.get_model_metadata(MODEL, as_json=True)
    client.close()
    step(f"{len(images)} unseen images, one a request, {CLIENTS} clients at once")
    accuracies = []
    for protocol, library, url in (
        ("gRPC", tritonclient.grpc, server.grpc_url),
        ("HTTP", tritonclient.http, server.http_url),
    ):
        started = time.perf_counter()
        predicted = predict(library, url, metadata, images)
        seconds = time.perf_counter() - started
        accuracies.append(float(np.mean(predicted == labels)))
        print(f"   {protocol}: accuracy {accuracies[-1]:.4f}, {len(images) / seconds:.0f} requests/s")
    print(f"   executions by compiled batch size: {batch_sizes_seen(server)}")
    show_curl(server, metadata, images[0], int(labels[0]))
    good = min(accuracies) >= digits.REQUIRED_ACCURACY and len(set(accuracies)) == 1
    if not good:
        print(
            f"   WRONG: both accuracies must be the same, and at least {digits.REQUIRED_ACCURACY}",
            file=sys.stderr,
        )
    return good


def compare(server: TritonServer) -> bool:
    """Send sentences to a meta model, text to embeddings; return whether the cosines are the published ones."""
    step(
        f"sentences to embeddings, by a chain of models that clients see as one ({' -> '.join(TEXT_STAGES)})"
    )
    client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    text = as_text(SENTENCES)
    tensor = tritonclient.grpc.InferInput("text", list(text.shape), "UINT8")
    tensor.set_data_from_numpy(text)
    embeddings = client.infer(TEXT_MODEL, [tensor]).as_numpy("embedding")
    client.close()
    cosines = embeddings @ embeddings.T
    for sentence, cosine in zip(SENTENCES[1:], cosines[0, 1:], strict=True):
        print(f"   {cosine:.4f}  {SENTENCES[0]!r} and {sentence!r}")
    good = bool(np.allclose(cosines[0, 1:], PUBLISHED, atol=1e-3))
    if not good:
        print(f"   WRONG: their authors say {PUBLISHED}", file=sys.stderr)
    return good


def predict(library: ModuleType, url: str, metadata: dict[str, Any], images: Array) -> Array:
    """Return the server's digit for each image. `library` is tritonclient's module for the protocol."""
    wire = metadata["inputs"][0]

    def work(share: Array) -> list[int]:
        # A client for each thread: threads must not share an HTTP client.
        client = library.InferenceServerClient(url)
        try:
            return [one(client.infer, image) for image in share]
        finally:
            client.close()

    def one(infer: Callable[..., Any], image: Array) -> int:
        tensor = library.InferInput(wire["name"], [1, *image.shape], wire["datatype"])
        tensor.set_data_from_numpy(image[np.newaxis])
        return int(infer(MODEL, [tensor]).as_numpy(OUTPUT).item())

    with ThreadPoolExecutor(CLIENTS) as pool:
        shares = pool.map(work, np.array_split(images, CLIENTS))
        return np.array([digit for share in shares for digit in share])


def batch_sizes_seen(server: TritonServer) -> str:
    """Print the executions of each compiled size, and the mean number of requests in one."""
    model = read_status(server.pid)["models"][MODEL]
    sizes = {int(size.partition("/")[2]): count for size, count in model["sizes"].items()}
    shown = ", ".join(f"{size} x {count}" for size, count in sorted(sizes.items()))
    return f"{shown} ({model['useful_rows'] / model['dispatches']:.1f} rows each on average)"


def show_curl(server: TritonServer, metadata: dict[str, Any], image: Array, label: int) -> None:
    """Send a request, and print it as a command to copy."""
    wire = metadata["inputs"][0]
    shape = [1, *image.shape]
    tensor = {
        "name": wire["name"],
        "datatype": wire["datatype"],
        "shape": shape,
        "data": image.ravel().tolist(),
    }
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":"))
    path = f"/v2/models/{MODEL}/infer"
    connection = http.client.HTTPConnection(server.http_url, timeout=30)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse().read().decode()
    connection.close()
    step(f"the same with curl, while `make serve` runs (this image shows a {label})")
    print(f"curl -s localhost:8000{path} -H 'Content-Type: application/json' -d '{body}'")
    print(answer)


if __name__ == "__main__":
    sys.exit(main())
