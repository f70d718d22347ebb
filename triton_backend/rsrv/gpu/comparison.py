"""Part `comparison`: a model that rsrv serves, with each front, beside a plain Triton model with the same modules."""

import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from tritonclient.grpc import InferenceServerClient

from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.gpu.runtimes import in_threads
from rsrv.gpu.server import BUNDLES, ask, serving, tritonserver_for
from rsrv.native import LIBRARY
from rsrv.runtime.device import Array
from rsrv.text import duration, rate
from rsrv_bundle.export import export_bundle
from rsrv_bundle.numerics import TOLERANCE, difference

_PLAIN = Path(__file__).with_name("plain_model.py")
_SIZES, _WIDTH, _CLIENTS = (1, 4, 8, 16, 32), 256, (1, 16)
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
    if (tritonserver := tritonserver_for("rsrv beside a plain model", tell)) is None:
        return
    rng = np.random.default_rng(1)
    # An installation without the library has the Python front alone.
    fronts = ("python", "native") if LIBRARY.is_file() else ("python",)
    bundle, x = given.folder / BUNDLES / fronts[0], rng.standard_normal((1, _WIDTH)).astype(np.float32)
    bundle.parent.mkdir()
    params = {"w": rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32)}
    export_bundle(
        lambda params, x: {"y": x @ params["w"]}, params, {"x": x}, batch_sizes=_SIZES, out_dir=bundle
    )
    for front in fronts[1:]:
        shutil.copytree(bundle, bundle.with_name(front))
    settings = {
        # The plain model needs the other half of the device.
        "runtime": {"memory_fraction": 0.4},
        "models": {front: {"front": front} for front in fronts},
    }
    with serving(given, tritonserver, fronts, settings) as served:
        plain = served.repository / "plain"
        (plain / "1").mkdir(parents=True)
        shutil.copyfile(_PLAIN, plain / "1" / "model.py")
        platform = given.device.platform
        (plain / "config.pbtxt").write_text(
            _CONFIG.format(largest=max(_SIZES), width=_WIDTH, bundle=bundle, platform=platform)
            + _environment(Path(sys.prefix))
        )
        with InferenceServerClient(served.address) as client:
            client.load_model("plain")
            found = {model: ask(client, model, x) for model in ("plain", *fronts)}
        apart = max(difference(found[front], found["plain"])[1] for front in fronts)
        limit = TOLERANCE["f32"]
        tell(check("all answer alike", apart <= limit, f"error {apart:.2g}", f"at most {limit:g}"))
        for count in _CLIENTS:
            seconds = given.amounts.comparison_s
            took = {model: _load(served.address, model, x, count, seconds) for model in ("plain", *fronts)}
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


def _load(address: str, model: str, x: Array, count: int, seconds: float) -> list[float]:
    """Return the seconds of each request of so many clients. The first ones are not counted."""
    took: list[float] = []
    with ExitStack() as stack:
        clients = [stack.enter_context(InferenceServerClient(address)) for _ in range(count)]
        for client in clients:
            ask(client, model, x)
        end = time.perf_counter() + seconds

        def work(number: int) -> None:
            while (started := time.perf_counter()) < end:
                ask(clients[number], model, x)
                took.append(time.perf_counter() - started)

        in_threads(count, work)
    return took
