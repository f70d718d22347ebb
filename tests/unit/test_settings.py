"""The settings in rsrv.yaml have types, and the environment overrides them. A wrong key is refused with the nearest known one."""

from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rsrv.settings import ModelSection, Settings, SettingsError, dump_settings, load_settings, read_settings


def test_no_file_means_the_defaults() -> None:
    """Without a file, every setting has its default."""
    assert load_settings("").scheduler.max_queue_depth == 1024


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """RSRV_<SECTION>__<KEY> overrides the file, and is read with the same types."""
    monkeypatch.setenv("RSRV_SCHEDULER__MAX_QUEUE_DEPTH", "7")

    settings = load_settings("scheduler: {max_queue_depth: 5, depth: 2}")

    assert (settings.scheduler.max_queue_depth, settings.scheduler.depth) == (7, 2)


def test_null_in_the_environment_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text null in the environment means no value, as in the file."""
    monkeypatch.setenv("RSRV_RUNTIME__COMPILATION_CACHE_DIR", "null")
    monkeypatch.setenv("RSRV_RUNTIME__WATCHDOG_S", "null")

    runtime = load_settings("scheduler: {depth: 2}").runtime

    assert (runtime.compilation_cache_dir, runtime.watchdog_s) == (None, None)


def test_what_is_written_reads_back_the_same() -> None:
    """Settings that are written beside the models are the same when they are read."""
    settings = load_settings(
        "models: {a: {max_queue_depth: 3, idle: {device: 10m, host: never}, warm_at: Mon-Fri 08:55}, 'no': {max_batch_size: 8}}\nstub: {in_place_ms: 0}\n"
        "runtime: {shared_host_weights: true, idle: {host: 1h, server: 1d}}\nmeta: {transport: bls}"
    )

    assert load_settings(dump_settings(settings)) == settings


def test_the_dump_documents_every_key() -> None:
    """The dumped settings have a comment for every key, because users read them as an example."""
    text = dump_settings(load_settings(""))

    for key in ("max_queue_depth", "compilation_cache_dir", "in_place_ms", "transport"):
        before = text[: text.index(f"{key}:")].splitlines()
        assert before[-2].lstrip().startswith("# ") or before[-1].lstrip().startswith("# ")


def test_a_model_has_the_runtimes_start_and_limits_where_it_has_none() -> None:
    """A model's own key takes precedence over the runtime's key. For other keys, the runtime's are used."""
    settings = load_settings(
        "runtime: {start: lazy, idle: {device: 10m, host: 1h}}\nmodels: {m: {start: eager, idle: {host: never}}}"
    )

    own, other = settings.for_model("m"), settings.for_model("other")

    assert (own.start, other.start) == ("eager", "lazy")
    assert (own.idle.device, own.idle.host, own.idle.executable) == (600, inf, inf)
    assert (other.idle.device, other.idle.host, other.idle.executable) == (600, 3600, inf)
    assert load_settings().for_model("m").start == "eager"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("90s", 90), ("'1.5h'", 5400), ("2d", 172_800), (f"'{'9' * 400}'", inf)],
)
def test_a_duration_is_seconds_or_has_a_unit(text: str, seconds: float) -> None:
    """A duration is in seconds or has a unit, in the file and in the environment."""
    assert load_settings(f"runtime: {{idle: {{host: {text}}}}}").runtime.idle.host == seconds


#: The ends of the names of settings that are times or sizes. Each has an example text and its value in the setting's unit.
UNITS = {"_s": ("5m", 300.0), "_ms": ("0.02s", 20.0), "_us": ("2ms", 2000), "_bytes": ("1GiB", 2**30)}


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Settings.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield name, kind
    yield "models.cats", ModelSection


KEYS = [
    (f"{section}.{key}", end)
    for section, kind in sections()
    for key in kind.model_fields
    for end in UNITS
    if key.endswith(end)
]


@pytest.mark.parametrize(("key", "end"), KEYS)
def test_every_time_and_size_may_have_a_unit(monkeypatch: pytest.MonkeyPatch, key: str, end: str) -> None:
    """Every time or size may have a unit, in the file and in the environment.

    The error about a text that is not a time or size shows the possible forms.
    """
    assert len(KEYS) > 10
    written, expected = UNITS[end]
    section, _, name = key.rpartition(".")
    nested = "{" + f"{name}: {written}" + "}"
    for part in reversed(section.split(".")):
        nested = "{" + f"{part}: {nested}" + "}"

    value: Any = load_settings(nested)
    for part in key.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    assert value == expected
    forms = (
        "a size such as 512MB, 16GB or 16GiB" if end == "_bytes" else "a time such as 500ms, 90s, 5m or 1h"
    )
    with pytest.raises(SettingsError, match=rf"{key}: must be .*{forms} \(found 'soon'\)"):
        load_settings(nested.replace(written, "soon"))
    if section in Settings.model_fields:
        monkeypatch.setenv(f"RSRV_{section}__{name}".upper(), written)
        assert getattr(getattr(load_settings(), section), name) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler: {dept: 3}", "rsrv.yaml: scheduler.dept: unknown key; did you mean 'depth'?"),
        ("shceduler: {}", "rsrv.yaml: shceduler: unknown key; did you mean 'scheduler'?"),
        ("models: {m: {max_batch: 3}}", "models.m.max_batch: unknown key; did you mean 'max_batch_size'?"),
        ("scheduler: {depth: many}", "scheduler.depth: "),
        ("scheduler: {depth: 0}", "scheduler.depth: "),
        ("runtime: {devices: [gpu0]}", "runtime.devices: 'gpu0' is not a device; write a number, a UUID"),
        ("runtime: {devices: [0.5]}", "runtime.devices: 0.5 is not a device; write a number, a UUID"),
        ("runtime: {devices: [null]}", "runtime.devices: None is not a device"),
        ("runtime: {devices: 2}", "runtime.devices: write all, or a list of devices: [0, 1]"),
        (
            "aliases: {a: {b: 1.0e+308, c: 1.0e+308}}",
            "aliases.a: must be a model's name, or a mapping from models",
        ),
        ("runtime: {devices: []}", "runtime.devices: write all, or a list of devices: [0, 1]"),
        ("runtime: {devices: [0, 1, 0]}", "runtime.devices: 0 is listed twice"),
        (
            f"runtime: {{devices: [{'cpu, ' * 64}]}}",
            "runtime.devices: 64 devices, but a server has at most 63",
        ),
        ("runtime: {devices: [-1]}", "runtime.devices: -1 is negative"),
        ("- a list", "must be a mapping"),
        ("a: [", "rsrv.yaml: not valid YAML: line 2: did not find expected node content"),
        ("scheduler: {zzz: 1}", "known are discipline, depth"),
        ("scheduler: {discipline: lifo}", "scheduler.discipline: must be 'fair', 'fifo' or 'edf'"),
        ("scheduler: {meta_concurrency: 0}", "scheduler.meta_concurrency: "),
        ("runtime: {weight_budget_bytes: -1}", "runtime.weight_budget_bytes: "),
        ("meta: {transport: rpc}", "meta.transport: must be 'direct' or 'bls'"),
        ("lifecycle: {debounce_s: 5}", "lifecycle.debounce_s: unknown key"),
        ("traces: {endpoint: 'localhost:4318/v1/traces'}", "traces.endpoint: "),
        ("traces: {endpoint: 'grpc://localhost:4317'}", "write it as http://localhost:4318/v1/traces"),
        ("traces: {endpoint: ''}", "traces.endpoint: "),
        ("gateway: {workers: [{host: 'http://gpu1'}]}", "'http://gpu1' is not a name or address"),
        ("gateway: {workers: [{host: '[[::1]]'}]}", "is not a name or address"),
        (
            "runtime: {idle: {device: 10x}}",
            "runtime.idle.device: must be a time above 0 such as 600, 90s, 10m",
        ),
        ("runtime: {idle: {host: 0}}", "runtime.idle.host: must be a time above 0"),
        ("runtime: {idle: {host: true}}", "runtime.idle.host: must be a time above 0"),
        ("runtime: {idle: {disk: 1h}}", "runtime.idle.disk: unknown key; known are device, host"),
        ("runtime: {idle: 1h}", "runtime.idle: must be a mapping"),
        ("runtime: {start: later}", "runtime.start: must be 'eager' or 'lazy'"),
        ("runtime: {start_timeout_s: 0}", "runtime.start_timeout_s: "),
        ("runtime: {host_memory_bytes: -1}", "runtime.host_memory_bytes: "),
        ("models: {m: {idle: {server: 1h}}}", "models.m.idle: server applies to the whole server"),
        ("models: {m: {warm_at: noon}}", "'noon' is not a time; write it as 08:55, Mon-Fri 08:55"),
        ("models: {m: {warm_at: [08:55, Mon-Fri 25:00]}}", "'Mon-Fri 25:00' is not a time"),
        ("models: {m: {weight: 0}}", "models.m.weight: "),
        ("models: {m: {max_delay_us: 1.5}}", "models.m.max_delay_us: "),
    ],
)
def test_a_wrong_file_is_refused_by_key(text: str, message: str) -> None:
    """The error about a wrong setting names the file and the key, and says what to do."""
    with pytest.raises(SettingsError) as caught:
        load_settings(text)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            "RSRV_SHCEDULER__DEPTH=3",
            "RSRV_SHCEDULER__DEPTH in the environment: there is no section 'shceduler'; did you mean 'scheduler'?",
        ),
        (
            "RSRV_SCHEDULER__DETPH=3",
            "RSRV_SCHEDULER__DETPH: scheduler.detph: unknown key; did you mean 'depth'?",
        ),
        ("RSRV_MODELS__CATS__WEIGHT=0", "RSRV_MODELS__CATS__WEIGHT: models.cats.weight: "),
        (
            "RSRV_LIFECYCLE__BUNDLES=/bundles",
            "lifecycle.bundles: must be a valid list (found '/bundles'). Write JSON, as RSRV_LIFECYCLE__BUNDLES=",
        ),
        (
            "RSRV_RUNTIME=cpu",
            "RSRV_RUNTIME: runtime: must be a mapping (found 'cpu'). Write JSON, as RSRV_RUNTIME=",
        ),
        ("RSRV_PLACEMENT__REPLICAS=many", "placement.replicas: must be a number from 1 to 1024, auto or all"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, message: str
) -> None:
    """If a variable of the environment has an unknown section or key, or a wrong value, the error names it, and not the file."""
    monkeypatch.setenv(*variable.split("=", 1))

    with pytest.raises(SettingsError) as caught:
        load_settings("", "rsrv.yaml")

    assert message in str(caught.value)
    assert "rsrv.yaml" not in str(caught.value)


def test_other_variables_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of rsrv without a section, and Kubernetes' variables for a service `rsrv`, are ignored."""
    before = load_settings("")
    for name in ("RSRV_RUNTIME_PYTHON", "RSRV_RUNTIME_DIR", "RSRV_PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(name, "x")

    assert load_settings("") == before


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    """If a file of settings is not text, the error has its name and what to do."""
    (tmp_path / "rsrv.yaml").write_bytes(b"\xff")

    with pytest.raises(SettingsError, match=r"rsrv\.yaml cannot be read: .*\. Name a file of settings"):
        read_settings(tmp_path / "rsrv.yaml")
