"""`rsrv check-triton`: checks whether rsrv works with the tritonserver of this machine, without bundles and on the CPU."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from rsrv.command import put
from rsrv.control.find import running
from rsrv.gpu import processes
from rsrv.gpu.report import QUICK, DeviceFacts, Finding, PartInput, Tell, check
from rsrv.gpu.server import BUNDLES, NoTriton, ServedModels, serving
from rsrv.native import LIBRARY
from rsrv.runtime.device import Array
from rsrv.serve import demo
from rsrv.serve.command import find_tritonserver
from rsrv.serve.plan import ServeError, plan
from rsrv.settings import Settings
from rsrv.stub.replies import free_shared_memory
from rsrv.terminal import styled
from rsrv.text import amount, duration, one_line
from rsrv.triton_command_line import ask_flags
from rsrv.wire.stub_process import living_stubs, regions_of

#: Time limit of the whole check, in seconds.
_LIMIT_S = 120.0
#: The demo's model that both fronts can serve, and a batch for it.
_MODEL = "unet"
_INPUT = np.arange(2 * 96 * 96 * 3, dtype=np.uint32).astype(np.uint8).reshape(2, 96, 96, 3)
_FRONTS = ("python", "native")
#: Name of the model that reports facts about its stub.
_FACTS = "stub_facts"
_FACTS_CONFIG = """\
backend: "python"
input [{ name: "request", data_type: TYPE_UINT8, dims: [-1] }]
output [{ name: "facts", data_type: TYPE_UINT8, dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""
#: Flags that some releases lack. The text for a flag says what `rsrv serve` or its user can do with it.
_NEWER_FLAGS = {
    "allow-client-shm": "`rsrv serve --client-shm` sets --allow-client-shm",
    "http-max-input-size": "--http-max-input-size limits JSON over HTTP to 64 MiB",
}
#: The servers of this check may need this many free bytes of /dev/shm.
_LEAST_SHM = 16_000_000
#: Bytes of /dev/shm for each stub, as `rsrv serve` starts it.
_SHM_PER_STUB = 1 << 20
#: Longest time from the end of the server until the shared memory of its stubs is removed, in seconds.
_GONE_S = 5.0
_WORDS = {"PASS": "ok", "FAIL": "failed", "MEASURED": "note", "NOT RUN": "not run"}


def run(tritonserver: str | None) -> int:
    """Check a tritonserver, and print a line for each finding. Return 0, or another status if something failed."""
    began = time.monotonic()
    try:
        program = find_tritonserver(tritonserver, lambda question: False)
    except ServeError as error:
        put(f"rsrv check-triton: {error}", sys.stderr)
        return error.status
    findings = []
    with tempfile.TemporaryDirectory(prefix="rsrv-check-") as folder:
        cpu = DeviceFacts("CPU", "cpu", False, None, "")
        part_input = PartInput(
            cpu, QUICK, [], None, Path(folder), processes.without_settings(), began + _LIMIT_S
        )
        with closing(
            processes.run(part_input.folder, _LIMIT_S, check_triton, program, part_input)
        ) as results:
            for finding in results:
                if finding.what == processes.LATE:
                    reason = f"did not end within {duration(_LIMIT_S)}: the machine is slow, or this tritonserver hangs"
                    finding = Finding(processes.LATE, "FAIL", reason=reason)
                findings.append(finding)
                put(line(finding))
    failed = sum(finding.verdict == "FAIL" for finding in findings)
    result = f"does not work with rsrv: {failed} failed" if failed else "works with rsrv"
    put(f"This tritonserver {result} ({duration(time.monotonic() - began)})")
    return int(failed > 0)


def line(finding: Finding) -> str:
    """Return a finding as a line for people."""
    reason = finding.reason and (f" ({finding.reason})" if finding.value else finding.reason)
    return f"{styled(f'{_WORDS[finding.verdict]:8}')}{finding.what}: {one_line(f'{finding.value}{reason}')}"


def check_triton(tell: Tell, program: str, part_input: PartInput) -> None:
    """Check the program, and then a server that it runs.

    The server has one model for each front, and a model that reports facts about its stub.
    """
    try:
        flags = ask_flags(program)
    except OSError as error:
        tell(Finding("tritonserver", "FAIL", reason=str(error)))
        return
    tell(flags_finding(flags))
    tell(shm_finding(free_shared_memory()))
    models = [f"{front}_front" for front in _FRONTS]
    if not LIBRARY.is_file():
        models = models[:1]
        tell(Finding("native front", "NOT RUN", reason="this installation of rsrv has no library for it"))
    for model in models:
        shutil.copytree(demo.DATA / demo.BUNDLES / _MODEL, part_input.folder / BUNDLES / model)
    repository = part_input.folder / "facts"
    (repository / _FACTS / "1").mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name(f"{_FACTS}.py"), repository / _FACTS / "1" / "model.py")
    (repository / _FACTS / "config.pbtxt").write_text(_FACTS_CONFIG)
    log = part_input.folder / "serve" / "serve.log"
    # With its own RSRV_RUNTIME_DIR, the server does not see other servers of this user.
    part_input = replace(
        part_input, environment={**part_input.environment, "RSRV_RUNTIME_DIR": os.environ["RSRV_RUNTIME_DIR"]}
    )
    settings = {"models": {model: {"front": front} for model, front in zip(models, _FRONTS, strict=False)}}
    started = time.monotonic()
    try:
        with (
            serving(
                part_input,
                [*models, _FACTS],
                settings,
                tritonserver=program,
                arguments=[f"--model-repository={repository}"],
            ) as served,
            InferenceServerClient(served.address) as client,
        ):
            version = client.get_server_metadata().version
            took = duration(time.monotonic() - started)
            tell(Finding("version", "PASS", f"tritonserver {version}", f"{program}; ready after {took}"))
            server = next(iter(running())).server_pid
            regions = {command.region for _, command in living_stubs(server)}
            _check_served(tell, served, client, models, part_input.folder / BUNDLES, server)
    except NoTriton as error:
        reason = last_error(part_input.folder / "log") or last_error(log) or "its log has no error"
        tell(Finding("start", "FAIL", reason=f"{error}: {reason}"))
        return
    tell(_gone(regions))
    if "Fatal Python error" in log.read_text(errors="replace"):
        value = "stubs end with `Fatal Python error`, a harmless fault of this release"
        tell(Finding("end of stubs", "MEASURED", value))


def flags_finding(known: frozenset[str]) -> Finding:
    """Compare the flags that a release knows with the flags that `rsrv serve` uses."""
    planned = plan(
        Settings(), Path("/"), "tritonserver", links=Path("/"), ports={"http": 1, "grpc": 2, "metrics": 3}
    )
    needed = {word.removeprefix("--").partition("=")[0] for word in planned.argv[1:]}
    if missing := sorted(needed - known):
        reason = f"this release has no --{', --'.join(missing)}, which `rsrv serve` needs"
        return Finding("flags", "FAIL", reason=reason)
    newer = [text for flag, text in _NEWER_FLAGS.items() if flag in known]
    return Finding("flags", "PASS", f"all {len(needed)} that `rsrv serve` needs", "; ".join(newer))


def shm_finding(free: int) -> Finding:
    """Return a finding about how many stubs fit into the free bytes of /dev/shm."""
    value = f"{amount(free)} free in /dev/shm, for {free // _SHM_PER_STUB} models with the Python front"
    reason = "requests and answers need more room than that; docker run --shm-size sets the size"
    return check("shared memory", free >= _LEAST_SHM, value, reason)


def stub_findings(facts: Mapping[str, Any]) -> list[Finding]:
    """Return findings about the facts that the model in a stub has reported."""
    python, numpy = f"Python {facts['python']} in {facts['prefix']}", f"numpy {facts['numpy']}"
    findings = [Finding("Python of the stubs", "PASS", python)]
    if facts["missing"]:
        reason = "only hooks that use rsrv.hooks need them; install them into this Python"
        findings.append(
            Finding("packages for hooks", "MEASURED", f"no {', '.join(facts['missing'])}", reason)
        )
    if facts["numpy_works"]:
        findings.append(
            Finding("numpy of the stubs", "PASS", f"{numpy} exchanges tensors and text with this Triton")
        )
    else:
        value = f"{numpy} does not work with this Triton"
        reason = (
            "rsrv works around it, which costs 0.1 ms per tensor, and refuses text; your own Python models return empty "
            "tensors with the status OK. Install numpy<2 into this Python"
        )
        findings.append(Finding("numpy of the stubs", "MEASURED", value, reason))
    return findings


def last_error(log: Path) -> str:
    """Return the last line about an error in a log of Triton, or in the lines that `rsrv serve` shows."""
    text = log.read_text(errors="replace") if log.exists() else ""
    errors = re.findall(r"^(?:E\d{4} .*|.*(?:did not start|failed|Error): .*)$", text, re.MULTILINE)
    return str(errors[-1]).strip() if errors else ""


def _check_served(
    tell: Tell,
    served: ServedModels,
    client: InferenceServerClient,
    models: Sequence[str],
    bundles: Path,
    server: int,
) -> None:
    for finding in stub_findings(_ask_facts(client, {})):
        tell(finding)
    answers = {}
    for model in models:
        started = time.perf_counter()
        answers[model] = _ask(client, model)
        took = duration(time.perf_counter() - started)
        alike = np.array_equal(answers[model], answers[models[0]])
        tell(
            check(model.replace("_", " "), alike, f"answers after {took}", "the same answer with each front")
        )

    def right() -> bool:
        return all(np.array_equal(_ask(client, model), answer) for model, answer in answers.items())

    def call() -> bool:
        error: str = _ask_facts(client, {"call": _CALL})["error"]
        if error:
            raise InferenceServerException(error)
        return True

    tell(_timed("calls between models (BLS)", call, "a Python model calls another one through Triton"))
    os.kill(served.runtime_pid(), signal.SIGKILL)
    reason = "a call immediately after the runtime was killed; it must wait for the next runtime"
    tell(_timed("BLS while the runtime restarts", call, reason))
    os.kill(served.runtime_pid(), signal.SIGKILL)
    tell(
        _timed(
            "kill -9 of the runtime", right, "requests immediately after it; they must wait and be answered"
        )
    )
    manifest = bundles / models[0] / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace("description: '", "description: 'Reloaded. ", 1))

    def reload() -> bool:
        before = _stubs(server, models[0])
        served.rsrv("reload", models[0])
        return bool(_stubs(server, models[0]) - before) and right()

    tell(_timed("reload", reload, "a changed bundle is served by a new process"))


#: A call of the model with the Python front.
_CALL = {"model": "python_front", "inputs": {"image": ["uint8", [1, 96, 96, 3]]}, "outputs": ["logits"]}


def _stubs(server: int, model: str) -> set[int]:
    return {pid for pid, command in living_stubs(server) if f"/{model}/" in str(command.code)}


def _timed(title: str, act: Callable[[], bool], reason: str) -> Finding:
    started = time.perf_counter()
    try:
        done = act()
    except InferenceServerException as error:
        return Finding(title, "FAIL", reason=f"{error}; {reason}")
    return check(title, done, f"done after {duration(time.perf_counter() - started)}", reason)


def _gone(regions: set[str]) -> Finding:
    """Wait until the server's shared memory is removed."""
    end = time.monotonic() + _GONE_S
    while (left := regions & regions_of("triton_python_backend_shm_region_")) and time.monotonic() < end:
        time.sleep(0.1)
    value = f"{len(left)} of {len(regions)} regions are left" if left else "nothing is left in /dev/shm"
    return check("end of the server", not left, value, "after SIGINT to `rsrv serve`")


def _ask(client: InferenceServerClient, model: str) -> Array:
    tensor = InferInput("image", list(_INPUT.shape), "UINT8")
    tensor.set_data_from_numpy(_INPUT)
    return np.array(client.infer(model, [tensor]).as_numpy("logits"))


def _ask_facts(client: InferenceServerClient, question: Mapping[str, Any]) -> dict[str, Any]:
    x = np.frombuffer(json.dumps(question).encode(), np.uint8)
    tensor = InferInput("request", list(x.shape), "UINT8")
    tensor.set_data_from_numpy(x)
    facts: dict[str, Any] = json.loads(client.infer(_FACTS, [tensor]).as_numpy("facts").tobytes())
    return facts
