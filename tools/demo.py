"""`make demo`: run `rsrv serve --demo`, send requests with ordinary clients, and show what the server did with them.

    python tools/demo.py [--once]

The script classifies digits that the model has never seen. Several clients send one image per request at the same time, over
gRPC and HTTP. Then the script streams a text, shows how much memory fine-tunes save by sharing weights, and shows how models are
loaded and evicted if the weight budget is too small for all of them. The server runs until Ctrl-C. With --once, the server uses
free ports and ends after the requests.

The exit status is 0, or 1 if the server fails or an answer is wrong, or 130 if the demo is interrupted before its end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc

from examples.detector_scenes import scenes
from local_triton import EXEC_BOUND, LAUNCHER, LOOPBACK, free_ports
from rsrv.control import find
from rsrv.control.records import RuntimeRecords
from rsrv.control.v1 import control_pb2 as pb
from rsrv.serve import demo
from rsrv.text import amount
from rsrv.wire.socket import read_record

#: Folder with copies of the bundles, so that users can change them.
FOLDER = Path("build/demo")
LICENSE = Path(__file__).parents[1] / "LICENSE"
CLIENTS = 8
#: Last line of the start-up view.
SERVES = "Stop with Ctrl-C"
#: Number of images in a request to a fine-tune.
ROWS = 32
ROUNDS = 3
#: Minimum share of right answers.
REQUIRED = {"digits": 0.97, "unet": 0.7}
REQUIRED_FINE_TUNE = 0.92
#: Model that generates text. Its inputs and outputs are tokens, not strings, and each token is a byte of the text.
GENERATOR = "glossary_bytes"
#: Term that GENERATOR must define.
TERM = "Licensor"

Array = npt.NDArray[Any]
#: Sends a batch of images to a model, and returns one of its outputs.
Infer = Callable[[str, Array, str], Array]


class DemoServer:
    """A running `rsrv serve --demo`."""

    def __init__(self, process: subprocess.Popen[str], http: int, grpc: int, page: int, openai: int) -> None:
        self.process = process
        self.openai_url = f"{LOOPBACK}:{openai}"
        self.http_url, self.grpc_url = f"{LOOPBACK}:{http}", f"{LOOPBACK}:{grpc}"
        self.page = f"http://localhost:{page}/"

    def records(self) -> RuntimeRecords:
        """Return the records of the runtime and its models."""
        (pid,) = (
            record.server_pid
            for record in find.running()
            if self.process.pid in _ancestors(record.server_pid)
        )
        return RuntimeRecords().updated(pb.DeviceRecord.FromString(read_record(pid)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Return the exit status."""
    parser = argparse.ArgumentParser(description="Show what rsrv does with seven small models.")
    parser.add_argument("--once", action="store_true", help="end after the demonstration; on free ports")
    once = parser.parse_args(argv).once
    try:
        with tempfile.TemporaryDirectory() as made:
            folder, ports = (Path(made), free_ports(5)) if once else (FOLDER, (8000, 8001, 8002, 8004, 8005))
            with serving(folder, ports) as server:
                if server is None or not complete(server, folder / demo.BUNDLES):
                    return 1
                good = all(
                    [classify(server), stream(server), complete_text(server), share(server), evict(server)]
                )
                if not once:
                    step(f"live page: {server.page}; the server runs until Ctrl-C")
                    try:
                        return server.process.wait()
                    except KeyboardInterrupt:
                        print()
    except KeyboardInterrupt:
        return 130
    return 0 if good else 1


@contextmanager
def serving(folder: Path, ports: Sequence[int]) -> Iterator[DemoServer | None]:
    """Start the server, and show its lines. Yield None if it did not start. Stop it at the end."""
    http, grpc, metrics, page, openai = ports
    program = [str(Path(sys.executable).with_name("rsrv")), "serve", "--demo", f"--directory={folder}"]
    flags = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    step(f"rsrv serve --demo (models and log in {folder})")
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid())),
            *(*program, *flags, f"--tritonserver={LAUNCHER}"),
        ],
        env={
            **os.environ,
            "RSRV_METRICS__LISTEN": f"{LOOPBACK}:{page}",
            "RSRV_OPENAI__LISTEN": f"{LOOPBACK}:{openai}",
        },
        stdout=subprocess.PIPE,
        text=True,
        # Start the server in its own session, so that a Ctrl-C in the terminal reaches only this process. This process then
        # sends SIGINT to the server.
        start_new_session=True,
    )
    assert process.stdout is not None
    output = threading.Thread(target=sys.stdout.writelines, args=(process.stdout,))
    try:
        serves = False
        for line in process.stdout:
            print(line, end="", flush=True)
            if serves := line.startswith(SERVES):
                print(next(process.stdout, ""), end="", flush=True)
                break
        output.start()
        yield DemoServer(process, http, grpc, page, openai) if serves else None
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()


def step(title: str) -> None:
    """Print a headline."""
    print(f"== {title}", flush=True)


def complete(server: DemoServer, bundles: Path) -> bool:
    """Return whether all of the demo's models are served. If not, print what to do."""
    missing = {path.name for path in (demo.DATA / demo.BUNDLES).iterdir()} - server.records().models.keys()
    if missing:
        names = ", ".join(sorted(missing))
        print(
            f"{names}: not served. Remove {bundles}, and start again: the demo copies it then",
            file=sys.stderr,
        )
    return not missing


def classify(server: DemoServer) -> bool:
    """Send every held-out image over both protocols. Return whether enough answers are right."""
    images, labels = held_out(demo.MODEL)
    step(f"{len(images)} unseen digits, one a request, {CLIENTS} clients at once")
    shares = []
    for protocol, clients in (("gRPC", grpc_client), ("HTTP", http_client)):
        started = time.perf_counter()
        predicted = predict(clients, server, images)
        seconds = time.perf_counter() - started
        shares.append(float(np.mean(predicted == labels)))
        print(f"   {protocol}: {shares[-1]:.1%} right, {len(images) / seconds:.0f} requests/s", flush=True)
    model = server.records().models[demo.MODEL]
    sizes = {executable.size: executable.count for executable in model.executables}
    executions = ", ".join(f"{count} of batch size {size}" for size, count in sorted(sizes.items()) if count)
    print(f"   {2 * len(images)} requests took {model.dispatches} executions ({executions})")
    return right(demo.MODEL, min(shares), REQUIRED[demo.MODEL])


def stream(server: DemoServer) -> bool:
    """Show a text while its tokens arrive. Return whether it is the license's text."""
    step(f"{GENERATOR} defines {TERM}, a token at a time")
    print(f"   {TERM} ", end="")
    text = ""
    last: dict[str, Any] = {}
    for last in tokens(server, TERM):
        text += (piece := bytes(last["tokens"]).decode())
        print(piece, end="", flush=True)
    first_ms, each_ms = (1e3 * last[name] for name in ("first_token_s", "token_s"))
    print(
        f"\n   {last['completion_tokens']} tokens: the first after {first_ms:.1f} ms, then one in {each_ms:.1f} ms"
    )
    known = f'"{TERM}" {text}' in " ".join(LICENSE.read_text().split())
    return right(GENERATOR, float(known and text.endswith(".")), 1.0)  # The text must be a whole sentence.


def tokens(server: DemoServer, term: str, **parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of an answer over HTTP, as curl shows them. The last part has the figures of the answer."""
    connection = http.client.HTTPConnection(server.http_url, timeout=30)
    body = {"tokens": list(f'"{term}" '.encode()), **parameters}
    connection.request("POST", f"/v2/models/{GENERATOR}/generate_stream", json.dumps(body))
    try:
        for line in filter(bytes.strip, connection.getresponse()):
            part = json.loads(line.removeprefix(b"data: "))
            if "error" in part:
                raise RuntimeError(f"{GENERATOR}: {part['error']}")
            yield {**part, "tokens": np.atleast_1d(part["tokens"]).tolist()}
    finally:
        connection.close()


def complete_text(server: DemoServer) -> bool:
    """Request the same text as `stream` at the OpenAI endpoint. Return True if it is the license's text."""
    step(f"the same at http://{server.openai_url}/v1/completions, as for OpenAI's clients")
    body = {"model": GENERATOR, "prompt": f'"{TERM}" ', "stream": True}
    print(f"   {json.dumps(body)}\n   {TERM} ", end="")
    connection = http.client.HTTPConnection(server.openai_url, timeout=30)
    for _ in range(100):  # The process of the OpenAI endpoints starts concurrently with the server.
        with suppress(ConnectionRefusedError):
            connection.connect()
            break
        time.sleep(0.1)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    text = ""
    try:
        for line in filter(bytes.strip, connection.getresponse()):
            data = line.removeprefix(b"data: ").strip()
            if data.startswith(b"{"):
                text += (piece := json.loads(data)["choices"][0]["text"])
                print(piece, end="", flush=True)
    finally:
        connection.close()
    print()
    known = f'"{TERM}" {text}' in " ".join(LICENSE.read_text().split())
    return right(GENERATOR, float(known and text.endswith(".")), 1.0)


def share(server: DemoServer) -> bool:
    """Send requests to all fine-tunes, and show how much memory their weights take. Return whether enough answers are right."""
    names = [name for name in server.records().models if name.startswith("family_")]
    step(f"{len(names)} fine-tunes of the same network")
    good = True
    with grpc_client(server) as infer:
        for name in sorted(names):
            images, answers = held_out(name)
            batches = [infer(name, images[at : at + ROWS], "class") for at in range(0, len(images), ROWS)]
            accuracy = float(np.mean(np.concatenate(batches)[:, 0] == answers))
            good &= right(name, accuracy, REQUIRED_FINE_TUNE)
            print(f"   {name}: {accuracy:.1%} right", flush=True)
    memory = server.records().device.memory
    apart, taken = memory.logical_bytes, memory.physical_bytes
    print(f"   weights on the device: {amount(taken)}; {amount(apart)} if nothing were shared")
    return good


def evict(server: DemoServer) -> bool:
    """Send requests to all models in turn. Return whether weights were evicted and enough of the unet's answers are right."""
    known = scenes(ROWS, seed=0)
    before = server.records()
    names = sorted(before.models)
    step(f"{len(names)} models in turn, {ROUNDS} times, within {amount(before.device.memory.budget_bytes)}")
    good = True
    with grpc_client(server) as infer:
        for _ in range(ROUNDS):
            for name in names:
                if name == "unet":
                    predicted, there = infer(name, known.images, "logits") > 0, known.pixels != 0
                    good &= right(
                        name, float((predicted & there).sum() / (predicted | there).sum()), REQUIRED[name]
                    )
                elif name == GENERATOR:
                    list(tokens(server, TERM, max_tokens=1))
                else:
                    infer(name, held_out(name)[0][:ROWS], "class")
    after = server.records().models
    evictions = {name: sum(after[name].evictions.values()) for name in names}
    for name in names:
        print(f"   {name}: loaded {after[name].loads} times, evicted {evictions[name]} times")
    return good and any(evictions.values())


def right(name: str, accuracy: float, required: float) -> bool:
    """Return whether enough answers are right. If not, print an error."""
    if accuracy < required:
        print(f"   WRONG: {name} must have {required:.0%} right, and has {accuracy:.1%}", file=sys.stderr)
    return accuracy >= required


def held_out(model: str) -> tuple[Array, Array]:
    """Return images that no model was trained on, f32 [n, 8, 8, 1], and a model's right answers to them."""
    with np.load(demo.DATA / demo.HELD_OUT) as data:
        return (data["images"] / 16).astype(np.float32), data[model].astype(np.int64)


def predict(clients: Callable[[DemoServer], Any], server: DemoServer, images: Array) -> Array:
    """Return the server's digit for each image. Several clients send requests at the same time."""

    def work(share: Array) -> list[int]:
        with clients(server) as infer:
            return [int(infer(demo.MODEL, image[np.newaxis], "class").item()) for image in share]

    with ThreadPoolExecutor(CLIENTS) as pool:
        shares = pool.map(work, np.array_split(images, CLIENTS))
        return np.array([digit for share in shares for digit in share])


@contextmanager
def grpc_client(server: DemoServer) -> Iterator[Infer]:
    """Yield a function that sends requests over gRPC with tritonclient."""
    client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

    def infer(model: str, image: Array, output: str) -> Array:
        datatype = "UINT8" if image.dtype == np.uint8 else "FP32"
        tensor = tritonclient.grpc.InferInput("image", list(image.shape), datatype)
        tensor.set_data_from_numpy(image)
        answer: Array = client.infer(model, [tensor]).as_numpy(output)
        return answer

    try:
        yield infer
    finally:
        client.close()


@contextmanager
def http_client(server: DemoServer) -> Iterator[Infer]:
    """Yield a function that sends requests over HTTP with JSON, as curl would."""
    connection = http.client.HTTPConnection(server.http_url, timeout=30)

    def infer(model: str, image: Array, output: str) -> Array:
        tensor = {"name": "image", "datatype": "FP32", "shape": image.shape, "data": image.ravel().tolist()}
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
        outputs = json.load(connection.getresponse())["outputs"]
        (array,) = (candidate for candidate in outputs if candidate["name"] == output)
        return np.array(array["data"]).reshape(array["shape"])

    try:
        yield infer
    finally:
        connection.close()


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the process, its parent, and so on."""
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    sys.exit(main())
