"""Faults on a real server, and the findings of `rsrv doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tritonclient.grpc
import trustme

from local_triton import TritonServer
from rsrv.cli import main as cli
from rsrv.control.triton import Triton
from rsrv_bundle.export import export_bundle
from tests.e2e import bundles
from tests.e2e.calls import Caller, Refused, at_once, caller, outcome, tensors
from tests.e2e.harness import EXPLICIT, HURRY, RunningTriton, StartTriton, make_repository, running_triton
from tests.e2e.metas import write_meta, write_scale
from tests.waiting import wait_until

pytestmark = pytest.mark.long

#: Bytes of `exact`. Two copies fit next to the pinned models.
_BYTES = 1536
_PINNED = 3 * 256 * 256 * 4
SETTINGS = f"""
runtime: {{weight_budget_bytes: {_PINNED + 2 * _BYTES}}}
models:
  tickets: {{residency: device, weight: 50}}
  defects: {{residency: device}}
  cats: {{residency: device}}
"""
HOOKS = "def preprocess(inputs):\n    raise ValueError('broken')\n"
#: Settings of the server `faulty`. Its budget is too small for `large`, and for all other models together.
FAULTY_SETTINGS = f"""
runtime: {{weight_budget_bytes: {2 * _BYTES}, host_memory_bytes: 0}}
lifecycle: {{poll_s: 0.1}}
scheduler: {{meta_concurrency: 1}}
models:
  steady: {{max_queue_depth: 1}}
  single: {{max_delay_us: 10000}}
"""
CHAIN = """
import time


def run(inputs, call):
    time.sleep(0.2)
    return call("double", inputs)
"""
SLOW_HOOKS = "import time\n\n\ndef preprocess(inputs):\n    time.sleep(0.03)\n    return inputs\n"
#: Time limit in seconds. Even on a busy machine, the figures are in the snapshot by then.
_SOON_S = 90.0


def export(
    folder: Path, name: str, sizes: list[int], steps: int, hooks: str | None = None, rows: int = 256
) -> None:
    """Write a model with `rows` x 256 weights. An execution multiplies by the first 256 rows `steps` times."""
    kernel = np.random.default_rng([*name.encode()]).normal(0, 0.05, (rows, 256)).astype(np.float32)
    export_bundle(
        lambda w, x: {"y": jax.lax.fori_loop(0, steps, lambda _, y: jnp.tanh(y @ w["k"][:256]), x)},
        {"k": kernel},
        {"x": np.zeros((1, 256), np.float32)},
        batch_sizes=sizes,
        out_dir=folder / name,
        hooks=hooks,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server whose models have no fault until requests arrive."""
    folder = tmp_path_factory.mktemp("doctor")
    export(folder / "bundles", "tickets", [16], 400)
    export(folder / "bundles", "defects", [1], 1)
    export(folder / "bundles", "cats", [1, 32], 100)
    export(folder / "bundles", "broken", [1], 1, HOOKS)
    for number, name in enumerate(("first", "second", "third")):
        kernel = {"kernel": bundles.exact_kernel() + number}
        bundles.with_weights(bundles.ensure() / "exact", folder / "bundles" / name, kernel)
    repository = make_repository(folder, settings=SETTINGS)
    flags = [*EXPLICIT, HURRY]
    with running_triton(repository, folder / "server.log", extra_args=flags, expected=None) as running:
        yield running


def operate(server: RunningTriton, *command: str) -> None:
    assert cli.main([*command, "--server", str(server.grpc_port)]) == 0


def doctor(server: RunningTriton) -> tuple[dict[str, str], int]:
    """Run `rsrv doctor`, and return the severities of its findings by name, and its exit status."""
    findings, status = diagnosed(server)
    return {
        finding["name"]: finding["severity"].removeprefix("SEVERITY_").lower() for finding in findings
    }, status


def diagnosed(server: RunningTriton) -> tuple[list[dict[str, str]], int]:
    """Run `rsrv doctor`, and return its findings and its exit status."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(["doctor", "--json", "--server", str(server.grpc_port)])
    findings: list[dict[str, str]] = json.loads(out.getvalue())["findings"]
    return findings, status


@contextmanager
def asked(server: RunningTriton, models: Mapping[str, tuple[int, int]]) -> Iterator[None]:
    """Send requests to each model until the block ends. `models` has, for each model, the rows of a request and the number of clients."""
    end = threading.Event()

    def ask(name: str, rows: int) -> None:
        width = {"first": 64, "second": 64, "third": 64, "chain": 8, "crowded": 8}.get(name, 256)
        with caller(server) as call:
            while not end.is_set():
                with contextlib.suppress(Refused):
                    call(name, {"x": np.zeros((rows, width), np.float32)})

    clients = [(name, rows) for name, (rows, count) in models.items() for _ in range(count)]
    with ThreadPoolExecutor(len(clients)) as pool:
        asking = [pool.submit(ask, *client) for client in clients]
        try:
            yield
        finally:
            end.set()
        for future in asking:
            future.result()


def test_each_trouble_is_found(server: RunningTriton) -> None:
    """A server without faults has no urgent finding.

    Then requests cause four faults: weights thrash, rows are padding, a hook raises an error, and one model starves.
    """
    severities, status = doctor(server)
    assert (status, set(severities.values()) - {"note"}) == (0, set())
    with asked(server, {"tickets": (16, 1), "defects": (1, 1)}):
        wait_until(
            lambda: server.grpc.get_inference_statistics("defects").model_stats[0].inference_count > 20
        )
    assert doctor(server)[1] == 0

    with asked(server, {"first": (1, 1), "second": (1, 1), "third": (1, 1)}):
        wait_until(lambda: doctor(server) == ({**severities, "weights_thrash": "warning"}, 1), _SOON_S)
    with asked(server, {"cats": (2, 2)}):
        wait_until(lambda: "padding" in doctor(server)[0], _SOON_S)
    with asked(server, {"broken": (1, 1)}):
        wait_until(lambda: doctor(server)[0].get("requests_fail") == "critical", _SOON_S)
    causes = {finding["name"]: finding["cause"] for finding in diagnosed(server)[0]}
    assert causes["requests_fail"] == "preprocess raised ValueError at line 2 of model.py"
    assert doctor(server)[1] == 3
    with asked(server, {"tickets": (16, 4), "defects": (1, 1)}):
        wait_until(lambda: doctor(server)[0].get("starved") == "warning", 2 * _SOON_S)
    assert doctor(server)[0].keys() <= {*severities, "weights_thrash", "padding", "requests_fail", "starved"}


@pytest.fixture
def faulty(tmp_path: Path, start_triton: StartTriton) -> RunningTriton:
    """A server with room on the device for two copies of `exact`, and not for `large`. Its host keeps no copies."""
    for number, name in enumerate(("first", "second", "third", "changed", "slow")):
        kernel = {"kernel": bundles.exact_kernel() + number}
        bundles.with_weights(bundles.ensure() / "exact", tmp_path / "bundles" / name, kernel)
    (tmp_path / "bundles" / "slow" / "model.py").write_text(SLOW_HOOKS)
    export(tmp_path / "bundles", "large", [1], 1, rows=32768)
    for name, source in (
        ("steady", "steady"),
        ("late", "elastic"),
        ("behind", "sudden"),
        ("single", "sudden"),
    ):
        shutil.copytree(bundles.ensure() / source, tmp_path / "bundles" / name)
    write_scale(tmp_path / "bundles" / "double", 2)
    write_meta(tmp_path / "bundles" / "chain", CHAIN, ["double"])
    repository = make_repository(tmp_path, settings=FAULTY_SETTINGS)
    return start_triton(repository, extra_args=[*EXPLICIT, HURRY], expected=None)


#: Expected findings of the server `faulty`: severity, words of the evidence, and words of the cause or the cure.
EXPECTED = {
    "bad_requests": (
        "note",
        "third answered 25 of 25 requests with INVALID",
        "wrong shapes, dtypes or names",
    ),
    "bundle_refused": ("warning", "changed is served in an older version", "format_version: is missing"),
    "deadlines_arrival": (
        "warning",
        "first missed the deadlines of 25 of 25 requests",
        "use gRPC's timeouts",
    ),
    "deadlines_execute": ("warning", r"late missed the deadlines of \d+ of ", "smaller batch sizes"),
    "deadlines_gate": (
        "warning",
        r"chain missed the deadlines of \d+ of ",
        "`rsrv scheduler meta_concurrency=2`",
    ),
    "deadlines_load": ("warning", r"large missed the deadlines of \d+ of ", "`rsrv pin large`"),
    "deadlines_queue": (
        "warning",
        r"behind missed the deadlines of \d+ of ",
        "`rsrv scheduler discipline=edf`",
    ),
    "disk_loads": (
        "warning",
        r"weights of .*second.* were read from disk \d+ times",
        "raise runtime.host_memory_bytes",
    ),
    "held_back": (
        "note",
        r"requests of single wait 1\d(\.\d)? ms for other requests to share an execution, but 25 executions had 25",
        "--max-delay-us 0`",
    ),
    "model_failed": ("critical", "new has failed", "format_version: is missing"),
    "over_pinned": ("warning", "4.61 kB of weights are pinned, but only 3.07 kB fit", "`rsrv unpin`"),
    "paused": ("warning", "second is paused: 25 requests wait or were refused", "`rsrv continue second`"),
    "queue_full": ("warning", "steady refused .* 1 may wait", "`rsrv policy steady --max-queue-depth 2`"),
    "runtime_restarts": ("note", "`rsrv restart` replaced the runtime of device 0 1 time", "`rsrv restart`"),
    "settings_refused": (
        "warning",
        "the settings file is not used: .*models: must be a mapping",
        "fix the file",
    ),
    "slow_hooks": (
        "note",
        r"slow spends 3\d(\.\d)? ms of a request's [0-9.]+ ms in preprocess and postprocess",
        "faster",
    ),
    "waits_in_triton": ("note or warning", "requests for double wait in Triton", "front: native"),
    "weights_too_big": (
        "warning",
        "large: weights of 33.6 MB do not fit the budget of 3.07 kB",
        "at least 33554432 bytes",
    ),
}


@pytest.mark.long  # All findings must be present within a minute.
def test_troubles_of_requests_and_settings_are_found(faulty: RunningTriton, tmp_path: Path) -> None:
    """Clients and operators cause twenty faults on one server. Each fault is found, and no other finding appears.

    Six of the findings end with their cures.
    """
    x, row = {"x": np.zeros((1, 64), np.float32)}, {"x": np.zeros((1, 8), np.float32)}
    settings, new = tmp_path / "gen" / "rsrv.yaml", tmp_path / "bundles" / "new"
    changed = tmp_path / "bundles" / "changed" / "manifest.yaml"
    usual, manifest = settings.read_text(), changed.read_text()

    settings.write_text(usual.replace("watchdog_s: 60.0", "watchdog_s: 61.0"))
    wait_until(lambda: doctor(faulty)[0].get("settings_waiting") == "note")
    operate(faulty, "restart")
    wait_until(lambda: doctor(faulty)[0] == {"runtime_restarts": "note", "weights_too_big": "warning"})

    def until(name: str, deed: Callable[[], object]) -> None:
        """Repeat an action until the finding appears. On a busy machine, a deadline may pass in another stage."""
        wait_until(lambda: (deed(), name in doctor(faulty)[0])[1], what=name)

    with asked(faulty, {"chain": (1, 7)}):  # The device has not executed anything yet.
        until("meta_waits", lambda: None)
        until("deadlines_gate", lambda: at_once(faulty, 9, wait_at_the_gate))
    with caller(faulty) as call:
        often(call, "first", x, parameters={"rsrv_deadline_unix_ns": 1})
        often(call, "third", x, parameters={"rsrv_priority": -1})
        often(call, "single", stepping(0))
        often(call, "slow", x)
        operate(faulty, "pause", "second", "--mode", "reject")
        often(call, "second", x)
        # Machines differ in speed, so each attempt has more steps.
        steps = (150 << n for n in range(9))
        until("deadlines_execute", lambda: often(call, "late", stepping(next(steps)), 7, timeout=20_000))
    until("deadlines_load", lambda: at_once(faulty, 6, wait_for_weights))
    more = (250 << n for n in range(9))
    until("deadlines_queue", lambda: at_once(faulty, 4, partial(wait_behind, next(more))))
    until("queue_full", lambda: at_once(faulty, 10, fill_the_queue))
    for _ in range(3):
        operate(faulty, "evict", "second")
        operate(faulty, "prefetch", "second", "--wait")
    for name in ("first", "second", "third"):
        operate(faulty, "residency", name, "device")
    until("waits_in_triton", lambda: flood(faulty, "double", row))
    changed.write_text("name: 3")
    new.mkdir()
    (new / "manifest.yaml").write_text("name: 3")
    settings.write_text("models: 3")

    wait_until(lambda: doctor(faulty)[0].keys() >= EXPECTED.keys(), what=str(EXPECTED.keys()))
    findings, _ = diagnosed(faulty)
    assert {finding["name"] for finding in findings} == EXPECTED.keys()
    for finding in findings:
        severity, evidence, words = EXPECTED[finding["name"]]
        assert finding["severity"].removeprefix("SEVERITY_").lower() in severity, finding
        assert re.search(evidence, finding["evidence"]), finding
        assert words in finding["cause"] + finding["cure"], finding

    operate(faulty, "continue", "second")
    operate(faulty, "unpin", "third")
    operate(faulty, "policy", "single", "--max-delay-us", "0")
    changed.write_text(manifest)
    shutil.rmtree(new)
    settings.write_text(usual)
    cured = {"paused", "over_pinned", "held_back", "bundle_refused", "model_failed", "settings_refused"}
    wait_until(lambda: not cured & doctor(faulty)[0].keys(), what=f"{cured} to go")

    async def queues() -> Mapping[str, tuple[int, float]]:
        async with Triton.of(faulty.pid) as triton:
            return await triton.queues()

    assert asyncio.run(queues())["slow"][0] == 25


def test_troubles_around_a_server_are_found(tmp_path: Path, start_triton: StartTriton) -> None:
    """Faults around a server are found: weights that requests may not load, lost traces, a full /dev/shm, and files that were not renewed.

    The findings about /dev/shm and the files end with their cures.
    """
    shutil.copytree(bundles.ensure() / "exact", tmp_path / "bundles" / "first")
    certificate, key, token = (tmp_path / name for name in ("cert.pem", "key.pem", "token"))

    def renew(days: float, secret: str) -> None:
        ends = datetime.now(UTC) + timedelta(days=days)
        issued = trustme.CA().issue_cert("localhost", not_after=ends)
        certificate.write_bytes(issued.cert_chain_pems[0].bytes())
        key.write_bytes(issued.private_key_pem.bytes())
        token.write_text(secret)
        token.chmod(0o600)

    renew(365, "secret")
    settings = (
        "{lifecycle: {mode: explicit}, metrics: {listen: null}, traces: {endpoint: 'http://127.0.0.1:9/'}, control: "
        f"{{listen: '127.0.0.1:0', tls_certificate: {certificate}, tls_key: {key}, token_file: {token}}}}}"
    )
    server = start_triton(
        make_repository(tmp_path, settings=settings),
        extra_args=["--grpc-header-forward-pattern=traceparent", HURRY],
        env={"OTEL_EXPORTER_OTLP_TIMEOUT": "1"},
        expected=None,
        make=_WithSmallShm,
    )
    x = {"x": np.zeros((1, 64), np.float32)}

    with caller(server) as call:
        often(call, "first", x)
        wait_until(lambda: doctor(server)[0] == {"not_resident": "warning"})
        assert "`rsrv prefetch first`" in diagnosed(server)[0][0]["cure"]
        operate(server, "prefetch", "first", "--wait")
        call("first", x, headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    wait_until(lambda: doctor(server)[0].get("traces_lost") == "note")

    filler = Path(f"/proc/{server.pid}/root/dev/shm/filler")
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**20))
    wait_until(lambda: doctor(server)[0].get("shm_full") == "warning")
    filler.unlink()
    wait_until(lambda: "shm_full" not in doctor(server)[0])

    renew(2, "")
    wait_until(
        lambda: (
            doctor(server)[0].items() >= {"certificate_ends": "warning", "renewal_failed": "warning"}.items()
        )
    )
    renew(365, "secret")
    wait_until(lambda: not {"certificate_ends", "renewal_failed"} & doctor(server)[0].keys())


class _WithSmallShm(TritonServer):
    """A server whose /dev/shm is separate and small."""

    def command(self) -> list[str]:
        mounted = 'mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"'
        return [
            shutil.which("unshare") or "unshare",
            "--mount",
            "/bin/sh",
            "-c",
            mounted,
            "sh",
            *super().command(),
        ]


def often(
    call: Caller, model: str, inputs: Mapping[str, np.ndarray], times: int = 25, **options: object
) -> None:
    for _ in range(times):
        outcome(lambda: call(model, inputs, **options))


def stepping(steps: int) -> dict[str, np.ndarray]:
    """Return a request with `steps` steps, for `late`, `behind` or `single`."""
    return {"x": np.zeros((1, 4), np.uint32), "steps": np.full((1, 1), steps, np.int32)}


def wait_for_weights(call: Caller, _: int) -> None:
    """Ask for `large` with a deadline that passes during its load. A request to `double` evicts `large` if it is loaded."""
    outcome(lambda: call("double", {"x": np.zeros((1, 8), np.float32)}))
    often(call, "large", {"x": np.zeros((1, 256), np.float32)}, 1, timeout=10_000)


def fill_the_queue(call: Caller, _: int) -> None:
    often(call, "steady", {"x": np.zeros((1, 4), np.uint32)}, 1)


def wait_behind(steps: int, call: Caller, number: int) -> None:
    """Send long executions to `late`, or short executions to `behind` with deadlines that pass during the long ones."""
    if number < 2:
        often(call, "late", stepping(steps), 6)
    else:
        often(call, "behind", stepping(0), 6, timeout=10_000)


def wait_at_the_gate(call: Caller, _: int) -> None:
    """Start a run whose deadline passes before the run may begin."""
    often(call, "chain", {"x": np.zeros((1, 8), np.float32)}, 1, timeout=50_000)


def flood(server: RunningTriton, model: str, inputs: Mapping[str, np.ndarray], count: int = 1500) -> None:
    """Send requests as fast as one client can, without waiting for answers. Return when all are answered."""
    answers: queue.Queue[object] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.server.grpc_url) as client:
        sent = tensors(tritonclient.grpc, inputs)
        for _ in range(count):
            client.async_infer(model, sent, lambda result, error: answers.put(error))
        assert {answers.get(timeout=60) for _ in range(count)} == {None}
