"""Findings from figures: each trouble raises its finding, and a healthy server raises none."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.diagnosis import find
from rsrv.control.figures import DeviceFigures, ServerFigures, windows
from rsrv.control.findings import ServerFinding
from rsrv.control.metric_catalog import FAMILIES
from rsrv.control.records import RuntimeRecords
from rsrv.control.shm_usage import ShmUsage
from rsrv.control.v1 import control_pb2 as pb
from rsrv.histogram import LONG_SECONDS, ROWS, SECONDS, Histogram
from rsrv.renewal import FileState
from rsrv.settings import load_settings
from tests.unit.control.peers import entry, records, trimmed

MB = 1_000_000
E2E = Path(__file__).parents[2] / "e2e"
HELP = next(family.help for family in FAMILIES if family.name == "rsrv_findings")


def times(count: int, value: float, bounds: tuple[float, ...] = SECONDS) -> pb.Histogram:
    """Return a histogram of `count` equal values, in the form of a record."""
    histogram = Histogram(bounds)
    for _ in range(count):
        histogram.observe(value)
    return trimmed(histogram)


def model(n: int = 1000, costs: Mapping[int, float] | None = None, **differs: Any) -> pb.ModelRecord:
    """Return the record of a model that answered `n` requests of one row in 4 ms each, without waiting.

    `costs`: seconds of an execution by its size.
    """
    common: dict[str, Any] = {
        "weights": pb.WEIGHTS_RESIDENT,
        "host_bytes": 10 * MB,
        "device_bytes": 10 * MB,
        "outcomes": {**outcomes(), "answered": n},
        "answered": n,
        "responses": {"ok": n},
        "dispatches": n,
        "useful_rows": n,
        "device_seconds": 0.004 * n,
        "queue_wait": times(n, 0.0005),
        "execute": times(n, 0.004),
        "loads": 1,
        "load": times(1, 0.02),
        "batch_rows": times(n, 1, ROWS),
        "request": times(n, 0.006),
        "executables": [
            {"size": size, "cost_s": seconds}
            for size, seconds in ({1: 0.004, 16: 0.02} if costs is None else costs).items()
        ],
    }
    record = pb.ModelRecord(**{**common, **differs})
    record.errors = sum(record.outcomes.values()) - record.outcomes["answered"]
    return record


def outcomes(**differs: int) -> dict[str, int]:
    return {"answered": 1000, "refused": 0, "expired": 0, "shed": 0, "cancelled": 0, "failed": 0, **differs}


def counts(
    models: Mapping[str, pb.ModelRecord],
    *,
    importing: Mapping[str, tuple[float, int]] | None = None,
    cache_obstacle: str = "",
    compile: pb.Histogram | None = None,
    shared: Sequence[pb.SharedTensors] = (),
    **memory: Any,
) -> RuntimeRecords:
    """Return the records of a runtime. `memory` replaces figures of the device."""
    named, device = [], {"budget_bytes": 100 * MB, "held_bytes": 20 * MB}
    for name, record in models.items():
        named.append(copy := pb.ModelRecord(name=name))
        copy.MergeFrom(record)
    return records(
        *named,
        memory={key: size for key, size in {**device, **memory}.items() if size is not None},
        host={"logical_bytes": 40 * MB, "physical_bytes": 40 * MB},
        host_limit_bytes=1000 * MB,
        compiled=2,
        compile=compile or times(2, 1.0, LONG_SECONDS),
        cache_obstacle=cache_obstacle,
        importing={
            name: pb.Import(seconds=seconds, line=line) for name, (seconds, line) in (importing or {}).items()
        },
        shared=shared,
    )


def server(*devices: RuntimeRecords, settings: str = "", **differs: Any) -> ServerFigures:
    """Return a server's figures one minute after its counters began."""
    names = [name for record in devices for name in record.models]
    figures = ServerFigures(
        t=60.0,
        unix_s=1060.0,
        devices={
            at: DeviceFigures(instance="1", since=0.0, records=record) for at, record in enumerate(devices)
        },
        entries={f"{name}@1": entry(name) for name in names},
        failures={},
        settings=load_settings(settings),
        shm=ShmUsage(900, 1000),
    )
    return replace(figures, **differs)


def serving(n: int = 1000, costs: Mapping[int, float] | None = None, **differs: Any) -> ServerFigures:
    """Return the figures of a server with one model `a`, whose record `model` makes."""
    return server(counts({"a": model(n, costs, **differs)}))


def found(now: ServerFigures, before: ServerFigures | None = None) -> dict[str, ServerFinding]:
    """Return the findings of the minute between `before` and `now`, by name. Without `before`, the counters began with the minute."""
    before = before or replace(now, t=0.0, unix_s=1000.0, devices={}, queues={})
    findings = find(before, now)
    for finding in findings:
        assert finding.evidence
        assert finding.cause
        assert finding.cure
        assert "\n" not in finding.evidence + finding.cause + finding.cure
        assert finding.name in re.findall(r"\w+", HELP), "the metric's help lists all names"
    assert len({item.name for item in findings}) == len(findings), "a finding is told twice"
    return {item.name: item for item in findings}


def test_a_restart_that_an_operator_asked_for_earlier_excuses_no_death() -> None:
    """From the deaths of a runtime, only an operator's restarts of the same window are subtracted."""
    runtime = DeviceFigures(instance="1", since=0.0, records=counts({}), lives=3, restarts=2)
    died = replace(runtime, instance="2", since=100.0, lives=4)
    past = server(devices={0: runtime})

    (finding,) = found(server(t=120.0, devices={0: died}), past).values()

    assert finding.name == "runtime_restarts"
    assert "the runtime of device 0 died" in finding.evidence


@pytest.mark.parametrize(
    ("discipline", "cure"),
    [("fair", "`rsrv scheduler discipline=edf`"), ("edf", "add devices, or send fewer requests")],
)
def test_the_discipline_is_no_cure_where_it_is_set(discipline: str, cure: str) -> None:
    """For requests that wait beyond their deadlines, the cure is `edf`. If `edf` is set already, the cure is another device."""
    late = counts({"a": model(outcomes=outcomes(expired=100), missed={"queue": 100})})

    findings = found(server(late, settings=f"scheduler: {{discipline: {discipline}}}"))

    assert findings["deadlines_queue"].cure.startswith(cure)


def test_each_finding_has_a_test_with_a_real_server() -> None:
    """Figures made by hand may not occur on a real server. So an end-to-end test names each finding."""
    names = re.findall(r"\w+", HELP.partition("and name:")[2])
    tests = "".join(path.read_text() for path in E2E.glob("test_doctor*.py"))
    assert len(names) > 30
    assert [name for name in names if f'"{name}"' not in tests] == []


def test_a_server_that_is_well_has_no_findings() -> None:
    """A server that answers in time, an idle server and a server that has just started have no findings."""
    busy = server(counts({"a": model(8000), "b": model()}))
    assert found(busy) == {}
    assert found(replace(busy, t=120.0), busy) == {}
    assert found(server(counts({"a": model()}, importing={"a": (29.0, 7)}), starting=True)) == {}
    assert found(server(counts({}))) == {}
    assert found(replace(busy, t=0.1)) == {}


@pytest.mark.parametrize(
    ("name", "severity", "words", "now"),
    [
        (
            "weights_thrash",
            "warning",
            "weights thrash: requests need 40 MB, but 30 MB fit; 78%",
            server(
                counts(
                    {
                        name: model(
                            100, misses=78, evictions={"room": 70}, loads=78, load=times(78, 0.026), weights=pb.WEIGHTS_ABSENT
                        )
                        for name in "abcd"
                    },
                    budget_bytes=30 * MB,
                ),
                settings="runtime: {weight_budget_bytes: 30000000}",
            ),
        ),
        ("over_pinned", "warning", "120 MB of weights are pinned, but only 100 MB fit", server(counts({}, pinned_bytes=120 * MB))),
        (
            "waits_in_triton",
            "warning",
            "the device is idle 93.3% of the time while requests for a wait in Triton, 300 ms on average for a",
            server(counts({"a": model()}), queues={"a": (1000, 300.0)}),
        ),
        (
            "model_failed",
            "critical",
            "a has failed",
            server(
                counts({}),
                entries={"a@1": entry("a", state="failed", error="torn")},
                failures={"a": BundleFailure("torn", 1000.0)},
                cold=frozenset("a"),
            ),
        ),
        (
            "weights_too_big",
            "warning",
            "a: weights of 10 MB do not fit the budget of 8 MB",
            server(counts({"a": model(0)}, budget_bytes=8 * MB)),
        ),
        (
            "overloaded",
            "warning",
            "the device is busy 100% of the time, and 60 requests wait",
            server(
                counts(
                    {
                        name: model(7500, queued=30, queue_wait=times(7500, 0.3), device_seconds=30.0)
                        for name in "ab"
                    }
                )
            ),
        ),
        (
            "uneven_devices",
            "warning",
            "device 0 is busy 95% of the time and 30 requests wait for it, while device 1 is busy 1%",
            server(counts({"a": model(queued=30, device_seconds=57.0)}), counts({"b": model(device_seconds=0.6)})),
        ),
        (
            "compiled_at_start",
            "note",
            "2 executables were compiled since this runtime's start, which took 41 s",
            server(counts({"a": model()}, compile=times(2, 20.5, LONG_SECONDS))),
        ),
        (
            "no_compilation_cache",
            "warning",
            "executables are kept only until this server ends",
            server(counts({"a": model()}, cache_obstacle="Read-only file system")),
        ),
        (
            "disk_loads",
            "warning",
            "weights of a were read from disk 9 times",
            serving(host_bytes=0, loads=9, load=times(9, 0.2)),
        ),
        (
            "padding",
            "note",
            "85.7% of the rows of a are padding (4850 rows; 808 rows are of requests)",
            serving(354, useful_rows=808, padded_rows=4850, batch_rows=times(354, 3, ROWS)),
        ),
        (
            "single_rows",
            "warning",
            "a executes one row at a time while requests wait 250 ms",
            serving(7000, {1: 0.004}, device_seconds=50.0, queue_wait=times(7000, 0.25)),
        ),
        (
            "starved",
            "warning",
            "b waits 120 ms on average behind a, which takes 83.3% of the device's time with weight 1",
            server(
                counts(
                    {
                        "a": model(8000, device_seconds=50.0),
                        "b": model(200, device_seconds=0.8, queue_wait=times(200, 0.12)),
                    }
                )
            ),
        ),
        (
            "starved",
            "note",
            "b waits 120 ms on average behind a, which takes 83.3% of the device's time",
            server(
                counts(
                    {
                        "a": model(500, device_seconds=50.0, execute=times(500, 0.1)),
                        "b": model(200, device_seconds=0.8, queue_wait=times(200, 0.12)),
                    }
                )
            ),
        ),
        (
            "held_back",
            "note",
            "requests of a wait 5 ms for other requests to share an execution, but 1000 executions had 1000 requests",
            server(
                counts({"a": model(queue_wait=times(1000, 0.005))}), settings="models: {a: {max_delay_us: 5000}}"
            ),
        ),
        (
            "slow_hooks",
            "note",
            "a spends 50 ms of a request's 60 ms in preprocess and postprocess",
            serving(request=times(1000, 0.06), hooks={"pre": times(1000, 0.05)}),
        ),
        (
            "slow_hooks",  # requests wait for the hooks of other requests
            "note",
            "a spends 50 ms of a request's 400 ms in preprocess and postprocess",
            serving(request=times(1000, 0.4), hooks={"pre": times(1000, 0.05)}),
        ),
        (
            "requests_fail",
            "critical",
            "a: 30 of 1030 answers are failures of the server",
            serving(outcomes=outcomes(failed=30), responses={"ok": 1000, "internal": 30}),
        ),
        (
            "queue_full",
            "warning",
            "a refused 100 of 1100 requests (QUEUE_FULL); at most 1024 may wait",
            serving(outcomes=outcomes(refused=100), refused={"queue_full": 100}),
        ),
        (
            "no_memory",
            "critical",
            "there was no memory for its 10 MB of weights in addition to the 20 MB on the device (the budget is 100 MB)",
            serving(outcomes=outcomes(refused=2), refused={"no_memory": 2}),
        ),
        (
            "not_resident",
            "warning",
            "its weights are not on the device",
            serving(outcomes=outcomes(refused=20), refused={"not_resident": 20}),
        ),
        (
            "bad_requests",
            "note",
            "a answered 200 of 1200 requests with INVALID",
            serving(responses={"ok": 1000, "invalid": 200}),
        ),
        *(
            (
                f"deadlines_{stage}",
                "warning",
                "a missed the deadlines of 100 of 1100 requests",
                serving(outcomes=outcomes(expired=100), missed={stage: 100}),
            )
            for stage in ("arrival", "queue", "load", "execute")
        ),
        (
            "meta_waits",
            "note",
            "20 runs of chain wait while the device is idle 93.3% of the time",
            server(
                counts({"a": model(), "chain": model(50, meta=True, queued=20, executing=2, calls=9)})
            ),
        ),
        (
            "paused",
            "warning",
            "a is paused: 7 requests wait or were refused",
            server(counts({"a": model(queued=7)}), entries={"a@1": entry("a", paused="hold")}),
        ),
        (
            "model_failed",
            "critical",
            "x has failed, for 1.0 min now",
            server(counts({}), failures={"x": BundleFailure("manifest.yaml: not YAML", since=1000.0)}),
        ),
        (
            "bundle_refused",
            "warning",
            "a is served in an older version",
            server(counts({"a": model()}), failures={"a": BundleFailure("torn", since=1000.0)}),
        ),
        (
            "slow_import",
            "critical",
            "b's model.py has been importing for 45 s; other models load meanwhile: imports hold 2 of Triton's 4 load threads; also a",
            server(counts({"a": model(), "b": model()}, importing={"a": (31.0, 0), "b": (45.0, 7)}), loading=frozenset("abc")),
        ),
        (
            "slow_import",
            "critical",
            "a's model.py has been importing for 45 s; the model's requests wait for the import",
            server(counts({"a": model()}, importing={"a": (45.0, 7)})),
        ),
        (
            "slow_import",
            "critical",
            "a's model.py has been importing for 45 s; no model is served, because Triton opens its ports only after it has loaded all models of its start",
            server(counts({"a": model()}, importing={"a": (45.0, 7)}), starting=True),
        ),
        (
            "slow_import",
            "critical",
            "an older version is served; other models wait for this import: imports hold 1 of Triton's 1 load thread",
            server(
                counts({"a": model()}, importing={"a": (45.0, 7)}),
                entries={"a@1": entry("a"), "a@2": entry("a", stubs=[101])},
                loading=frozenset("ab"),
                load_threads=1,
                missing={"b": 40.0},
            ),
        ),
        (
            "slow_import",
            "warning",
            "a's model.py has been importing for 45 s, and an older version is served; other models load meanwhile",
            server(
                counts({"a": model()}, importing={"a": (45.0, 7)}),
                entries={"a@1": entry("a", stubs=[100, 101])},
                loading=frozenset("a"),
            ),
        ),
        (
            "model_failed",  # during each further attempt, the stub is connected while it imports model.py
            "critical",
            "a has failed, for 1.0 min now",
            server(
                counts({"a": model()}, importing={"a": (2.0, 7)}),
                failures={"a": BundleFailure("model.py has been importing for 60 s", since=1000.0)},
            ),
        ),
        ("not_served", "critical", "a has not been served for 30 s", server(counts({}), missing={"a": 30.0, "b": 1.0})),
        (
            "not_served",
            "note",
            "b has not been served for 50 s",
            server(
                counts({}),
                starting=True,
                missing={"a": 50.0, "b": 50.0},
                entries={"a@1": entry("a", state="loading")},
            ),
        ),
        (
            "not_served",
            "warning",
            "b has not been served for 15.0 min",
            server(counts({}), starting=True, missing={"b": 900.0}),
        ),
        (
            "settings_refused",
            "warning",
            "the settings file is not used: line 3",
            server(counts({}), settings_refused="line 3"),
        ),
        (
            "openai_closed",
            "note",
            "OpenAI's endpoints are off: keys.yaml: No such file",
            server(counts({}), openai_closed="keys.yaml: No such file"),
        ),
        (
            "settings_waiting",
            "note",
            "runtime.spare: wait for a restart",
            server(counts({}), settings_waiting=["runtime.spare: wait for a restart"]),
        ),
        ("shm_full", "warning", "40 B of 1 kB of /dev/shm are free", server(counts({}), shm=ShmUsage(40, 1000))),
        ("traces_lost", "note", "the collector did not accept 9 spans of traces", server(counts({}), spans={"exported": 5, "failed": 9})),
        (
            "renewal_failed",
            "warning",
            "the changed files of control.token_file cannot be used, so the last valid ones stay in use",
            server(counts({}), renewals=[FileState("control.token_file", None, "it holds no token")]),
        ),
        (
            "certificate_ends",
            "warning",
            "the certificate of control.listen ends in 1.0 min",
            server(counts({}), renewals=[FileState("control.listen", 1120.0, "")]),
        ),
        (
            "certificate_ends",
            "critical",
            "the certificate of control.listen ended 1.0 min ago",
            server(counts({}), renewals=[FileState("control.listen", 1000.0, "")]),
        ),
        (
            "runtime_down",
            "critical",
            "the runtime of device 0 has not answered for 30 s",
            server(devices={0: DeviceFigures(down_s=30.0)}),
        ),
    ],
)  # fmt: skip
def test_trouble_raises_its_finding(name: str, severity: str, words: str, now: ServerFigures) -> None:
    """Each trouble alone raises its finding with its figures, and no other urgent finding."""
    before = replace(now, t=0.0, unix_s=1000.0, devices={}, spans={}, queues={})
    findings = found(now, before)

    assert name in findings
    assert findings[name].severity == severity
    assert words in findings[name].evidence
    assert {finding.name for finding in findings.values() if finding.severity != "note"} <= {name}


def refused_for_memory(size: int, pinned: int) -> ServerFigures:
    """Return the figures of a server that refused a model of this size because of these pinned bytes."""
    counted = counts(
        {"a": model(outcomes=outcomes(refused=2), refused={"no_memory": 2}, device_bytes=size)},
        pinned_bytes=pinned,
    )
    return server(counted)


@pytest.mark.parametrize(
    ("name", "cause", "cure", "now"),
    [
        ("no_memory", "pinned weights take 95 MB", "rsrv unpin", refused_for_memory(10 * MB, 95 * MB)),
        (
            "no_memory",
            "another program uses the memory",
            "rsrv compact",
            refused_for_memory(10 * MB, 20 * MB),
        ),
        ("no_memory", "another program uses the memory", "rsrv compact", refused_for_memory(200 * MB, 0)),
        (
            "runtime_down",
            "the runtime's process 7 exists",
            "kill -CONT 7",
            server(devices={0: DeviceFigures(down_s=30.0, silent_pid=7)}),
        ),
        ("runtime_down", "", "", server(devices={0: DeviceFigures(down_s=30.0)})),
        (
            "slow_import",
            "line 7 of its model.py loops, or waits",
            "the import fails at 1.0 min (stub.hook_timeout_s)",
            server(counts({"a": model()}, importing={"a": (45.0, 7)})),
        ),
        (
            "slow_import",
            "its model.py loops, or waits",
            "if stub.hook_timeout_s is a number",
            server(
                counts({"a": model()}, importing={"a": (45.0, 0)}),
                settings="stub: {hook_timeout_s: null}",
            ),
        ),
        (
            "bundle_refused",
            "torn",
            "fix the cause",
            server(counts({"a": model()}), failures={"a": BundleFailure("torn", since=1.0)}, barred="fixed"),
        ),
        (
            "bundle_refused",
            "the repository is not updated: fixed",
            "restart tritonserver to serve the bundles as they are now",
            server(
                counts({"a": model()}),
                failures={"a": BundleFailure("the repository is not updated: fixed", since=1.0)},
                barred="fixed",
            ),
        ),
    ],
)
def test_the_cause_follows_the_figures(name: str, cause: str, cure: str, now: ServerFigures) -> None:
    """The same trouble may have one of several causes, and each cause has its own cure."""
    finding = found(now, replace(now, t=0.0, unix_s=1000.0, devices={}, spans={}, queues={}))[name]

    assert cause in finding.cause
    assert cure in finding.cure
    assert ("kill -CONT" in finding.cure) == ("kill -CONT" in cure)


@pytest.mark.parametrize(
    ("usage", "cause", "cures"),
    [
        (
            ShmUsage(1 * MB, 64 * MB, weights=4_600_000, requests={"a": 49 * MB, "b": MB, "c": MB}),
            "inputs and outputs of requests for a take 49 MB, requests for other models take 2 MB, host copies of weights take 4.6 MB, other files take 7.4 MB",
            {"models.a.max_queue_depth"},
        ),
        (
            ShmUsage(1 * MB, 64 * MB, weights=60 * MB, requests={"a": MB}),
            "inputs and outputs of requests for a take 1 MB, host copies of weights take 60 MB, other files take 2 MB",
            {"runtime.shared_host_weights"},
        ),
        (ShmUsage(1 * MB, 64 * MB), "other files take 63 MB", set()),
    ],
    ids=["requests", "weights", "other programs"],
)
def test_a_full_shm_names_whose_bytes_it_holds(usage: ShmUsage, cause: str, cures: set[str]) -> None:
    """The advice about a full /dev/shm is for its largest user: weights, or the requests of a model."""
    finding = found(server(counts({"a": model()}), shm=usage))["shm_full"]

    assert finding.cause == cause
    settings = {"models.a.max_queue_depth", "runtime.shared_host_weights"}
    assert {key for key in settings if key in finding.cure} == cures
    assert "--shm-size" in finding.cure


def test_a_start_that_compiles_without_a_cache_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a start compiles and `runtime.compilation_cache_dir` is null, the finding names this setting as the cause.

    If the setting names a folder, the finding says that the executables were not in that folder.
    """
    monkeypatch.delenv("RSRV_RUNTIME__COMPILATION_CACHE_DIR", raising=False)
    compiled = counts({"a": model()}, compile=times(2, 20.5, LONG_SECONDS))
    for settings, cause in (
        ("runtime: {compilation_cache_dir: null}", "runtime.compilation_cache_dir is null"),
        ("runtime: {compilation_cache_dir: /cache}", "the executables were not in /cache"),
    ):
        now = server(compiled, settings=settings)
        assert cause in found(now, replace(now, t=0.0, devices={}))["compiled_at_start"].cause


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("weights_thrash", serving(misses=1, evictions={"room": 1})),
        ("certificate_ends", server(counts({}), renewals=[FileState("control.listen", 1e9, "")])),
        ("renewal_failed", server(counts({}), renewals=[FileState("control.token_file", None, "")])),
        ("weights_thrash", serving(misses=900, evictions={"idle": 900})),
        ("over_pinned", server(counts({}, pinned_bytes=100 * MB))),
        ("waits_in_triton", server(counts({"a": model()}), queues={"a": (1000, 50.0)})),
        ("waits_in_triton", server(counts({"a": model(9000)}), queues={"a": (9000, 900.0)})),
        ("weights_too_big", server(counts({"a": model()}, budget_bytes=None))),
        ("overloaded", serving(15000, queued=30, device_seconds=60.0)),
        ("uneven_devices", server(counts({"a": model(device_seconds=57.0)}), counts({"b": model(0)}))),
        (
            "disk_loads",  # the model has no weights
            serving(host_bytes=0, device_bytes=0, loads=9, load=times(9, 0.2)),
        ),
        (
            "disk_loads",
            server(
                counts({"a": model(host_bytes=0, loads=9, load=times(9, 0.2))}),
                settings="models: {a: {residency: unpinned}}",
            ),
        ),
        ("padding", serving(useful_rows=5000, padded_rows=3000)),
        (
            "padding",  # an execution of a smaller size would cost as much
            serving(1000, {1: 0.02, 16: 0.02}, padded_rows=15000),
        ),
        ("single_rows", serving(7000, device_seconds=50.0)),
        ("starved", server(counts({name: model(5000, queue_wait=times(5000, 0.12)) for name in "abc"}))),
        ("held_back", serving(queue_wait=times(1000, 0.005))),
        (
            "held_back",  # the model's requests share executions
            server(
                counts({"a": model(dispatches=400, queue_wait=times(1000, 0.005))}),
                settings="models: {a: {max_delay_us: 5000}}",
            ),
        ),
        ("slow_hooks", serving(hooks={"pre": times(1000, 0.0005)})),
        ("requests_fail", serving(10000, outcomes=outcomes(answered=10000, failed=3))),
        ("queue_full", serving(refused={"queue_full": 4})),
        (
            "queue_full",  # one request of 200 is refused
            serving(outcomes=outcomes(answered=9950, refused=50), refused={"queue_full": 50}),
        ),
        ("not_resident", serving(refused={"not_resident": 1})),
        ("bad_requests", serving(responses={"ok": 1000, "invalid": 9})),
        ("deadlines_queue", serving(missed={"queue": 4})),
        ("meta_waits", server(counts({"m": model(50, meta=True, queued=2, executing=2, calls=9)}))),
        ("paused", server(counts({"a": model()}), entries={"a@1": entry("a", paused="hold")})),
        ("model_failed", server(counts({}), entries={"a@1": entry("a", state="loading")})),
        ("model_failed", server(counts({}), failures={"a": BundleFailure("torn", 0.0)}, cold=frozenset("a"))),
        (
            "not_served",
            server(counts({}), missing={"a": 30.0}, entries={"a@1": entry("a", state="loading")}),
        ),
        ("shm_full", server(counts({}), shm=None)),
        ("runtime_down", server(devices={0: DeviceFigures(down_s=1.0)})),
        ("runtime_down", server(devices={0: DeviceFigures(down_s=900.0, asleep=True)})),
    ],
)  # fmt: skip
def test_what_is_well_does_not_raise_it(name: str, now: ServerFigures) -> None:
    """Figures of a healthy server that are close to a finding do not raise it."""
    assert name not in found(now)


def test_rates_are_of_the_window() -> None:
    """Failures before the window are not counted.

    Failures in the window are compared with the requests of the window only, even after many earlier requests.
    """
    bad = model(outcomes=outcomes(failed=30), responses={"ok": 1000, "internal": 30})
    past = server(counts({"a": bad}))
    well = model(2000, outcomes=outcomes(answered=2000, failed=30), responses={"ok": 2000, "internal": 30})
    assert found(server(counts({"a": well}), t=120.0), past) == {}

    past = serving(100_000)
    later = model(100_100, outcomes=outcomes(answered=100_100, failed=30))
    assert "30 of 130" in found(server(counts({"a": later}), t=120.0), past)["requests_fail"].evidence


def test_a_new_runtime_and_a_model_that_came_back_count_from_zero() -> None:
    """From counters that began again at zero, nothing is subtracted. A runtime that was replaced is a finding."""
    past = serving(5000)
    reborn = DeviceFigures(
        instance="2", since=100.0, records=counts({"a": model(outcomes=outcomes(failed=30))}), lives=3
    )
    findings = found(server(counts({}), t=120.0, devices={0: reborn}), past)
    assert "30 of 1030" in findings["requests_fail"].evidence
    assert "the runtime of device 0 died 2 times, in" in findings["runtime_restarts"].evidence
    assert findings["runtime_restarts"].severity == "warning"
    both = found(server(counts({}), t=120.0, devices={0: replace(reborn, restarts=1)}), past)[
        "runtime_restarts"
    ]
    assert "died 1 time, and `rsrv restart` replaced the runtime of device 0 1 time, in" in both.evidence
    assert both.severity == "note"
    asked_for = server(counts({}), t=120.0, devices={0: replace(reborn, restarts=2)})
    assert (finding := found(asked_for, past)["runtime_restarts"]).cause == "an operator's `rsrv restart`"
    assert finding.severity == "note"

    before_the_first = server(counts({}), devices={0: DeviceFigures(lives=0)})
    assert found(server(counts({}), t=120.0), before_the_first) == {}

    again = server(counts({"a": model(100)}), t=120.0)
    assert found(again, past) == {}


def test_a_process_that_ended_in_the_window_is_told() -> None:
    """Ends of processes before the window are not counted.

    There is one finding for all models. It begins with the model whose process has ended most often.
    """
    past = server(counts({}), process_ends={"a": 1, "b": 1})
    now = replace(past, t=120.0, process_ends={"a": 2, "b": 4, "c": 1})
    finding = found(now, past)["process_ended"]
    assert finding.evidence.startswith("the process of b in Triton ended 3 times in 1.0 min")
    assert finding.evidence.endswith("; also a, c")
    assert found(replace(now, t=180.0), now) == {}


def test_lost_spans_and_waits_before_the_window_are_forgotten() -> None:
    """Only spans and waits in the window are counted. The counters only grow, so otherwise a finding would never end."""
    past = server(counts({}), spans={"failed": 9, "dropped": 4}, queues={"a": (1000, 900.0)})
    now = replace(past, t=120.0, spans={"failed": 9, "dropped": 6})
    (finding,) = found(now, past).values()
    assert finding.evidence == (
        "the collector did not accept 0 spans of traces, and 2 did not fit into the buffer"
    )
    assert found(replace(now, t=180.0), now) == {}


def test_the_window_of_a_new_runtime_begins_with_it() -> None:
    """For a new runtime, the window begins at its start: 15 s of executions in its 20 s are 75 %."""
    past = serving(device_seconds=50.0)
    reborn = DeviceFigures(instance="2", since=100.0, records=counts({"a": model(device_seconds=15.0)}))

    (window,) = windows(past, server(t=120.0, devices={0: reborn}))

    assert (window.seconds, window.busy) == (20.0, 0.75)


def test_padding_names_the_size_that_saves_most() -> None:
    """For rows of 3 and the compiled sizes 1 and 16, the finding recommends size 4. The saving follows from the measured costs."""
    rows: dict[str, Any] = {"batch_rows": times(1000, 3, ROWS), "useful_rows": 3000, "padded_rows": 13000}
    cure = found(serving(**rows))["padding"].cure
    # Size 4 costs 0.004 + 0.016 * 3 / 15 instead of 0.02.
    assert cure.startswith(
        "also export batch size 4, `rsrv-bundle export --batch-sizes 1,4,16` (saves up to 64% of"
    )

    unknown = serving(1000, {}, **rows)
    assert found(unknown)["padding"].cure.startswith("also export batch size 4 (costs")


def test_the_model_with_most_requests_speaks_for_all() -> None:
    """If hundreds of models have the same trouble, there is one finding, which names some of them."""
    failing = {f"m{n}": model(outcomes=outcomes(answered=1000 + n, failed=50)) for n in range(300)}
    finding = found(server(counts(failing)))["requests_fail"]
    assert finding.evidence.startswith("m299: 50 of 1349")
    assert finding.evidence.endswith("; also m298, m297, m296 and 296 more")


def test_bytes_that_are_asked_for_count_shared_tensors_once_and_pinned_models() -> None:
    """The needed bytes are those of models with requests and of pinned models. Shared tensors are counted once.

    Tensors that such a model shares with an idle model are also counted once.
    """
    thrashing = model(
        100, misses=78, evictions={"room": 70}, loads=78, load=times(78, 0.026), weights=pb.WEIGHTS_ABSENT
    )
    models = {"a": thrashing, "b": thrashing, "pinned": model(0), "idle": model(0)}
    shared = [
        pb.SharedTensors(bytes=4 * MB, models=["a", "b"]),
        pb.SharedTensors(bytes=9 * MB, models=["a", "idle"]),
    ]
    now = server(
        counts(models, shared=shared, budget_bytes=20 * MB),
        settings="runtime: {weight_budget_bytes: 20000000}\nmodels: {pinned: {residency: device}}",
    )
    finding = found(now)["weights_thrash"]
    assert finding.evidence.startswith("weights thrash: requests need 26 MB, but 20 MB fit")
    assert finding.cure.startswith("set runtime.weight_budget_bytes: 26000000 in rsrv.yaml (6 MB more")


def test_findings_name_the_device_if_there_are_several() -> None:
    """With two devices, the evidence begins with the device."""
    findings = find(
        server(counts({}), counts({}), t=0.0),
        server(counts({}), counts({"a": model(outcomes=outcomes(refused=2), refused={"no_memory": 2})})),
    )
    assert [finding.evidence.partition(":")[0] for finding in findings] == ["device 1"]


@pytest.mark.parametrize(
    ("settings", "cause", "cure"),
    [
        ("placement: {mode: external}", "a gateway places models", "`rsrv gateway status a`"),
        ("models: {a: {devices: [0]}}", "models.a.devices: [0] excludes device 1", "add 1 to models.a.devices"),
        ("models: {a: {replicas: 1}}", "models.a.replicas is 1", "set models.a.replicas: auto"),
        ("placement: {replicas: 1}", "placement.replicas is 1", "set placement.replicas: auto"),
        ("models: {a: {devices: [0, 1]}}", "its weights have no room on device 1", "`rsrv placement`"),
    ],
)  # fmt: skip
def test_devices_are_uneven_for_a_reason(settings: str, cause: str, cure: str) -> None:
    """The finding names the model that takes most of the busy device, and the setting that keeps it from the other device."""
    busy, idle = counts({"a": model(queued=30, device_seconds=57.0)}), counts({"b": model(10)})
    finding = found(server(busy, idle, settings=settings))["uneven_devices"]
    assert finding.cause.startswith("a has 95% of device 0, and ")
    assert cause in finding.cause
    assert cure in finding.cure


def test_a_setting_may_be_why_rows_execute_alone() -> None:
    """For a model that a setting limits to one row at a time, the cure is to change the setting, and not another bundle."""
    now = server(
        counts({"a": model(7000, {1: 0.004}, device_seconds=50.0, queue_wait=times(7000, 0.25))}),
        settings="models: {a: {max_batch_size: 1}}",
    )
    assert found(now)["single_rows"].cure == "raise models.a.max_batch_size and `rsrv restart`"


def test_the_severest_come_first() -> None:
    """Critical findings are before warnings, and warnings are before notes."""
    now = server(
        counts({"a": model(outcomes=outcomes(failed=30))}, pinned_bytes=200 * MB),
        settings_waiting=["runtime.spare: wait for a restart"],
    )
    assert [finding.severity for finding in find(replace(now, t=0.0, devices={}), now)] == [
        "critical",
        "warning",
        "note",
    ]
