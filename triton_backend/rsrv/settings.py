"""All settings of rsrv.yaml and their types. Environment variables `RSRV_<SECTION>__<KEY>` take precedence over the file.

The runtime, the control process, the gateway and the generator read the settings. Stubs do not: they get their settings when
they register. All sections are in this module, because the generator needs all of them and may not import the other parts, and
because a user reads the file as a whole.
"""

import io
import os
import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from rsrv.explain import YamlError, explain, read_yaml
from rsrv.scheduler.settings import DisciplineName
from rsrv.settings_fleet import GatewaySection, PlacedModelSection, PlacementSection, Section
from rsrv.settings_times import WeekTime
from rsrv.settings_units import Bytes, Duration, Microseconds, Milliseconds, Seconds
from rsrv.text import nearest
from rsrv_bundle import yaml12


class SettingsError(Exception):
    """The settings cannot be used. The message names the key and the remedy."""


class SchedulerSection(Section):
    """Order of models on the device, and limits of queues."""

    discipline: DisciplineName = Field(
        "fair",
        description="Which model gets the device. fair: device time in proportion to the models' weights; fifo: the oldest "
        "request first; edf: the earliest deadline first.",
    )
    depth: int | None = Field(
        None,
        ge=1,
        le=8,
        description="Maximum number of executions on the device at once; they run one after the other. null: 2, or 1 on a CPU.",
    )
    max_queue_depth: int = Field(
        1024,
        ge=1,
        description="Maximum number of waiting requests of one model. Further requests are refused (QUEUE_FULL).",
    )
    meta_concurrency: int = Field(
        2,
        ge=1,
        le=64,
        description="Maximum number of concurrent runs of meta models; further runs wait.",
    )


#: Precision in which models multiply f32.
Numerics = Literal["auto", "f32", "tf32"]


#: Maximum number of devices of a server. The placement table has a bit for each device, and one for pins.
MAX_DEVICES = 63


#: When a model starts: with the server, or with its first request.
Start = Literal["eager", "lazy"]


class IdleSection(Section):
    """Times without requests after which a model leaves a place: `never`, or a time such as 600, 90s, 10m, 1h or 2d."""

    device: Duration = Field(inf, description="The weights leave the device.")
    host: Duration = Field(inf, description="The weights also leave host memory.")
    executable: Duration = Field(
        inf,
        description="The model becomes cold: the runtime holds no part of it, and the next request starts it.",
    )
    server: Duration = Field(
        inf,
        description="If the server has no requests at all, its runtimes sleep, as after `rsrv sleep`. Only in runtime.idle.",
    )


class RuntimeSection(Section):
    """The process that owns the device."""

    platform: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Where models run. auto: on a GPU, or on the CPU if there is no NVIDIA card or the environment hides it.",
    )
    devices: Literal["all"] | list[int | str] = Field(
        "all",
        description="Devices of the server. all: the visible GPUs or MIG instances, or the CPU if there is none. A list contains "
        "numbers of visible GPUs in nvidia-smi's order, UUIDs (GPU-... or MIG-...), or cpu.",
    )
    compilation_cache_dir: Path | None = Field(
        Path("~/.cache/rsrv/xla"),
        description="Folder of compiled executables for the next start. Whoever can write to it can run code. null: none.",
    )
    numerics: Numerics = Field(
        "auto",
        description="Precision in which models multiply f32. auto: as their modules say, otherwise the hardware's default, "
        "which on GPUs since Ampere may be TF32; f32: in f32, or the model is refused; tf32: as auto, but only on "
        "hardware with TF32. More in docs/exporting.md.",
    )
    memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that the runtime takes when it starts. Two servers with at most 0.5 each may "
        "share a GPU. jax's variable XLA_CLIENT_MEM_FRACTION overrides it.",
    )
    start: Start = Field(
        "eager",
        description="When models start. eager: when the server starts; lazy: with their first request.",
    )
    start_timeout_s: Seconds = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="How long requests wait for each step of a model's start, such as a compiled module. They wait at most ten"
        " times as long in all, and then are refused (STARTING).",
    )
    idle: IdleSection = Field(
        IdleSection(),
        description="When models without requests leave the device, the host and the runtime.",
    )
    host_memory_bytes: Bytes | None = Field(
        None,
        ge=0,
        description="Host memory for copies of weights and for state of sequences. Beyond it, the least recently used copies and "
        "states are removed. null: three quarters of the container's or the machine's memory.",
    )
    weight_budget_bytes: Bytes | None = Field(
        None,
        ge=0,
        description="Device memory for weights; other weights are loaded on demand. null: all memory of the device that "
        "executions do not need; on a CPU, half of the host's.",
    )
    shared_host_weights: bool | None = Field(
        None,
        description="Keep one host copy of the weights for all runtimes of one user, in /dev/shm. true: /dev/shm must have "
        "room for all of them; null: in at most half of /dev/shm, and further weights have a copy per device.",
    )
    spare: bool = Field(
        True,
        description="Keep a process per device, of 90 MB, that becomes the next runtime when this one dies.",
    )
    watchdog_s: Seconds | None = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="An execution hangs if it takes longer than this and than a hundred times its expected time. Then the "
        "runtime ends. null: no limit.",
    )

    @field_validator("devices", mode="before")
    @classmethod
    def _are_devices(cls, devices: object) -> object:
        """Refuse unknown names, and GPUs that are named twice."""
        if devices == "all":
            return devices
        if not isinstance(devices, list) or not devices:
            raise ValueError("write all, or a list of devices: [0, 1], [GPU-...], [cpu]")
        if len(devices) > MAX_DEVICES:
            raise ValueError(
                f"{len(devices)} devices, but a server has at most {MAX_DEVICES}; start several servers"
            )
        for index, device in enumerate(devices):
            if isinstance(device, int) and device < 0:
                raise ValueError(f"{device} is negative; GPUs are counted from 0")
            if (
                not isinstance(device, int)
                and device != "cpu"
                and not str(device).startswith(("GPU-", "MIG-"))
            ):
                raise ValueError(
                    f"{device!r} is not a device; write a number, a UUID (GPU-... or MIG-...), or cpu"
                )
            if device != "cpu" and device in devices[:index]:
                raise ValueError(
                    f"{device} is listed twice; two runtimes on one GPU take each other's memory"
                )
        return devices

    @model_validator(mode="after")
    def _has_tf32(self) -> "RuntimeSection":
        if self.numerics == "tf32" and self.platform == "cpu":
            raise ValueError("numerics: tf32 needs a GPU, because platform: cpu has no TF32")
        return self


#: The front of a model, which connects Triton with the runtime.
Front = Literal["python", "native", "auto"]


class StubSection(Section):
    """The fronts inside Triton."""

    front: Front = Field(
        "python",
        description="What answers a model's requests inside Triton. python: a process per model; native: one library for all "
        "models, where it can serve them; auto: native if the library works here. More in docs/tuning.md. Run rsrv-gen again "
        "after a change.",
    )
    in_place_ms: Milliseconds = Field(
        4.0,
        ge=0,
        description="For executions shorter than this, a stub waits inside execute(), which costs less CPU. 0: never wait.",
    )
    retry_s: Seconds = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="How long requests wait for the next runtime after one has died; later they are refused (RUNTIME_DOWN). 0:"
        " do not wait.",
    )
    hook_timeout_s: Seconds | None = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="Limit of a hook's run. Beyond it, all waiting requests of the model fail, and its process is replaced. "
        "null: no limit.",
    )
    memory_limit_bytes: Bytes | None = Field(
        None,
        ge=2**26,
        description="Memory that hooks of one model may take after its start; a hook that needs more fails. null: half the "
        "memory of the machine or the container.",
    )


#: How a meta model calls rsrv's models.
Transport = Literal["direct", "bls"]


class MetaSection(Section):
    """Calls of meta models."""

    transport: Transport = Field(
        "direct",
        description="How meta models call rsrv's models. direct: at the runtime, without copies; bls: through Triton, which "
        "then counts and traces the calls. Run rsrv-gen again after a change.",
    )


class LifecycleSection(Section):
    """Changes of the set of models."""

    mode: Literal["dynamic", "static", "explicit"] = Field(
        "dynamic",
        description="What changes the set of served models. dynamic: changes of the bundles; static: nothing; explicit: an "
        "external control plane, through Triton's repository API. It also moves all weights, and requests for a "
        "model that is not resident are refused (NOT_RESIDENT).",
    )
    bundles: list[Path] = Field(
        default_factory=list,
        description="Folders of bundles. rsrv-gen sets them.",
    )
    link: Literal["hard", "copy"] = Field(
        "hard",
        description="Links or copies of the bundles' files in the repository. rsrv-gen's --link sets it.",
    )
    poll_s: Seconds = Field(
        1.0,
        ge=0.05,
        le=3600,
        allow_inf_nan=False,
        description="Pause between two scans of the bundles. A change counts when two scans agree.",
    )

    @property
    def slow_poll_s(self) -> float:
        """Seconds between two scans while no change is reported. Network and bind mounts never report changes."""
        return 5 * self.poll_s


class ControlSection(Section):
    """The service rsrv.control.v1 (gRPC), which shows and controls a running server."""

    enabled: bool = Field(
        True,
        description="Run a control process. Without it, bundles are not watched, there are no metrics and no traces, and models "
        "whose stub crashed stay down.",
    )
    listen: str | None = Field(
        None,
        description="HOST:PORT, in addition to the private Unix socket. It needs token_file, or tls_client_ca with "
        "tls_certificate and tls_key.",
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file with the certificate chain for `listen`."
    )
    tls_key: Path | None = Field(None, description="PEM file with its private key.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file with the authorities of accepted client certificates. null: none are required.",
    )
    token_file: Path | None = Field(
        None,
        description="File with a secret that clients of `listen` must send, as `authorization: Bearer SECRET`.",
    )


class MetricsSection(Section):
    """Prometheus metrics and the live page."""

    listen: str | None = Field(
        "127.0.0.1:8004",
        description="HOST:PORT of GET /metrics and of the live page. It requires no token: let only Prometheus and operators "
        "reach it. null: none.",
    )
    token_file: Path | None = Field(
        None,
        description="File with a secret that lets users of the live page control the server. null: the page only shows.",
    )


class OpenaiSection(Section):
    """Endpoints for clients of OpenAI and Cohere. `rsrv serve` starts their process if a bundle has a task."""

    listen: str | None = Field(
        "127.0.0.1:8005",
        description="HOST:PORT of the endpoints. If other machines reach it, keys_file is required. null: none.",
    )
    keys_file: Path | None = Field(
        None,
        description="File with the callers' keys; docs/openai.md explains it. null: everybody who reaches the port may call "
        "all models.",
    )
    metrics: str | None = Field(
        None, description="HOST:PORT of GET /metrics with the usage of each key. null: none."
    )


class LogsSection(Section):
    """Lines of the processes in the server's log."""

    format: Literal["human", "json"] = Field(
        "human",
        description="Lines for people, or JSON objects for programs. Triton's own lines do not change.",
    )


class TracesSection(Section):
    """OpenTelemetry traces of requests."""

    endpoint: str | None = Field(
        None,
        description="URL of an OTLP collector over HTTP, such as http://localhost:4318/v1/traces. The variables "
        "OTEL_EXPORTER_OTLP_* and OTEL_SERVICE_NAME apply. null: none.",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, endpoint: str | None) -> str | None:
        """Refuse a text that is not a URL. Otherwise, only the first span would show the error."""
        if endpoint is not None and not re.fullmatch(r"(?i:https?)://[^\s/]\S*", endpoint):
            raise ValueError(f"{endpoint!r} is not a URL; write it as http://localhost:4318/v1/traces")
        return endpoint


#: Where a model's weights always have a place.
Residency = Literal["unpinned", "system", "device"]


class ModelSection(PlacedModelSection):
    """Settings of one model; absent keys take the general value."""

    max_queue_depth: int | None = Field(
        None, ge=1, description="As scheduler.max_queue_depth, for this model."
    )
    max_batch_size: int | None = Field(
        None,
        ge=1,
        description="Maximum number of rows in one execution. null: the largest compiled size.",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="Maximum number of rows in a request. Large requests are executed in parts. null: at most 1024, or as many"
        " as fit a 16th of /dev/shm and 64 MiB, but at least the largest compiled size. Run rsrv-gen again after a"
        " change.",
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
        description="Where the weights always have a place. system: in host memory; unpinned: only in the bundle's file; "
        "device: always on the device, beyond the budget if necessary.",
    )
    front: Front | None = Field(None, description="As stub.front, for this model.")
    max_delay_us: Microseconds = Field(
        0,
        ge=0,
        le=60_000_000,
        description="How long a request may wait for others to share its execution.",
    )
    start: Start | None = Field(None, description="As runtime.start, for this model.")
    idle: IdleSection = Field(
        IdleSection(), description="As runtime.idle, for this model; absent keys take its values."
    )
    warm_at: list[WeekTime] = Field(
        default_factory=list,
        description="Times at which a cold model starts, such as `Mon-Fri 08:55`, in the machine's time zone; one or a list.",
    )

    @field_validator("warm_at", mode="before")
    @classmethod
    def _are_times(cls, times: object) -> object:
        return [times] if isinstance(times, str) else times

    @field_validator("idle")
    @classmethod
    def _is_of_a_model(cls, idle: IdleSection) -> IdleSection:
        if "server" in idle.model_fields_set:
            raise ValueError("server applies to the whole server, not to a model; set runtime.idle.server")
        return idle


def _are_shares(value: object) -> object:
    """Convert a single name to a share of all requests. Refuse wrong values with one sentence."""
    if isinstance(value, str):
        return {value: 1}
    rule = "must be a model's name, or a mapping from models to weights up to 1e9, of which one is positive, and `shadow`"
    weights = (
        [weight for weight in value.values() if weight != "shadow"] if isinstance(value, Mapping) else []
    )
    numbers = [
        weight for weight in weights if isinstance(weight, int | float) and not isinstance(weight, bool)
    ]
    if len(numbers) < len(weights) or not all(0 <= number <= 1e9 for number in numbers) or not sum(numbers):
        raise ValueError(rule)
    return value


#: The models behind an alias, each with its weight among the alias's requests, or `shadow`.
Shares = Annotated[Mapping[str, float | Literal["shadow"]], BeforeValidator(_are_shares)]


#: Settings of a model that rsrv.yaml does not name.
_NO_SETTINGS: Final = ModelSection()


class _Environment(EnvSettingsSource):
    """Reads variables of the environment. A text that is not JSON is passed to the validation, whose errors name the key."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


class Settings(BaseSettings):
    """All of rsrv.yaml."""

    model_config = SettingsConfigDict(
        env_prefix="RSRV_",
        env_nested_delimiter="__",
        # Read "null" as None, as in the file. Otherwise, it could be the name of a directory.
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
    openai: OpenaiSection = OpenaiSection()
    logs: LogsSection = LogsSection()
    traces: TracesSection = TracesSection()
    placement: PlacementSection = PlacementSection()
    gateway: GatewaySection = GatewaySection()
    models: dict[str, ModelSection] = Field(default_factory=dict, description="Per model, by name.")
    aliases: dict[str, Shares] = Field(
        default_factory=dict,
        description="Further names for clients: {champion: fraud_v7}, or shares of requests: {fraud: {fraud_v7: 95, fraud_v8: "
        "5}}. A model with `shadow` gets copies of the requests.",
    )

    @model_validator(mode="after")
    def _pins_are_devices(self) -> "Settings":
        devices = self.runtime.devices
        for name, model in self.models.items() if devices != "all" else ():
            for number in model.devices or ():
                if number >= len(devices):
                    raise ValueError(
                        f"models.{name}.devices names device {number}, but runtime.devices has {len(devices)} devices, numbered from 0"
                    )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return _Environment(settings_cls), init_settings

    @property
    def traced(self) -> bool:
        """True if a collector is set, and there is a control process that sends spans to it."""
        return self.traces.endpoint is not None and self.control.enabled

    def for_model(self, name: str) -> ModelSection:
        """Return a model's settings. If its `start` or a key of its `idle` is absent, the result has the runtime's value."""
        own = self.models.get(name, _NO_SETTINGS)
        return own.model_copy(update={"start": self.start_of(name), "idle": self.idle_limits(name)})

    def start_of(self, name: str) -> Start:
        """Return when a model starts. Callers that need this for all models should not call `for_model`, which is slower."""
        return self.models.get(name, _NO_SETTINGS).start or self.runtime.start

    def idle_limits(self, name: str) -> IdleSection:
        """Return a model's `idle`. Absent keys have the runtime's values. A call is as cheap as a call of `start_of`."""
        own = self.models.get(name, _NO_SETTINGS).idle
        if not own.model_fields_set:
            return self.runtime.idle
        return self.runtime.idle.model_copy(update=own.model_dump(exclude_unset=True))

    def may_be_cold(self, name: str) -> bool:
        """Return True if a model may be cold while the server runs."""
        return self.start_of(name) == "lazy" or self.idle_limits(name).executable < inf


def read_settings(path: Path | None, remedy: str = "Name a file of settings") -> Settings:
    """Read the settings from a file, if there is a path, and from the environment. Raises SettingsError.

    `remedy` is a sentence for the error if the file cannot be read.
    """
    if path is None:
        return load_settings()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path} cannot be read: {why}. {remedy}") from None
    return load_settings(text, str(path))


def load_settings(text: str = "", source: str = "rsrv.yaml") -> Settings:
    """Read the settings from the file's text and the environment. Raises SettingsError."""
    try:
        raw = read_yaml(text, of="sections")
    except YamlError as error:
        raise SettingsError(f"{source}: {error}") from None
    variables = {name.lower(): name for name in os.environ if name.upper().startswith("RSRV_")}
    for lower, name in variables.items():
        section, nested, _ = lower.removeprefix("rsrv_").partition("__")
        if nested and section not in Settings.model_fields:
            known = nearest(section, Settings.model_fields)
            raise SettingsError(f"{name} in the environment: there is no section {section!r}{known}")
    try:
        return Settings(**raw)
    except ValidationError as error:
        raise SettingsError(
            "\n".join(_line(problem, raw, variables, source) for problem in error.errors())
        ) from None


def _line(error: Mapping[str, Any], raw: object, variables: Mapping[str, str], source: str) -> str:
    """Return the line about an error of the validation. It names the variable or the file that has the value."""
    variable = _origin(error["loc"], variables)
    line = f"{variable or source}: {explain(error, Settings, raw)}"
    example = {"list_type": '["one", "two"]', "dict_type": '{"key": 1}', "model_type": '{"key": 1}'}
    if variable is None or error["type"] not in example:
        return line
    return f"{line}. Write JSON, as {variable}='{example[error['type']]}'"


def _origin(path: Sequence[int | str], variables: Mapping[str, str]) -> str | None:
    """Return the environment variable that has the value at a path, or None if the file has the value."""
    names = ("rsrv_" + "__".join(map(str, path[:end])).lower() for end in range(len(path), 0, -1))
    return next((variables[name] for name in names if name in variables), None)


def dump_settings(settings: Settings) -> str:
    """Return the text of a rsrv.yaml with every key and its meaning. Loading this text gives the same settings.

    Raises SettingsError if the name of a folder is not UTF-8, because the text could not be written to a file.
    """
    for folder in settings.lifecycle.bundles:
        if any("\udc80" <= character <= "\udcff" for character in str(folder)):
            raise SettingsError(
                f"{str(folder)!a} cannot be watched for bundles, because its name is not UTF-8. Rename the folder"
            )
    out = io.StringIO()
    out.write(
        "# rsrv's settings. RSRV_<SECTION>__<KEY> in the environment takes precedence over this file.\n"
    )
    by_name = {"models", "aliases"}
    values = settings.model_dump(mode="json", exclude=by_name)
    for section, info in Settings.model_fields.items():
        if section in by_name:
            continue
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        out.write(f"\n{section}:\n")
        for key, field in model.model_fields.items():
            out.write(f"  # {field.description}\n")
            out.write(_yaml({key: values[section][key]}, indent="  "))
    for section in ("models", "aliases"):
        dumped = settings.model_dump(mode="json", include={section}, exclude_unset=True)
        out.write(f"\n# {Settings.model_fields[section].description}\n")
        out.write(_yaml(dumped or {section: {}}))
    return out.getvalue()


def _yaml(value: dict[str, Any], indent: str = "") -> str:
    return "".join(f"{indent}{line}\n" for line in yaml12.dump(value, compact=False).splitlines())
