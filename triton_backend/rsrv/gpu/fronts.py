"""Part `fronts`: compare a model that rsrv serves, with each front, with a plain Triton model of the same modules."""

import shutil
from collections.abc import Mapping

from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from rsrv.gpu import load
from rsrv.gpu.plain import example, export_networks, place_plain
from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.gpu.server import BUNDLES, NoTriton, ask, plain_server, serving
from rsrv.native import LIBRARY
from rsrv.text import duration, rate
from rsrv_bundle.numerics import TOLERANCE, difference

_SIZES, _CLIENTS = (1, 4, 8, 16, 32), (1, 16)
#: Share of the part's time for the measurements. The start of the servers needs the rest of the time.
_MEASURING = 0.5


def fronts(part_input: PartInput, tell: Tell) -> None:
    """Measure each model with 1 and with 16 clients, one model at a time. The plain model has a separate tritonserver."""
    # An installation without the library has only the Python front.
    names = ("native", "python") if LIBRARY.is_file() else ("python",)
    bundle, *_ = export_networks(part_input.folder / BUNDLES, names[:1], _SIZES)
    for front in names[1:]:
        shutil.copytree(bundle, bundle.with_name(front))
    settings = {
        # The plain model needs the other half of the device.
        "runtime": {"memory_fraction": 0.4},
        "models": {front: {"front": front} for front in names},
    }
    try:
        with serving(part_input, names, settings) as served, plain_server(part_input) as plain:
            addresses = dict.fromkeys(names, served.address)
            place_plain(plain.repository, "plain", bundle, part_input.device.platform, max(_SIZES))
            try:
                with InferenceServerClient(plain.address) as client:
                    client.load_model("plain")
                addresses = {"plain": plain.address, **addresses}
            except InferenceServerException as error:
                tell(Finding("plain model", "FAIL", reason=str(error)))
            answers = []
            for model, address in addresses.items():
                with InferenceServerClient(address) as client:
                    answers.append(ask(client, model, example()))
            apart = max(difference(answer, answers[0])[1] for answer in answers)
            limit = TOLERANCE["f32"]
            tell(check("answers of all", apart <= limit, f"error {apart:.2g}", f"at most {limit:g}"))
            perf_analyzer = load.generator()
            how = "perf_analyzer" if perf_analyzer else "a process for each client"
            seconds = part_input.window(
                part_input.amounts.front_s, _MEASURING / len(_CLIENTS) / len(addresses)
            )
            for count in _CLIENTS:
                measured: dict[str, load.Latency] = {}
                for model, address in addresses.items():
                    measured[model] = load.measure(part_input, perf_analyzer, address, model, count, seconds)
                    tell(_compared(count, measured, how))
    except NoTriton as error:
        tell(Finding("plain, native and Python front", "NOT RUN", reason=str(error)))


def _compared(clients: int, measured: Mapping[str, load.Latency], how: str) -> Finding:
    value = "; ".join(
        f"{model} {rate(latency.per_s)}, p50 {duration(latency.p50_s)}" for model, latency in measured.items()
    )
    figures = {
        f"{model}_{name}": figure
        for model, latency in measured.items()
        for name, figure in latency._asdict().items()
    }
    title = f"{clients} clients" if clients > 1 else "1 client"
    return Finding(title, "MEASURED", value, f"load by {how}", figures)
