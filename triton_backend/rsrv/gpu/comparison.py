"""Part `comparison`: a model that rsrv serves, with each front, beside a plain Triton model with the same modules."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.gpu.runtimes import in_threads
from rsrv.native import LIBRARY
from rsrv.runtime.device import Array
from rsrv.serve.command import find_tritonserver
from rsrv.serve.plan import REPOSITORY, ServeError
from rsrv.text import duration, rate
from rsrv_bundle.export import export_bundle
from rsrv_bundle.numerics import TOLERANCE, difference
from rsrv_bundle.writer import write_manifest

_PLAIN = Path(__file__).with_name("plain_model.py")
_SIZES, _WIDTH, _CLIENTS = (1, 4, 8, 16, 32), 256, (1, 16)
#: seconds for a server with its models, and for its end
_START_S, _END_S = 180.0, 40.0
_CONFIG = """\
backend: "python"
max_batch_size: {largest}
dynamic_batching {{}}
input [{{ name: "x", data_type: TYPE_FP32, dims: [{width}] }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [{width}] }}]
instance_group [{{ kind: KIND_CPU, count: 1 }}]
parameters {{ key: "bundle", value: {{ string_value: "{bundle}" }} }}
parameters {{ key: "platform", value: {{ string_value: "{platform}" }} }}
"""


def comparison(given: PartInput, tell: Tell) -> None:
    """Ask the models with 1 and 16 clients, one after the other, on one tritonserver."""
    try:
        tritonserver = find_tritonserver(None, lambda question: False)
    except ServeError:
        reason = "no tritonserver was found on PATH: `rsrv triton install` installs one, NVIDIA's container has one"
        tell(Finding("rsrv beside a plain model", "SKIPPED", reason=reason))
        return
    rng = np.random.default_rng(1)
    # An installation without the library has the Python front alone.
    fronts = ("python", "native") if LIBRARY.is_file() else ("python",)
    bundle, x = given.folder / "bundles" / fronts[0], rng.standard_normal((1, _WIDTH)).astype(np.float32)
    bundle.parent.mkdir()
    params = {"w": rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32)}
    export_bundle(
        lambda params, x: {"y": x @ params["w"]}, params, {"x": x}, batch_sizes=_SIZES, out_dir=bundle
    )
    for front in fronts[1:]:
        shutil.copytree(bundle, bundle.with_name(front))
    with _serving(given, tritonserver, fronts) as address:
        plain = given.folder / "serve" / REPOSITORY / "plain"
        (plain / "1").mkdir(parents=True)
        shutil.copyfile(_PLAIN, plain / "1" / "model.py")
        platform = given.device.platform
        (plain / "config.pbtxt").write_text(
            _CONFIG.format(largest=max(_SIZES), width=_WIDTH, bundle=bundle, platform=platform)
            + _environment(Path(sys.prefix))
        )
        with InferenceServerClient(address) as client:
            client.load_model("plain")
            found = {model: _ask(client, model, x) for model in ("plain", *fronts)}
        apart = max(difference(found[front], found["plain"])[1] for front in fronts)
        limit = TOLERANCE["f32"]
        tell(check("all answer alike", apart <= limit, f"error {apart:.2g}", f"at most {limit:g}"))
        for count in _CLIENTS:
            seconds = given.amounts.comparison_s
            took = {model: _load(address, model, x, count, seconds) for model in ("plain", *fronts)}
            for front in fronts:
                what = f"{front} front, {count} clients" if count > 1 else f"{front} front, 1 client"
                tell(_compare(what, took[front], took["plain"], seconds))


def _compare(what: str, served: list[float], plain: list[float], seconds: float) -> Finding:
    per_s, plain_per_s = len(served) / seconds, len(plain) / seconds
    ratio, p50, plain_p50 = per_s / plain_per_s, median(served), median(plain)
    return Finding(
        what,
        "MEASURED",
        f"rsrv answers {ratio:.2f} times as many",
        f"rsrv {rate(per_s)}, p50 {duration(p50)}; plain {rate(plain_per_s)}, p50 {duration(plain_p50)}",
        {"ratio": ratio, "rsrv_p50_s": p50, "plain_p50_s": plain_p50},
    )


def _environment(prefix: Path) -> str:
    """Return the parameter by which Triton's stub imports from this environment, which has jax; its own has not.

    Without a virtual environment the stub runs on the first python3 of PATH, as the server does.
    """
    if not (prefix / "bin" / "activate").is_file():
        return ""
    return f'parameters {{ key: "EXECUTION_ENV_PATH", value: {{ string_value: "{prefix}" }} }}\n'


def _ask(client: InferenceServerClient, model: str, x: Array) -> Array:
    tensor = InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    found: Array = client.infer(model, [tensor]).as_numpy("y")
    return found


def _load(address: str, model: str, x: Array, count: int, seconds: float) -> list[float]:
    """Return the seconds of each request of so many clients. The first ones are not counted."""
    took: list[float] = []
    with ExitStack() as stack:
        clients = [stack.enter_context(InferenceServerClient(address)) for _ in range(count)]
        for client in clients:
            _ask(client, model, x)
        end = time.perf_counter() + seconds

        def work(number: int) -> None:
            while (started := time.perf_counter()) < end:
                _ask(clients[number], model, x)
                took.append(time.perf_counter() - started)

        in_threads(count, work)
    return took


@contextmanager
def _serving(given: PartInput, tritonserver: str, fronts: Sequence[str]) -> Iterator[str]:
    """Run `rsrv serve` until the block ends; yield the address for gRPC."""
    config = given.folder / "serve.yaml"
    settings = {
        # The plain model needs the other half of the device.
        "runtime": {"memory_fraction": 0.4},
        "metrics": {"listen": None},
        "models": {front: {"front": front} for front in fronts},
    }
    write_manifest(config, settings)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        http, grpc, metrics = (one.getsockname()[1] for one in sockets)
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "rsrv.cli.main", "serve", str(given.folder / "bundles")),
            *("--config", str(config), "--directory", str(given.folder / "serve")),
            *("--tritonserver", tritonserver, "--devices", "cpu" if given.on_cpu else "0"),
            *("--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)),
        ],
        env=given.environment,
        stdin=subprocess.DEVNULL,
    )
    try:
        address = f"127.0.0.1:{grpc}"
        _wait(process, address, fronts)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: "subprocess.Popen[bytes]", address: str, models: Sequence[str]) -> None:
    end = time.monotonic() + _START_S
    with InferenceServerClient(address) as client:
        while process.poll() is None and time.monotonic() < end:
            with suppress(InferenceServerException):
                if all(map(client.is_model_ready, models)):
                    return
            time.sleep(0.2)
    raise TimeoutError("rsrv serve does not serve the models; its output is above")
