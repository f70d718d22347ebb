from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Residency(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESIDENCY_UNSPECIFIED: _ClassVar[Residency]
    RESIDENCY_UNPINNED: _ClassVar[Residency]
    RESIDENCY_SYSTEM: _ClassVar[Residency]
    RESIDENCY_DEVICE: _ClassVar[Residency]

class Weights(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHTS_UNSPECIFIED: _ClassVar[Weights]
    WEIGHTS_ABSENT: _ClassVar[Weights]
    WEIGHTS_LOADING: _ClassVar[Weights]
    WEIGHTS_RESIDENT: _ClassVar[Weights]

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[State]
    STATE_LOADING: _ClassVar[State]
    STATE_READY: _ClassVar[State]
    STATE_LEAVING: _ClassVar[State]
    STATE_FAILED: _ClassVar[State]
    STATE_COLD: _ClassVar[State]

class Pause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_UNSPECIFIED: _ClassVar[Pause]
    PAUSE_DRAIN: _ClassVar[Pause]
    PAUSE_HOLD: _ClassVar[Pause]
    PAUSE_REJECT: _ClassVar[Pause]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_DYNAMIC: _ClassVar[Mode]
    MODE_STATIC: _ClassVar[Mode]
    MODE_EXPLICIT: _ClassVar[Mode]

class Discipline(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISCIPLINE_UNSPECIFIED: _ClassVar[Discipline]
    DISCIPLINE_FAIR: _ClassVar[Discipline]
    DISCIPLINE_FIFO: _ClassVar[Discipline]
    DISCIPLINE_EDF: _ClassVar[Discipline]

class Severity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEVERITY_UNSPECIFIED: _ClassVar[Severity]
    SEVERITY_NOTE: _ClassVar[Severity]
    SEVERITY_WARNING: _ClassVar[Severity]
    SEVERITY_CRITICAL: _ClassVar[Severity]

class Numerics(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NUMERICS_UNSPECIFIED: _ClassVar[Numerics]
    NUMERICS_AUTO: _ClassVar[Numerics]
    NUMERICS_F32: _ClassVar[Numerics]
    NUMERICS_TF32: _ClassVar[Numerics]

class SpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_KIND_UNSPECIFIED: _ClassVar[SpanKind]
    SPAN_KIND_EXECUTE: _ClassVar[SpanKind]
    SPAN_KIND_WARM_UP: _ClassVar[SpanKind]
    SPAN_KIND_LOAD: _ClassVar[SpanKind]
    SPAN_KIND_EVICT: _ClassVar[SpanKind]
RESIDENCY_UNSPECIFIED: Residency
RESIDENCY_UNPINNED: Residency
RESIDENCY_SYSTEM: Residency
RESIDENCY_DEVICE: Residency
WEIGHTS_UNSPECIFIED: Weights
WEIGHTS_ABSENT: Weights
WEIGHTS_LOADING: Weights
WEIGHTS_RESIDENT: Weights
STATE_UNSPECIFIED: State
STATE_LOADING: State
STATE_READY: State
STATE_LEAVING: State
STATE_FAILED: State
STATE_COLD: State
PAUSE_UNSPECIFIED: Pause
PAUSE_DRAIN: Pause
PAUSE_HOLD: Pause
PAUSE_REJECT: Pause
MODE_UNSPECIFIED: Mode
MODE_DYNAMIC: Mode
MODE_STATIC: Mode
MODE_EXPLICIT: Mode
DISCIPLINE_UNSPECIFIED: Discipline
DISCIPLINE_FAIR: Discipline
DISCIPLINE_FIFO: Discipline
DISCIPLINE_EDF: Discipline
SEVERITY_UNSPECIFIED: Severity
SEVERITY_NOTE: Severity
SEVERITY_WARNING: Severity
SEVERITY_CRITICAL: Severity
NUMERICS_UNSPECIFIED: Numerics
NUMERICS_AUTO: Numerics
NUMERICS_F32: Numerics
NUMERICS_TF32: Numerics
SPAN_KIND_UNSPECIFIED: SpanKind
SPAN_KIND_EXECUTE: SpanKind
SPAN_KIND_WARM_UP: SpanKind
SPAN_KIND_LOAD: SpanKind
SPAN_KIND_EVICT: SpanKind

class Finding(_message.Message):
    __slots__ = ("name", "severity", "evidence", "cause", "cure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    severity: Severity
    evidence: str
    cause: str
    cure: str
    def __init__(self, name: _Optional[str] = ..., severity: _Optional[_Union[Severity, str]] = ..., evidence: _Optional[str] = ..., cause: _Optional[str] = ..., cure: _Optional[str] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("findings", "seconds")
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    seconds: float
    def __init__(self, findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("server", "devices", "scheduler", "models", "metas", "failures", "findings", "aliases")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    server: Server
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    scheduler: Scheduler
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    metas: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    aliases: _containers.RepeatedCompositeFieldContainer[Alias]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ..., scheduler: _Optional[_Union[Scheduler, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., metas: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., aliases: _Optional[_Iterable[_Union[Alias, _Mapping]]] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("number", "record", "revision", "card", "down_since_unix_s", "error", "asleep_since_unix_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    DOWN_SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    record: DeviceRecord
    revision: int
    card: CardMemory
    down_since_unix_s: float
    error: str
    asleep_since_unix_s: float
    def __init__(self, number: _Optional[int] = ..., record: _Optional[_Union[DeviceRecord, _Mapping]] = ..., revision: _Optional[int] = ..., card: _Optional[_Union[CardMemory, _Mapping]] = ..., down_since_unix_s: _Optional[float] = ..., error: _Optional[str] = ..., asleep_since_unix_s: _Optional[float] = ...) -> None: ...

class Server(_message.Message):
    __slots__ = ("pid", "control_pid", "version", "mode", "repository", "settings_notes")
    PID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REPOSITORY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_NOTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    control_pid: int
    version: str
    mode: Mode
    repository: str
    settings_notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pid: _Optional[int] = ..., control_pid: _Optional[int] = ..., version: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., repository: _Optional[str] = ..., settings_notes: _Optional[_Iterable[str]] = ...) -> None: ...

class HostMemory(_message.Message):
    __slots__ = ("logical_bytes", "physical_bytes", "tensors")
    LOGICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    logical_bytes: int
    physical_bytes: int
    tensors: int
    def __init__(self, logical_bytes: _Optional[int] = ..., physical_bytes: _Optional[int] = ..., tensors: _Optional[int] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("limit_bytes", "budget_bytes", "pinned_bytes", "logical_bytes", "physical_bytes", "held_bytes", "name")
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    limit_bytes: int
    budget_bytes: int
    pinned_bytes: int
    logical_bytes: int
    physical_bytes: int
    held_bytes: int
    name: str
    def __init__(self, limit_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., logical_bytes: _Optional[int] = ..., physical_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class CardMemory(_message.Message):
    __slots__ = ("used_bytes", "total_bytes")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    total_bytes: int
    def __init__(self, used_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class Scheduler(_message.Message):
    __slots__ = ("discipline", "depth", "meta_concurrency", "max_queue_depth")
    DISCIPLINE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    META_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    discipline: Discipline
    depth: int
    meta_concurrency: int
    max_queue_depth: int
    def __init__(self, discipline: _Optional[_Union[Discipline, str]] = ..., depth: _Optional[int] = ..., meta_concurrency: _Optional[int] = ..., max_queue_depth: _Optional[int] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "versions", "paused", "record", "policy", "devices", "starting", "bundle", "front")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    name: str
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    paused: Pause
    record: ModelRecord
    policy: Policy
    devices: _containers.RepeatedCompositeFieldContainer[ModelOnDevice]
    starting: str
    bundle: str
    front: str
    def __init__(self, name: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., paused: _Optional[_Union[Pause, str]] = ..., record: _Optional[_Union[ModelRecord, _Mapping]] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[ModelOnDevice, _Mapping]]] = ..., starting: _Optional[str] = ..., bundle: _Optional[str] = ..., front: _Optional[str] = ...) -> None: ...

class ModelOnDevice(_message.Message):
    __slots__ = ("number", "record", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    record: ModelRecord
    error: str
    def __init__(self, number: _Optional[int] = ..., record: _Optional[_Union[ModelRecord, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("key", "digest", "state", "error", "weights", "paused", "stubs", "calls")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    STUBS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    key: str
    digest: str
    state: State
    error: str
    weights: Weights
    paused: Pause
    stubs: _containers.RepeatedScalarFieldContainer[int]
    calls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., digest: _Optional[str] = ..., state: _Optional[_Union[State, str]] = ..., error: _Optional[str] = ..., weights: _Optional[_Union[Weights, str]] = ..., paused: _Optional[_Union[Pause, str]] = ..., stubs: _Optional[_Iterable[int]] = ..., calls: _Optional[_Iterable[str]] = ...) -> None: ...

class Executable(_message.Message):
    __slots__ = ("variant", "size", "count", "cost_s", "precision")
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    variant: int
    size: int
    count: int
    cost_s: float
    precision: Precision
    def __init__(self, variant: _Optional[int] = ..., size: _Optional[int] = ..., count: _Optional[int] = ..., cost_s: _Optional[float] = ..., precision: _Optional[_Union[Precision, _Mapping]] = ...) -> None: ...

class Precision(_message.Message):
    __slots__ = ("f32", "tf32", "hardware", "algorithm", "pinned", "rewritten", "stripped", "ungovernable")
    class UngovernableEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    F32_FIELD_NUMBER: _ClassVar[int]
    TF32_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    REWRITTEN_FIELD_NUMBER: _ClassVar[int]
    STRIPPED_FIELD_NUMBER: _ClassVar[int]
    UNGOVERNABLE_FIELD_NUMBER: _ClassVar[int]
    f32: int
    tf32: int
    hardware: int
    algorithm: int
    pinned: int
    rewritten: int
    stripped: int
    ungovernable: _containers.ScalarMap[str, int]
    def __init__(self, f32: _Optional[int] = ..., tf32: _Optional[int] = ..., hardware: _Optional[int] = ..., algorithm: _Optional[int] = ..., pinned: _Optional[int] = ..., rewritten: _Optional[int] = ..., stripped: _Optional[int] = ..., ungovernable: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("weight", "max_delay_us", "max_queue_depth")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_DELAY_US_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    weight: float
    max_delay_us: int
    max_queue_depth: int
    def __init__(self, weight: _Optional[float] = ..., max_delay_us: _Optional[int] = ..., max_queue_depth: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("name", "text", "since_unix_s", "tries")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    since_unix_s: float
    tries: int
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., since_unix_s: _Optional[float] = ..., tries: _Optional[int] = ...) -> None: ...

class SetResidencyRequest(_message.Message):
    __slots__ = ("model", "residency", "wait")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    residency: Residency
    wait: bool
    def __init__(self, model: _Optional[str] = ..., residency: _Optional[_Union[Residency, str]] = ..., wait: bool = ...) -> None: ...

class SetResidencyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("model", "policy")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    model: str
    policy: Policy
    def __init__(self, model: _Optional[str] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetSchedulerRequest(_message.Message):
    __slots__ = ("scheduler",)
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    scheduler: Scheduler
    def __init__(self, scheduler: _Optional[_Union[Scheduler, _Mapping]] = ...) -> None: ...

class SetSchedulerResponse(_message.Message):
    __slots__ = ("scheduler",)
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    scheduler: Scheduler
    def __init__(self, scheduler: _Optional[_Union[Scheduler, _Mapping]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("model", "wait", "devices")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    model: str
    wait: bool
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., wait: bool = ..., devices: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("models", "all", "poll")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    POLL_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    poll: bool
    def __init__(self, models: _Optional[_Iterable[str]] = ..., all: bool = ..., poll: bool = ...) -> None: ...

class StartResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[StartedModel]
    def __init__(self, models: _Optional[_Iterable[_Union[StartedModel, _Mapping]]] = ...) -> None: ...

class StartedModel(_message.Message):
    __slots__ = ("name", "state", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    error: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("model", "all")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    model: str
    all: bool
    def __init__(self, model: _Optional[str] = ..., all: bool = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("target", "devices")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    target: Target
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., devices: _Optional[_Iterable[int]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, models: _Optional[_Iterable[str]] = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompactResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("target", "mode")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    target: Target
    mode: Pause
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., mode: _Optional[_Union[Pause, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ContinueRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: Target
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ...) -> None: ...

class ContinueResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted", "executing")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    EXECUTING_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    executing: int
    def __init__(self, aborted: _Optional[int] = ..., executing: _Optional[int] = ...) -> None: ...

class ReloadWeightsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ReloadWeightsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ...) -> None: ...

class AliasTarget(_message.Message):
    __slots__ = ("model", "weight", "shadow", "responses", "copies")
    class ResponsesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CopiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    model: str
    weight: float
    shadow: bool
    responses: _containers.ScalarMap[str, int]
    copies: _containers.ScalarMap[str, int]
    def __init__(self, model: _Optional[str] = ..., weight: _Optional[float] = ..., shadow: bool = ..., responses: _Optional[_Mapping[str, int]] = ..., copies: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Alias(_message.Message):
    __slots__ = ("name", "targets", "failure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    targets: _containers.RepeatedCompositeFieldContainer[AliasTarget]
    failure: str
    def __init__(self, name: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[AliasTarget, _Mapping]]] = ..., failure: _Optional[str] = ...) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ("alias",)
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    alias: Alias
    def __init__(self, alias: _Optional[_Union[Alias, _Mapping]] = ...) -> None: ...

class SetAliasResponse(_message.Message):
    __slots__ = ("aliases",)
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    aliases: _containers.RepeatedCompositeFieldContainer[Alias]
    def __init__(self, aliases: _Optional[_Iterable[_Union[Alias, _Mapping]]] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("devices", "drain_s", "force")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[int]
    drain_s: float
    force: bool
    def __init__(self, devices: _Optional[_Iterable[int]] = ..., drain_s: _Optional[float] = ..., force: bool = ...) -> None: ...

class RestartResponse(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[RestartedDevice]
    def __init__(self, devices: _Optional[_Iterable[_Union[RestartedDevice, _Mapping]]] = ...) -> None: ...

class RestartedDevice(_message.Message):
    __slots__ = ("number", "first_s", "all_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_S_FIELD_NUMBER: _ClassVar[int]
    ALL_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    first_s: float
    all_s: float
    def __init__(self, number: _Optional[int] = ..., first_s: _Optional[float] = ..., all_s: _Optional[float] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("devices", "drain_s", "force")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[int]
    drain_s: float
    force: bool
    def __init__(self, devices: _Optional[_Iterable[int]] = ..., drain_s: _Optional[float] = ..., force: bool = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, devices: _Optional[_Iterable[int]] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, devices: _Optional[_Iterable[int]] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[WokenDevice]
    def __init__(self, devices: _Optional[_Iterable[_Union[WokenDevice, _Mapping]]] = ...) -> None: ...

class WokenDevice(_message.Message):
    __slots__ = ("number", "seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    seconds: float
    def __init__(self, number: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class GetMemoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMemoryResponse(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[MemoryUse]
    def __init__(self, devices: _Optional[_Iterable[_Union[MemoryUse, _Mapping]]] = ...) -> None: ...

class MemoryUse(_message.Message):
    __slots__ = ("device", "record", "weight_budget_bytes", "own_bytes")
    class OwnBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: int
    record: DeviceRecord
    weight_budget_bytes: int
    own_bytes: _containers.ScalarMap[str, int]
    def __init__(self, device: _Optional[int] = ..., record: _Optional[_Union[DeviceRecord, _Mapping]] = ..., weight_budget_bytes: _Optional[int] = ..., own_bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SharedTensors(_message.Message):
    __slots__ = ("bytes", "models", "on_device")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    models: _containers.RepeatedScalarFieldContainer[str]
    on_device: bool
    def __init__(self, bytes: _Optional[int] = ..., models: _Optional[_Iterable[str]] = ..., on_device: bool = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[LoadPosition]
    def __init__(self, positions: _Optional[_Iterable[_Union[LoadPosition, _Mapping]]] = ...) -> None: ...

class LoadPosition(_message.Message):
    __slots__ = ("device", "instance", "next")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    device: int
    instance: str
    next: int
    def __init__(self, device: _Optional[int] = ..., instance: _Optional[str] = ..., next: _Optional[int] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("devices", "metas", "placement_mode", "aliases")
    class AliasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_MODE_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceLoad]
    metas: _containers.RepeatedCompositeFieldContainer[MetaLoad]
    placement_mode: str
    aliases: _containers.ScalarMap[str, str]
    def __init__(self, devices: _Optional[_Iterable[_Union[DeviceLoad, _Mapping]]] = ..., metas: _Optional[_Iterable[_Union[MetaLoad, _Mapping]]] = ..., placement_mode: _Optional[str] = ..., aliases: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DeviceLoad(_message.Message):
    __slots__ = ("number", "instance", "backlog_s", "free_bytes", "budget_bytes", "models", "since", "next")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    instance: str
    backlog_s: float
    free_bytes: int
    budget_bytes: int
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    since: int
    next: int
    def __init__(self, number: _Optional[int] = ..., instance: _Optional[str] = ..., backlog_s: _Optional[float] = ..., free_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ..., since: _Optional[int] = ..., next: _Optional[int] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("name", "queued", "executing", "weights", "device_bytes", "cost_s", "misses", "device_seconds", "useful_rows", "requests", "pinned", "max_rows", "batch_input", "sequences")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    EXECUTING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USEFUL_ROWS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INPUT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    queued: int
    executing: int
    weights: Weights
    device_bytes: int
    cost_s: float
    misses: int
    device_seconds: float
    useful_rows: int
    requests: int
    pinned: bool
    max_rows: int
    batch_input: BatchInput
    sequences: int
    def __init__(self, name: _Optional[str] = ..., queued: _Optional[int] = ..., executing: _Optional[int] = ..., weights: _Optional[_Union[Weights, str]] = ..., device_bytes: _Optional[int] = ..., cost_s: _Optional[float] = ..., misses: _Optional[int] = ..., device_seconds: _Optional[float] = ..., useful_rows: _Optional[int] = ..., requests: _Optional[int] = ..., pinned: bool = ..., max_rows: _Optional[int] = ..., batch_input: _Optional[_Union[BatchInput, _Mapping]] = ..., sequences: _Optional[int] = ...) -> None: ...

class BatchInput(_message.Message):
    __slots__ = ("name", "axis")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    name: str
    axis: int
    def __init__(self, name: _Optional[str] = ..., axis: _Optional[int] = ...) -> None: ...

class MetaLoad(_message.Message):
    __slots__ = ("name", "models")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class GetPlacementRequest(_message.Message):
    __slots__ = ("without_devices", "without_models", "added")
    WITHOUT_DEVICES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_MODELS_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    without_devices: _containers.RepeatedScalarFieldContainer[int]
    without_models: _containers.RepeatedScalarFieldContainer[str]
    added: _containers.RepeatedCompositeFieldContainer[AddedModel]
    def __init__(self, without_devices: _Optional[_Iterable[int]] = ..., without_models: _Optional[_Iterable[str]] = ..., added: _Optional[_Iterable[_Union[AddedModel, _Mapping]]] = ...) -> None: ...

class AddedModel(_message.Message):
    __slots__ = ("name", "bytes", "device_seconds_per_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_PER_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    device_seconds_per_s: float
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., device_seconds_per_s: _Optional[float] = ...) -> None: ...

class GetPlacementResponse(_message.Message):
    __slots__ = ("mode", "generation", "models", "devices", "moves", "warnings")
    MODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    generation: int
    models: _containers.RepeatedCompositeFieldContainer[PlacedModel]
    devices: _containers.RepeatedCompositeFieldContainer[DevicePlacement]
    moves: _containers.RepeatedCompositeFieldContainer[PlacementMove]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, mode: _Optional[str] = ..., generation: _Optional[int] = ..., models: _Optional[_Iterable[_Union[PlacedModel, _Mapping]]] = ..., devices: _Optional[_Iterable[_Union[DevicePlacement, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[PlacementMove, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class PlacedModel(_message.Message):
    __slots__ = ("name", "devices", "moving_to", "reason", "utilisation", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MOVING_TO_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    devices: _containers.RepeatedScalarFieldContainer[int]
    moving_to: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    utilisation: float
    bytes: int
    def __init__(self, name: _Optional[str] = ..., devices: _Optional[_Iterable[int]] = ..., moving_to: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., utilisation: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class DevicePlacement(_message.Message):
    __slots__ = ("device", "alive", "models", "utilisation", "busy", "bytes", "budget_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: int
    alive: bool
    models: int
    utilisation: float
    busy: float
    bytes: int
    budget_bytes: int
    def __init__(self, device: _Optional[int] = ..., alive: bool = ..., models: _Optional[int] = ..., utilisation: _Optional[float] = ..., busy: _Optional[float] = ..., bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ...) -> None: ...

class PlacementMove(_message.Message):
    __slots__ = ("model", "before", "after")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    model: str
    before: _containers.RepeatedScalarFieldContainer[int]
    after: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., before: _Optional[_Iterable[int]] = ..., after: _Optional[_Iterable[int]] = ...) -> None: ...

class SetPlacementRequest(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelPlacement]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelPlacement, _Mapping]]] = ...) -> None: ...

class ModelPlacement(_message.Message):
    __slots__ = ("model", "devices")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    model: str
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., devices: _Optional[_Iterable[int]] = ...) -> None: ...

class SetPlacementResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetHistoryResponse(_message.Message):
    __slots__ = ("histories",)
    HISTORIES_FIELD_NUMBER: _ClassVar[int]
    histories: _containers.RepeatedCompositeFieldContainer[History]
    def __init__(self, histories: _Optional[_Iterable[_Union[History, _Mapping]]] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("key", "device", "records", "waits_for")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    key: str
    device: int
    records: _containers.RepeatedCompositeFieldContainer[HistoryRecord]
    waits_for: str
    def __init__(self, key: _Optional[str] = ..., device: _Optional[int] = ..., records: _Optional[_Iterable[_Union[HistoryRecord, _Mapping]]] = ..., waits_for: _Optional[str] = ...) -> None: ...

class HistoryRecord(_message.Message):
    __slots__ = ("unix_s", "clock_s", "what", "why", "model", "requests", "rows", "size", "bytes", "seconds")
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    clock_s: float
    what: str
    why: str
    model: str
    requests: int
    rows: int
    size: int
    bytes: int
    seconds: float
    def __init__(self, unix_s: _Optional[float] = ..., clock_s: _Optional[float] = ..., what: _Optional[str] = ..., why: _Optional[str] = ..., model: _Optional[str] = ..., requests: _Optional[int] = ..., rows: _Optional[int] = ..., size: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class GetRequestsRequest(_message.Message):
    __slots__ = ("model", "request")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    model: str
    request: str
    def __init__(self, model: _Optional[str] = ..., request: _Optional[str] = ...) -> None: ...

class GetRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[SlowRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[SlowRequest, _Mapping]]] = ...) -> None: ...

class SlowRequest(_message.Message):
    __slots__ = ("number", "model", "key", "device", "rows", "call", "arrived_unix_s", "seconds", "weights_s", "peers_s", "others_s", "executing_s", "behind", "deadline_s", "outcome", "batch_requests", "batch_rows", "batch_size", "evicted", "paused_s", "before_s", "after_s", "parts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_S_FIELD_NUMBER: _ClassVar[int]
    PEERS_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_S_FIELD_NUMBER: _ClassVar[int]
    EXECUTING_S_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    number: str
    model: str
    key: str
    device: int
    rows: int
    call: bool
    arrived_unix_s: float
    seconds: float
    weights_s: float
    peers_s: float
    others_s: float
    executing_s: float
    behind: _containers.RepeatedScalarFieldContainer[str]
    deadline_s: float
    outcome: str
    batch_requests: int
    batch_rows: int
    batch_size: int
    evicted: HistoryRecord
    paused_s: float
    before_s: float
    after_s: float
    parts: int
    def __init__(self, number: _Optional[str] = ..., model: _Optional[str] = ..., key: _Optional[str] = ..., device: _Optional[int] = ..., rows: _Optional[int] = ..., call: bool = ..., arrived_unix_s: _Optional[float] = ..., seconds: _Optional[float] = ..., weights_s: _Optional[float] = ..., peers_s: _Optional[float] = ..., others_s: _Optional[float] = ..., executing_s: _Optional[float] = ..., behind: _Optional[_Iterable[str]] = ..., deadline_s: _Optional[float] = ..., outcome: _Optional[str] = ..., batch_requests: _Optional[int] = ..., batch_rows: _Optional[int] = ..., batch_size: _Optional[int] = ..., evicted: _Optional[_Union[HistoryRecord, _Mapping]] = ..., paused_s: _Optional[float] = ..., before_s: _Optional[float] = ..., after_s: _Optional[float] = ..., parts: _Optional[int] = ...) -> None: ...

class GetTimelineRequest(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[TimelinePosition]
    def __init__(self, positions: _Optional[_Iterable[_Union[TimelinePosition, _Mapping]]] = ...) -> None: ...

class GetTimelineResponse(_message.Message):
    __slots__ = ("spans", "positions")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    positions: _containers.RepeatedCompositeFieldContainer[TimelinePosition]
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., positions: _Optional[_Iterable[_Union[TimelinePosition, _Mapping]]] = ...) -> None: ...

class TimelinePosition(_message.Message):
    __slots__ = ("device", "instance", "first", "next", "end")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    device: int
    instance: str
    first: int
    next: int
    end: int
    def __init__(self, device: _Optional[int] = ..., instance: _Optional[str] = ..., first: _Optional[int] = ..., next: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("kind", "model", "key", "start_unix_s", "seconds", "rows", "size", "requests", "failed", "device")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    kind: SpanKind
    model: str
    key: str
    start_unix_s: float
    seconds: float
    rows: int
    size: int
    requests: int
    failed: bool
    device: int
    def __init__(self, kind: _Optional[_Union[SpanKind, str]] = ..., model: _Optional[str] = ..., key: _Optional[str] = ..., start_unix_s: _Optional[float] = ..., seconds: _Optional[float] = ..., rows: _Optional[int] = ..., size: _Optional[int] = ..., requests: _Optional[int] = ..., failed: bool = ..., device: _Optional[int] = ...) -> None: ...

class GetArrivalsRequest(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[TimelinePosition]
    def __init__(self, positions: _Optional[_Iterable[_Union[TimelinePosition, _Mapping]]] = ...) -> None: ...

class GetArrivalsResponse(_message.Message):
    __slots__ = ("requests", "positions")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[Arrival]
    positions: _containers.RepeatedCompositeFieldContainer[TimelinePosition]
    def __init__(self, requests: _Optional[_Iterable[_Union[Arrival, _Mapping]]] = ..., positions: _Optional[_Iterable[_Union[TimelinePosition, _Mapping]]] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("model", "unix_s", "rows", "variant", "deadline_s", "priority", "call", "device")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    model: str
    unix_s: float
    rows: int
    variant: int
    deadline_s: float
    priority: int
    call: bool
    device: int
    def __init__(self, model: _Optional[str] = ..., unix_s: _Optional[float] = ..., rows: _Optional[int] = ..., variant: _Optional[int] = ..., deadline_s: _Optional[float] = ..., priority: _Optional[int] = ..., call: bool = ..., device: _Optional[int] = ...) -> None: ...

class WatchPageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchPageResponse(_message.Message):
    __slots__ = ("event", "json")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    event: str
    json: str
    def __init__(self, event: _Optional[str] = ..., json: _Optional[str] = ...) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStateResponse(_message.Message):
    __slots__ = ("snapshot", "change", "down", "failures")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    change: Change
    down: RuntimeDown
    failures: Failures
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., change: _Optional[_Union[Change, _Mapping]] = ..., down: _Optional[_Union[RuntimeDown, _Mapping]] = ..., failures: _Optional[_Union[Failures, _Mapping]] = ...) -> None: ...

class Failures(_message.Message):
    __slots__ = ("failures",)
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("instance", "revision", "entries", "device")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    revision: int
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    device: int
    def __init__(self, instance: _Optional[str] = ..., revision: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., device: _Optional[int] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("instance", "revision", "key", "entry", "device")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    revision: int
    key: str
    entry: Entry
    device: int
    def __init__(self, instance: _Optional[str] = ..., revision: _Optional[int] = ..., key: _Optional[str] = ..., entry: _Optional[_Union[Entry, _Mapping]] = ..., device: _Optional[int] = ...) -> None: ...

class RuntimeDown(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: int
    def __init__(self, device: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("name", "meta", "residency", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    META_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    meta: bool
    residency: Residency
    version: Version
    def __init__(self, name: _Optional[str] = ..., meta: bool = ..., residency: _Optional[_Union[Residency, str]] = ..., version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class DeviceRecord(_message.Message):
    __slots__ = ("instance", "since", "next", "pid", "uptime_s", "connections", "follows", "follows_revision", "depth", "numerics", "computes", "backlog_s", "memory", "host", "host_limit_bytes", "scratch_bytes", "kept_bytes", "in_use_bytes", "largest_free_bytes", "compiled", "from_cache", "shared_executables", "compile", "cache_obstacle", "loop_bans", "starting", "importing", "models", "shared")
    class StartingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ImportingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Import
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Import, _Mapping]] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_REVISION_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HOST_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_USE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    FROM_CACHE_FIELD_NUMBER: _ClassVar[int]
    SHARED_EXECUTABLES_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    CACHE_OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    LOOP_BANS_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    IMPORTING_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    instance: str
    since: int
    next: int
    pid: int
    uptime_s: float
    connections: int
    follows: str
    follows_revision: int
    depth: int
    numerics: Numerics
    computes: str
    backlog_s: float
    memory: DeviceMemory
    host: HostMemory
    host_limit_bytes: int
    scratch_bytes: int
    kept_bytes: int
    in_use_bytes: int
    largest_free_bytes: int
    compiled: int
    from_cache: int
    shared_executables: int
    compile: Histogram
    cache_obstacle: str
    loop_bans: int
    starting: _containers.ScalarMap[str, str]
    importing: _containers.MessageMap[str, Import]
    models: _containers.RepeatedCompositeFieldContainer[ModelRecord]
    shared: _containers.RepeatedCompositeFieldContainer[SharedTensors]
    def __init__(self, instance: _Optional[str] = ..., since: _Optional[int] = ..., next: _Optional[int] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., connections: _Optional[int] = ..., follows: _Optional[str] = ..., follows_revision: _Optional[int] = ..., depth: _Optional[int] = ..., numerics: _Optional[_Union[Numerics, str]] = ..., computes: _Optional[str] = ..., backlog_s: _Optional[float] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., host: _Optional[_Union[HostMemory, _Mapping]] = ..., host_limit_bytes: _Optional[int] = ..., scratch_bytes: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., in_use_bytes: _Optional[int] = ..., largest_free_bytes: _Optional[int] = ..., compiled: _Optional[int] = ..., from_cache: _Optional[int] = ..., shared_executables: _Optional[int] = ..., compile: _Optional[_Union[Histogram, _Mapping]] = ..., cache_obstacle: _Optional[str] = ..., loop_bans: _Optional[int] = ..., starting: _Optional[_Mapping[str, str]] = ..., importing: _Optional[_Mapping[str, Import]] = ..., models: _Optional[_Iterable[_Union[ModelRecord, _Mapping]]] = ..., shared: _Optional[_Iterable[_Union[SharedTensors, _Mapping]]] = ...) -> None: ...

class Import(_message.Message):
    __slots__ = ("seconds", "line")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    line: int
    def __init__(self, seconds: _Optional[float] = ..., line: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("sum", "first", "counts")
    SUM_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    sum: float
    first: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sum: _Optional[float] = ..., first: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("counts",)
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ModelRecord(_message.Message):
    __slots__ = ("name", "meta", "residency", "weights", "weights_state", "pinned", "weight_bytes", "device_bytes", "state_bytes", "host_bytes", "load_seconds", "executables", "cost_s", "max_rows", "batch_input", "queued", "executing", "outcomes", "refused", "missed", "dispatches", "useful_rows", "padded_rows", "device_seconds", "misses", "loads", "evictions", "queue_wait", "execute", "load", "batch_rows", "batch_padding", "sequences", "generations", "generated", "tokens", "first_token", "between_tokens", "responses", "request", "failure", "hooks", "aliases", "shadows", "calls_models", "calls", "kept_bytes", "answered", "errors", "state", "task")
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EvictionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SequencesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class GeneratedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ResponsesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class HooksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Histogram
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...
    class AliasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Counts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Counts, _Mapping]] = ...) -> None: ...
    class ShadowsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Counts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Counts, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    META_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_STATE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLES_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INPUT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    EXECUTING_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    DISPATCHES_FIELD_NUMBER: _ClassVar[int]
    USEFUL_ROWS_FIELD_NUMBER: _ClassVar[int]
    PADDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCH_PADDING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HOOKS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    CALLS_MODELS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    name: str
    meta: bool
    residency: Residency
    weights: Weights
    weights_state: str
    pinned: bool
    weight_bytes: int
    device_bytes: int
    state_bytes: int
    host_bytes: int
    load_seconds: float
    executables: _containers.RepeatedCompositeFieldContainer[Executable]
    cost_s: float
    max_rows: int
    batch_input: BatchInput
    queued: int
    executing: int
    outcomes: _containers.ScalarMap[str, int]
    refused: _containers.ScalarMap[str, int]
    missed: _containers.ScalarMap[str, int]
    dispatches: int
    useful_rows: int
    padded_rows: int
    device_seconds: float
    misses: int
    loads: int
    evictions: _containers.ScalarMap[str, int]
    queue_wait: Histogram
    execute: Histogram
    load: Histogram
    batch_rows: Histogram
    batch_padding: Histogram
    sequences: _containers.ScalarMap[str, int]
    generations: int
    generated: _containers.ScalarMap[str, float]
    tokens: _containers.ScalarMap[str, int]
    first_token: Histogram
    between_tokens: Histogram
    responses: _containers.ScalarMap[str, int]
    request: Histogram
    failure: str
    hooks: _containers.MessageMap[str, Histogram]
    aliases: _containers.MessageMap[str, Counts]
    shadows: _containers.MessageMap[str, Counts]
    calls_models: _containers.RepeatedScalarFieldContainer[str]
    calls: int
    kept_bytes: int
    answered: int
    errors: int
    state: State
    task: str
    def __init__(self, name: _Optional[str] = ..., meta: bool = ..., residency: _Optional[_Union[Residency, str]] = ..., weights: _Optional[_Union[Weights, str]] = ..., weights_state: _Optional[str] = ..., pinned: bool = ..., weight_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., executables: _Optional[_Iterable[_Union[Executable, _Mapping]]] = ..., cost_s: _Optional[float] = ..., max_rows: _Optional[int] = ..., batch_input: _Optional[_Union[BatchInput, _Mapping]] = ..., queued: _Optional[int] = ..., executing: _Optional[int] = ..., outcomes: _Optional[_Mapping[str, int]] = ..., refused: _Optional[_Mapping[str, int]] = ..., missed: _Optional[_Mapping[str, int]] = ..., dispatches: _Optional[int] = ..., useful_rows: _Optional[int] = ..., padded_rows: _Optional[int] = ..., device_seconds: _Optional[float] = ..., misses: _Optional[int] = ..., loads: _Optional[int] = ..., evictions: _Optional[_Mapping[str, int]] = ..., queue_wait: _Optional[_Union[Histogram, _Mapping]] = ..., execute: _Optional[_Union[Histogram, _Mapping]] = ..., load: _Optional[_Union[Histogram, _Mapping]] = ..., batch_rows: _Optional[_Union[Histogram, _Mapping]] = ..., batch_padding: _Optional[_Union[Histogram, _Mapping]] = ..., sequences: _Optional[_Mapping[str, int]] = ..., generations: _Optional[int] = ..., generated: _Optional[_Mapping[str, float]] = ..., tokens: _Optional[_Mapping[str, int]] = ..., first_token: _Optional[_Union[Histogram, _Mapping]] = ..., between_tokens: _Optional[_Union[Histogram, _Mapping]] = ..., responses: _Optional[_Mapping[str, int]] = ..., request: _Optional[_Union[Histogram, _Mapping]] = ..., failure: _Optional[str] = ..., hooks: _Optional[_Mapping[str, Histogram]] = ..., aliases: _Optional[_Mapping[str, Counts]] = ..., shadows: _Optional[_Mapping[str, Counts]] = ..., calls_models: _Optional[_Iterable[str]] = ..., calls: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., answered: _Optional[int] = ..., errors: _Optional[int] = ..., state: _Optional[_Union[State, str]] = ..., task: _Optional[str] = ...) -> None: ...
