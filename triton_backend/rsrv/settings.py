"""rsrv.yaml: every setting, typed. Environment variables `RSRV_<SECTION>__<KEY>` win over the file.

The runtime and the generator read this; the stubs never do (they learn what they need at registration).
"""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from ruamel.yaml import YAML

from rsrv.explain import YamlError, explain, read_yaml
from rsrv.settings_fleet import GatewaySection, NodeSection, Section


class SettingsError(Exception):
    """The settings cannot be used; the message names the key and what to do."""


class SchedulerSection(Section):
    """Which model runs next, and how long requests may queue."""

    discipline: Literal["fair", "fifo", "edf"] = Field(
        "fair",
        description="Which model gets the device. fair: device time in proportion to the models' weights; "
        "fifo: the oldest request's; edf: the soonest deadline's, and requests that cannot make theirs end at once.",
    )
    depth: int | None = Field(
        None,
        ge=1,
        le=8,
        description="Executions given to the device at once; it runs them one after the other. null: 2 on a device "
        "that works beside the CPU, so that it has the next one when one ends; 1 on a CPU.",
    )
    max_queue_depth: int = Field(
        1024, ge=1, description="Requests of one model that may wait; one more is refused (QUEUE_FULL)."
    )
    launch_ahead_ms: float = Field(
        2.0,
        ge=0,
        allow_inf_nan=False,
        description="With a depth above 1, the next execution is given to the device this long before the running "
        "one is expected to end; until then requests may still join it.",
    )
    meta_concurrency: int = Field(
        2,
        ge=1,
        le=64,
        description="Runs of meta models that call others which are under way at once; the others wait, at most until "
        "their deadline. A run holds memory, not the device, while it does something between its calls.",
    )
    residency_factor: float = Field(
        4.0,
        ge=0,
        allow_inf_nan=False,
        description="A model with waiting requests keeps its weights on the device for at least this many times the "
        "time that loading them took.",
    )
    eviction: Literal["lru", "cost"] = Field(
        "lru",
        description="Whose weights give way among models that nobody waits for. lru: the least recently used; "
        "cost: those whose bytes save the least time of loading, by how often the model was asked for of late.",
    )


#: keys of the scheduler's section that a running runtime takes new values for
CHANGEABLE = (
    "discipline",
    "depth",
    "launch_ahead_ms",
    "meta_concurrency",
    "residency_factor",
    "eviction",
)


#: in what precision models multiply f32
Numerics = Literal["auto", "f32", "tf32"]


class RuntimeSection(Section):
    """The process that owns the device."""

    platform: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where models run. auto: jax's choice."
    )
    compilation_cache_dir: Path | None = Field(
        Path("~/.cache/rsrv/xla"),
        description="Compiled executables, kept for the next start. Whoever can write it can run code. null: none.",
    )
    numerics: Numerics = Field(
        "auto",
        description="In what precision models multiply f32. auto: as their modules say, else as the hardware likes, "
        "which on GPUs since Ampere may be TF32; f32: in f32, or the model is refused; tf32: as auto, and only on "
        "hardware with TF32. docs/exporting.md has more.",
    )
    memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that weights and executions may take together. jax's variable "
        "XLA_PYTHON_CLIENT_MEM_FRACTION wins.",
    )
    preallocate: bool = Field(
        True,
        description="Take that share when the runtime starts, so that nobody else can, and so that no allocation "
        "waits for the driver. jax's variable XLA_PYTHON_CLIENT_PREALLOCATE wins.",
    )
    weight_memory: Literal["jax", "driver"] = Field(
        "jax",
        description="Whose memory weights lie in on a GPU. jax: its allocator's, where a transfer waits for the "
        "executions launched before it; driver: CUDA's own, with a stream for transfers, and without preallocation. "
        "docs/scheduler.md compares.",
    )
    weight_budget_bytes: int | None = Field(
        None,
        ge=0,
        description="Device bytes that weights may take; more are kept on the host and loaded on demand, and "
        "scheduler.eviction says who gives way. null: what the device's memory leaves; no limit on a CPU.",
    )
    shared_host_weights: bool = Field(
        False,
        description="Whether the runtimes of several GPUs of a node share one host copy of the weights, in /dev/shm, "
        "which must hold them all (a container's --shm-size).",
    )
    watchdog_s: float | None = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="An execution that has not ended after this time, or after a hundred times what it is expected to "
        "take, if that is longer, hangs: the runtime ends, and the next one does not load that model. null: executions "
        "may take as long as they like.",
    )

    @model_validator(mode="after")
    def _has_tf32(self) -> "RuntimeSection":
        if self.numerics == "tf32" and self.platform == "cpu":
            raise ValueError("numerics: tf32 cannot be had with platform: cpu, which has no TF32")
        return self


class StubSection(Section):
    """How the processes inside Triton answer."""

    in_place_ms: float = Field(
        4.0,
        ge=0,
        description="Executions shorter than this are waited for inside execute(), which costs less CPU; longer "
        "ones are answered by other threads, which lets more requests reach the queue meanwhile. 0: never wait.",
    )
    hook_timeout_s: float | None = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="A hook that has not returned after this time hangs: all requests of its model that wait get an "
        "error, and the stub's process ends, to be loaded anew. null: hooks may take as long as they like.",
    )
    memory_limit_bytes: int | None = Field(
        None,
        ge=2**26,
        description="Private memory that a stub's process may take beyond what it has when its model is ready; a hook "
        "that wants more fails. Only stubs with hooks have a limit. null: half of what the machine or the container has.",
    )


#: how a meta model's calls of rsrv's models travel
Transport = Literal["direct", "bls"]


class MetaSection(Section):
    """How meta models call other models."""

    transport: Transport = Field(
        "direct",
        description="How calls of rsrv's models travel. direct: to the runtime, tensors by reference, and Triton does "
        "not know those models; bls: through Triton, which then counts and traces them. The repository is laid out for "
        "one of them: run rsrv-gen again after a change.",
    )


class LifecycleSection(Section):
    """How the set of models changes."""

    mode: Literal["dynamic", "static", "explicit"] = Field(
        "dynamic",
        description="Who changes which models are served. dynamic: whoever changes the bundles, which are watched; "
        "static: nobody; explicit: an external control plane, through Triton's repository API, and it alone moves "
        "weights to the device and away (a request for a model that is not there is refused, NOT_RESIDENT).",
    )
    bundles: list[Path] = Field(
        default_factory=list,
        description="Where the bundles are that the repository was made of: what rsrv-gen was given. These are watched.",
    )
    link: Literal["hard", "copy", "symlink"] = Field(
        "hard", description="How the bundles' files come into the repository: rsrv-gen's --link."
    )
    look_s: float = Field(
        1.0,
        ge=0.05,
        le=3600,
        allow_inf_nan=False,
        description="Pause between two looks at bundles that have changed. A change counts when two looks agree, so "
        "that half-copied bundles are not taken. While no change is reported, the pause is five times as long.",
    )

    @property
    def poll_s(self) -> float:
        """Seconds between looks while no change is reported: network and bind mounts report none."""
        return 5 * self.look_s


class ControlSection(Section):
    """The service that shows and steers a running server, rsrv.control.v1 over gRPC."""

    enabled: bool = Field(
        True,
        description="Whether there is a control process. Without it nobody watches bundles, either, and models whose "
        "stub died stay dead.",
    )
    listen: str | None = Field(
        None,
        description="host:port to listen on as well, beside the Unix socket in the runtime's private directory. It "
        "needs tls_client_ca (with tls_certificate and tls_key), or token_file: TLS alone lets everybody in.",
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file with the certificate chain for `listen`."
    )
    tls_key: Path | None = Field(None, description="PEM file with its private key.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file with the authorities whose client certificates are let in; null: none are asked for.",
    )
    token_file: Path | None = Field(
        None,
        description="File with a secret that clients of `listen` must send, as `authorization: Bearer SECRET`.",
    )
    profile_dir: Path = Field(
        Path("~/.cache/rsrv/profiles"),
        description="Where profiles of the runtime are written, each in its own folder.",
    )


class MetricsSection(Section):
    """What Prometheus is given, and the live page."""

    listen: str | None = Field(
        "127.0.0.1:8004",
        description="host:port of the control process's GET /metrics and of its live page. It asks for no token: let only "
        "Prometheus and operators reach it. null: none. A port that is taken costs a line in the log, and the metrics.",
    )
    token_file: Path | None = Field(
        None,
        description="File with a secret: who gives it to the live page, here or at the gateway, may steer from there. "
        "null: it only shows.",
    )
    triton: bool = Field(
        True,
        description="Whether each model also shows a few of its figures in Triton's own metrics, where that is possible.",
    )


class LogsSection(Section):
    """What the processes write into the server's log."""

    format: Literal["human", "json"] = Field(
        "human",
        description="Lines for people, or JSON objects for programs, one a line. Triton's own lines stay as they are.",
    )


class TracesSection(Section):
    """Traces of requests, as OpenTelemetry has them."""

    endpoint: str | None = Field(
        None,
        description="URL that takes spans by OTLP over HTTP, as http://localhost:4318/v1/traces. A request is traced if "
        "its client's trace context says so. It needs the extra `traces` and a control process (control.enabled). null: "
        "nothing is traced. The variables OTEL_EXPORTER_OTLP_* and OTEL_SERVICE_NAME are heeded.",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, endpoint: str | None) -> str | None:
        """Else only the first span would show that it is none."""
        if endpoint is not None and not re.fullmatch(r"(?i:https?)://[^\s/]\S*", endpoint):
            raise ValueError(f"{endpoint!r} is no URL; write it as http://localhost:4318/v1/traces")
        return endpoint


#: where the weights of a model are for sure
Residency = Literal["unpinned", "system", "device"]


class ModelSection(Section):
    """What differs for one model; absent keys take the general value."""

    max_queue_depth: int | None = Field(
        None, ge=1, description="As scheduler.max_queue_depth, for this model."
    )
    max_batch_size: int | None = Field(
        None, ge=1, description="Most rows in one execution; null: the largest compiled size."
    )
    weight: float = Field(
        1.0,
        ge=1e-3,
        le=1e3,
        allow_inf_nan=False,
        description="Share of device time relative to other models, under `fair`.",
    )
    residency: Residency = Field(
        "system",
        description="Where its weights are for sure. system: in host memory, from where they are loaded onto the "
        "device on demand; unpinned: only in the bundle's file, which each load reads; device: always on the device, "
        "beyond the budget if need be.",
    )
    max_delay_us: int = Field(
        0,
        ge=0,
        le=60_000_000,
        description="Requests may be held back this long for others to share their execution.",
    )


class Settings(BaseSettings):
    """All of rsrv.yaml."""

    model_config = SettingsConfigDict(
        env_prefix="RSRV_",
        env_nested_delimiter="__",
        # As in the file: else it would be the name of a directory.
        env_parse_none_str="null",
        extra="forbid",
        frozen=True,
    )

    scheduler: SchedulerSection = SchedulerSection()
    runtime: RuntimeSection = RuntimeSection()
    stub: StubSection = StubSection()
    meta: MetaSection = MetaSection()
    lifecycle: LifecycleSection = LifecycleSection()
    control: ControlSection = ControlSection()
    metrics: MetricsSection = MetricsSection()
    logs: LogsSection = LogsSection()
    traces: TracesSection = TracesSection()
    gateway: GatewaySection = GatewaySection()
    node: NodeSection = NodeSection()
    models: dict[str, ModelSection] = Field(default_factory=dict, description="Per model, by name.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings

    @property
    def traced(self) -> bool:
        """Whether there is anybody who wants traces, and would get them."""
        return self.traces.endpoint is not None and self.control.enabled

    def for_model(self, name: str) -> ModelSection:
        return self.models.get(name, ModelSection())


def load_settings(text: str = "", source: str = "rsrv.yaml") -> Settings:
    """Settings from the file's text and the environment. Raises SettingsError."""
    try:
        raw = read_yaml(text, of="sections")
    except YamlError as error:
        raise SettingsError(f"{source}: {error}") from None
    try:
        return Settings(**raw)
    except ValidationError as error:
        lines = (f"{source}: {explain(one, Settings, raw)}" for one in error.errors())
        raise SettingsError("\n".join(lines)) from None


def change_scheduler(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The same with other values in the scheduler's section, as a running runtime may be told. Raises SettingsError."""
    for key in changes:
        if key in SchedulerSection.model_fields and key not in CHANGEABLE:
            raise SettingsError(
                f"scheduler.{key}: cannot be changed while the runtime runs; {', '.join(CHANGEABLE)} can"
            )
    try:
        section = SchedulerSection(**{**settings.scheduler.model_dump(), **changes})
    except ValidationError as error:
        # A few will do: explaining takes time, and whoever asks holds up a runtime.
        errors = [{**e, "loc": ("scheduler", *e["loc"])} for e in error.errors()[:10]]
        lines = (explain(e, Settings, {"scheduler": dict(changes)}) for e in errors)
        raise SettingsError("\n".join(lines)) from None
    return settings.model_copy(update={"scheduler": section})


def change_model(settings: Settings, name: str, changes: Mapping[str, Any]) -> Settings:
    """The same with other values in one model's section. Raises SettingsError."""
    changed = {**settings.for_model(name).model_dump(), **changes}
    try:
        section = ModelSection(**changed)
    except ValidationError as error:
        errors = [{**one, "loc": ("models", name, *one["loc"])} for one in error.errors()]
        lines = (explain(one, Settings, {"models": {name: changed}}) for one in errors)
        raise SettingsError("\n".join(lines)) from None
    return settings.model_copy(update={"models": {**settings.models, name: section}})


def dump_settings(settings: Settings) -> str:
    """rsrv.yaml with every key and what it means; loading it gives the same settings."""
    out = io.StringIO()
    out.write("# rsrv's settings. RSRV_<SECTION>__<KEY> in the environment wins over this file.\n")
    values = settings.model_dump(mode="json")
    for section, info in Settings.model_fields.items():
        if section == "models":
            continue
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        out.write(f"\n{section}:\n")
        for key, field in model.model_fields.items():
            out.write(f"  # {field.description}\n")
            out.write(_yaml({key: values[section][key]}, indent="  "))
    out.write(f"\n# {Settings.model_fields['models'].description}\n")
    out.write(
        _yaml(
            {
                "models": {
                    n: {k: v for k, v in m.items() if v is not None} for n, m in values["models"].items()
                }
            }
        )
    )
    return out.getvalue()


def _yaml(value: dict[str, Any], indent: str = "") -> str:
    out = io.StringIO()
    yaml = YAML()
    yaml.dump(value, out)
    return "".join(f"{indent}{line}\n" for line in out.getvalue().splitlines())
