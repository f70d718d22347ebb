"""Part `comparison`: a model that rsrv serves beside a plain Triton model with the same modules, on one tritonserver."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.gpu.runtimes import in_threads
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
    """Ask both models with 1 and 16 clients, one side after the other."""
    try:
        tritonserver = find_tritonserver(None, lambda question: False)
    except ServeError:
        reason = "no tritonserver was found on PATH: `rsrv triton install` installs one, NVIDIA's container has one"
        tell(Finding("rsrv beside a plain model", "SKIPPED", reason=reason))
        return
    rng = np.random.default_rng(1)
    bundle, x = given.folder / "bundles" / "served", rng.standard_normal((1, _WIDTH)).astype(np.float32)
    bundle.parent.mkdir()
    params = {"w": rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32)}
    export_bundle(
        lambda params, x: {"y": x @ params["w"]}, params, {"x": x}, batch_sizes=_SIZES, out_dir=bundle
    )
    with _serving(given, tritonserver) as address:
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
            both = {model: _ask(client, model, x) for model in ("served", "plain")}
        _, apart = difference(both["served"], both["plain"])
        limit = TOLERANCE["f32"]
        tell(check("both answer alike", apart <= limit, f"error {apart:.2g}", f"at most {limit:g}"))
        for count in _CLIENTS:
            seconds = given.amounts.comparison_s
            took = {model: _load(address, model, x, count, seconds) for model in ("plain", "served")}
            p50 = {model: median(found) for model, found in took.items()}
            per_s = {model: len(found) / seconds for model, found in took.items()}
            ratio = per_s["served"] / per_s["plain"]
            tell(
                Finding(
                    f"{count} clients" if count > 1 else "1 client",
                    "MEASURED",
                    f"rsrv answers {ratio:.2f} times as many",
                    f"rsrv {rate(per_s['served'])}, p50 {duration(p50['served'])}; "
                    f"plain {rate(per_s['plain'])}, p50 {duration(p50['plain'])}",
                    {"ratio": ratio, "rsrv_p50_s": p50["served"], "plain_p50_s": p50["plain"]},
                )
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
def _serving(given: PartInput, tritonserver: str) -> Iterator[str]:
    """Run `rsrv serve` until the block ends; yield the address for gRPC."""
    config = given.folder / "serve.yaml"
    # The plain model needs the other half of the device.
    write_manifest(config, {"runtime": {"memory_fraction": 0.4}, "metrics": {"listen": None}})
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
        _wait(process, address)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: "subprocess.Popen[bytes]", address: str) -> None:
    end = time.monotonic() + _START_S
    with InferenceServerClient(address) as client:
        while process.poll() is None and time.monotonic() < end:
            with suppress(InferenceServerException):
                if client.is_model_ready("served"):
                    return
            time.sleep(0.2)
    raise TimeoutError("rsrv serve does not serve the model; its output is above")
