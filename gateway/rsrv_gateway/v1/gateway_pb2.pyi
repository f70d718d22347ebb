from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_ROUND_ROBIN: _ClassVar[Mode]
    MODE_LEAST_OUTSTANDING: _ClassVar[Mode]
    MODE_LPT_PACKING: _ClassVar[Mode]

class WorkBasis(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORK_BASIS_UNSPECIFIED: _ClassVar[WorkBasis]
    WORK_BASIS_COMPUTE: _ClassVar[WorkBasis]
    WORK_BASIS_ITEMS: _ClassVar[WorkBasis]
    WORK_BASIS_REQUESTS: _ClassVar[WorkBasis]

class Fill(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILL_UNSPECIFIED: _ClassVar[Fill]
    FILL_LEAST: _ClassVar[Fill]
    FILL_RR: _ClassVar[Fill]

class Route(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTE_UNSPECIFIED: _ClassVar[Route]
    ROUTE_RUN: _ClassVar[Route]
    ROUTE_SPREAD: _ClassVar[Route]
MODE_UNSPECIFIED: Mode
MODE_ROUND_ROBIN: Mode
MODE_LEAST_OUTSTANDING: Mode
MODE_LPT_PACKING: Mode
WORK_BASIS_UNSPECIFIED: WorkBasis
WORK_BASIS_COMPUTE: WorkBasis
WORK_BASIS_ITEMS: WorkBasis
WORK_BASIS_REQUESTS: WorkBasis
FILL_UNSPECIFIED: Fill
FILL_LEAST: Fill
FILL_RR: Fill
ROUTE_UNSPECIFIED: Route
ROUTE_RUN: Route
ROUTE_SPREAD: Route

class Replicas(_message.Message):
    __slots__ = ("count", "all", "auto")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    count: int
    all: bool
    auto: bool
    def __init__(self, count: _Optional[int] = ..., all: bool = ..., auto: bool = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("work_basis", "replicas", "fill", "route", "fill_factor", "rebalance_device_s", "first_rebalance_device_s", "halflife_device_s", "hysteresis", "forbid_memory_oversubscription")
    WORK_BASIS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    FILL_FACTOR_FIELD_NUMBER: _ClassVar[int]
    REBALANCE_DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_REBALANCE_DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    HALFLIFE_DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    HYSTERESIS_FIELD_NUMBER: _ClassVar[int]
    FORBID_MEMORY_OVERSUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    work_basis: WorkBasis
    replicas: Replicas
    fill: Fill
    route: Route
    fill_factor: float
    rebalance_device_s: float
    first_rebalance_device_s: float
    halflife_device_s: float
    hysteresis: float
    forbid_memory_oversubscription: bool
    def __init__(self, work_basis: _Optional[_Union[WorkBasis, str]] = ..., replicas: _Optional[_Union[Replicas, _Mapping]] = ..., fill: _Optional[_Union[Fill, str]] = ..., route: _Optional[_Union[Route, str]] = ..., fill_factor: _Optional[float] = ..., rebalance_device_s: _Optional[float] = ..., first_rebalance_device_s: _Optional[float] = ..., halflife_device_s: _Optional[float] = ..., hysteresis: _Optional[float] = ..., forbid_memory_oversubscription: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("mode", "policy", "generation", "repacks", "models", "workers", "warnings", "pid", "version")
    MODE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REPACKS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    mode: Mode
    policy: Policy
    generation: int
    repacks: Repacks
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    version: str
    def __init__(self, mode: _Optional[_Union[Mode, str]] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., generation: _Optional[int] = ..., repacks: _Optional[_Union[Repacks, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Repacks(_message.Message):
    __slots__ = ("counts", "last", "last_age_s", "packed", "moved", "held", "device_s", "threshold_device_s")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LAST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    last: str
    last_age_s: float
    packed: int
    moved: int
    held: int
    device_s: float
    threshold_device_s: float
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ..., last: _Optional[str] = ..., last_age_s: _Optional[float] = ..., packed: _Optional[int] = ..., moved: _Optional[int] = ..., held: _Optional[int] = ..., device_s: _Optional[float] = ..., threshold_device_s: _Optional[float] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "ready", "placed", "moving_to", "along", "replicas", "effective_replicas", "utilisation", "requests_s", "item_s", "bytes", "quantum", "fill")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    MOVING_TO_FIELD_NUMBER: _ClassVar[int]
    ALONG_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_S_FIELD_NUMBER: _ClassVar[int]
    ITEM_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    QUANTUM_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: _containers.RepeatedScalarFieldContainer[str]
    placed: _containers.RepeatedScalarFieldContainer[str]
    moving_to: _containers.RepeatedScalarFieldContainer[str]
    along: _containers.RepeatedScalarFieldContainer[str]
    replicas: Replicas
    effective_replicas: int
    utilisation: float
    requests_s: float
    item_s: float
    bytes: int
    quantum: int
    fill: Fill
    def __init__(self, name: _Optional[str] = ..., ready: _Optional[_Iterable[str]] = ..., placed: _Optional[_Iterable[str]] = ..., moving_to: _Optional[_Iterable[str]] = ..., along: _Optional[_Iterable[str]] = ..., replicas: _Optional[_Union[Replicas, _Mapping]] = ..., effective_replicas: _Optional[int] = ..., utilisation: _Optional[float] = ..., requests_s: _Optional[float] = ..., item_s: _Optional[float] = ..., bytes: _Optional[int] = ..., quantum: _Optional[int] = ..., fill: _Optional[_Union[Fill, str]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "alive", "grpc", "models", "utilisation", "busy", "bytes", "budget_bytes", "oversubscribed", "backlog_s", "outstanding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    OVERSUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    alive: bool
    grpc: str
    models: int
    utilisation: float
    busy: float
    bytes: int
    budget_bytes: int
    oversubscribed: bool
    backlog_s: float
    outstanding: int
    def __init__(self, name: _Optional[str] = ..., alive: bool = ..., grpc: _Optional[str] = ..., models: _Optional[int] = ..., utilisation: _Optional[float] = ..., busy: _Optional[float] = ..., bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., oversubscribed: bool = ..., backlog_s: _Optional[float] = ..., outstanding: _Optional[int] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy", "update_mask")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy", "warnings")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPlacementRequest(_message.Message):
    __slots__ = ("model", "replicas", "fill", "fill_factor", "allow_unknown")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    FILL_FACTOR_FIELD_NUMBER: _ClassVar[int]
    ALLOW_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    model: str
    replicas: Replicas
    fill: Fill
    fill_factor: float
    allow_unknown: bool
    def __init__(self, model: _Optional[str] = ..., replicas: _Optional[_Union[Replicas, _Mapping]] = ..., fill: _Optional[_Union[Fill, str]] = ..., fill_factor: _Optional[float] = ..., allow_unknown: bool = ...) -> None: ...

class SetPlacementResponse(_message.Message):
    __slots__ = ("warnings",)
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class RepackRequest(_message.Message):
    __slots__ = ("wait",)
    WAIT_FIELD_NUMBER: _ClassVar[int]
    wait: bool
    def __init__(self, wait: bool = ...) -> None: ...

class RepackResponse(_message.Message):
    __slots__ = ("repacks",)
    REPACKS_FIELD_NUMBER: _ClassVar[int]
    repacks: Repacks
    def __init__(self, repacks: _Optional[_Union[Repacks, _Mapping]] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Location]
    def __init__(self, workers: _Optional[_Iterable[_Union[Location, _Mapping]]] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("worker", "grpc", "http", "placed")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    grpc: str
    http: str
    placed: bool
    def __init__(self, worker: _Optional[str] = ..., grpc: _Optional[str] = ..., http: _Optional[str] = ..., placed: bool = ...) -> None: ...
