"""The keys of a scenario file, with their types and meanings. `scenario` reads the file and checks it as a whole."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rsrv.placement.options import PlannerOptions
from rsrv.settings import IdleSection, SchedulerSection, Start


class Part(BaseModel):
    """A mapping in the file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


#: Maximum number of seconds in a scenario, and its latest time: thirty years.
LONGEST = 1e9


def _unquoted(size: object) -> object:
    """Convert a text of digits to a number. Scenarios may be written in JSON, whose keys are texts."""
    return int(size) if isinstance(size, str) and size.isascii() and size.isdecimal() else size


#: Seconds of one execution, by compiled size.
Costs = Annotated[
    dict[
        Annotated[int, BeforeValidator(_unquoted), Field(ge=1, strict=True)],
        Annotated[float, Field(ge=1e-9, le=LONGEST)],
    ],
    Field(min_length=1),
]


class DeviceKeys(Part):
    """The device, its link to the host, and the host's disk."""

    weight_budget_bytes: int | None = Field(
        None, ge=0, description="Device bytes for weights; absent: no limit."
    )
    h2d_bytes_per_s: float | None = Field(
        None,
        ge=1,
        description="Rate of loads of weights, which take place one at a time; absent: loads take no time.",
    )
    read_bytes_per_s: float | None = Field(
        None,
        ge=1,
        description="Rate of reads of weights from the disk to the host; absent: reads take no time.",
    )
    warm: bool = Field(
        False,
        description="true: models start, in listing order, with their weights on the device, as far as the budget allows; "
        "false: all weights start on the host.",
    )


def _of_a_model(idle: IdleSection) -> IdleSection:
    if "server" in idle.model_fields_set:
        raise ValueError("server: a simulated runtime does not sleep; leave it out")
    return idle


Idle = Annotated[IdleSection, AfterValidator(_of_a_model)]


class RuntimeKeys(Part):
    """Keys of rsrv.yaml's section `runtime` about cold models and idleness. They require a scenario with one device."""

    start: Start = Field(
        "eager", description="eager: models are started at time 0; lazy: by their first request."
    )
    start_timeout_s: float = Field(
        60.0, gt=0, le=LONGEST, description="Maximum wait of a request for the start of its model."
    )
    idle: Idle = Field(
        IdleSection(),
        description="`{device, host, executable}`: times without requests. After them, a model's weights leave the device, its "
        "weights leave host memory, and the model becomes cold.",
    )
    host_memory_bytes: int | None = Field(
        None, ge=0, description="Host bytes for copies of weights; absent: no limit."
    )


class ModelKeys(Part):
    """One model, or `count` equal ones."""

    cost: Costs | None = Field(
        None,
        description="Seconds of one execution by compiled size. Required, unless there are `variants` or `compiled`.",
    )
    variants: list[Costs] | None = Field(
        None,
        min_length=1,
        description="Instead of `cost`: a mapping like `cost` for each compiled variant of the input shapes.",
    )
    lengths: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="Lengths of a padded axis, ascending, one for each of `variants`. A request uses the shortest variant that "
        "holds its `length`. It may be padded to a longer one to share an execution.",
    )
    share_lengths: bool = Field(
        True, description="false: requests of different `lengths` never share an execution."
    )
    compiled: Path | None = Field(
        None,
        description="Instead of `cost`: a file of `rsrv-gen --compile-for` with estimates for the model of this name.",
    )
    cost_jitter: float = Field(
        0.0,
        ge=0,
        description="Standard deviation of real executions, relative to the cost. The scheduler has to learn the real times. "
        "No execution is shorter than a tenth of the cost.",
    )
    weight_bytes: int = Field(0, ge=0, le=2**60, description="Bytes of the model's weights.")
    shared_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of `weight_bytes` that all `count` models have in common, as fine-tunes of one backbone do. They are "
        "on the device once.",
    )
    shares: dict[str, Annotated[int, Field(ge=0)]] = Field(
        {},
        description="Bytes of `weight_bytes` in common with all models that name the same group: {GROUP: bytes}.",
    )
    residency: Literal["system", "device"] = Field(
        "system",
        description="device: the weights are loaded at the start and stay on the device, even if they exceed the budget.",
    )
    weight: float = Field(
        1.0, ge=1e-3, le=1e3, description="Share of device time, relative to the weights of other models."
    )
    max_batch_size: int | None = Field(
        None,
        ge=1,
        description="Maximum number of rows in one execution, without padding; absent: the largest compiled size.",
    )
    max_queue_depth: int | None = Field(
        None, ge=1, description="Maximum number of waiting requests; absent: as `settings.max_queue_depth`."
    )
    max_delay_us: float = Field(
        0.0, ge=0, description="Maximum time that a request waits for others to share its execution, in us."
    )
    coalesce: bool = Field(True, description="false: requests never share an execution.")
    start: Start | None = Field(None, description="As `runtime.start`, for this model.")
    start_s: float = Field(
        0.0,
        ge=0,
        le=LONGEST,
        description="Seconds of a cold start that compile the model or load its stored executable. The time to read the weights is "
        "added.",
    )
    idle: Idle = Field(
        IdleSection(),
        description="As `runtime.idle`, for this model; absent keys have the values of `runtime.idle`.",
    )
    count: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Number of equal models NAME-0, NAME-1, ... In `models` of arrivals, NAME means all of them.",
    )

    @model_validator(mode="after")
    def _one_kind_of_cost(self) -> "ModelKeys":
        if sum(kind is not None for kind in (self.cost, self.variants, self.compiled)) != 1:
            raise ValueError("give either cost or variants, or compiled")
        return self

    @model_validator(mode="after")
    def _one_length_each(self) -> "ModelKeys":
        lengths = self.lengths
        if lengths is not None and (
            len(lengths) != len(self.variants or ()) or lengths != sorted(set(lengths))
        ):
            raise ValueError("lengths: give one for each of `variants`, in ascending order")
        return self

    @model_validator(mode="after")
    def _no_more_than_all(self) -> "ModelKeys":
        shared = self.shared_bytes + sum(self.shares.values())
        if shared > self.weight_bytes:
            raise ValueError(
                f"shared_bytes and shares: {shared} is more than weight_bytes ({self.weight_bytes})"
            )
        return self


class RequestKeys(Part):
    """One request, as in a list of arrivals or a line of a trace."""

    t: float = Field(ge=0, le=LONGEST, description="Time of arrival, in seconds from the start.")
    model: str = Field(description="Name of the model.")
    rows: int = Field(1, ge=0, description="Rows along the batch axis.")
    deadline_s: float | None = Field(
        None,
        le=LONGEST,
        description="Deadline, in seconds after the arrival; absent: the request waits forever.",
    )
    priority: int = Field(0, ge=0, description="1 is the most urgent; 0 means the scheduler's default level.")
    variant: int = Field(0, ge=0, description="Index in the model's `variants`.")
    length: int = Field(
        0, ge=0, description="Length along a padded axis, instead of `variant`; 0: no length."
    )
    committed: bool = Field(
        False, description="true: a call by a running meta model, which goes before other requests."
    )


def _shares(models: object) -> object:
    return dict.fromkeys(models, 1.0) if isinstance(models, list) else models


class _SourceKeys(Part):
    rows: int = Field(1, ge=0, description="Rows of each request.")
    deadline_s: float | None = Field(
        None, gt=0, le=LONGEST, description="Deadline of each request, in seconds after its arrival."
    )
    priority: int = Field(0, ge=0, description="Priority of each request.")


class _OpenLoop(_SourceKeys):
    start: float = Field(0.0, ge=0, description="Start of the source, in seconds.")
    stop: float | None = Field(None, ge=0, description="End of the source, in seconds; absent: `duration`.")


class Poisson(_OpenLoop):
    """Independent requests at a constant mean rate."""

    rate: float = Field(gt=0, description="Requests per second, for all models of the source together.")
    models: Annotated[dict[str, Annotated[float, Field(ge=0, le=1e9)]], BeforeValidator(_shares)] | None = (
        Field(
            None,
            min_length=1,
            description="A list of models with equal shares of the rate, or {NAME: share}; absent: all models.",
        )
    )

    @model_validator(mode="after")
    def _something(self) -> "Poisson":
        if self.models and not sum(self.models.values()):
            raise ValueError("models: at least one share must be above 0")
        return self


class Zipf(_OpenLoop):
    """Poisson arrivals over models of falling popularity: the k-th gets a share proportional to k ** -exponent."""

    rate: float = Field(gt=0, description="Requests per second, for all models of the source together.")
    models: list[str] | None = Field(
        None, min_length=1, description="The models, most popular first; absent: all, in listing order."
    )
    exponent: float = Field(
        1.0, ge=0, description="Exponent of the shares above. With 0, all models are equally popular."
    )
    shuffle: bool = Field(
        False,
        description="true: a random order of the models, drawn from the seed, is their order of popularity.",
    )
    night: float | None = Field(
        None,
        ge=0,
        le=1,
        description="A model's lowest rate, as a share of its highest rate half a day later. Rates rise and fall as a sine, with "
        "the mean `rate`. Absent: rates are constant.",
    )
    day_s: float = Field(
        86400.0, gt=0, le=LONGEST, description="Length of a day; the rates are lowest at its start."
    )
    spread: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Maximum share of a day by which a model's day begins later. Each model's share is random, drawn from the "
        "seed.",
    )


class Bursts(_OpenLoop):
    """Groups of requests at one instant, at regular times."""

    models: list[str] | None = Field(None, min_length=1, description="The models; absent: all.")
    every_s: float = Field(ge=1e-6, description="Time between two bursts of a model.")
    size: int = Field(ge=1, description="Number of requests in one burst of a model.")
    jitter_s: float = Field(0.0, ge=0, description="Maximum delay of a burst. Delays are random and uniform.")


class ClosedLoop(_SourceKeys):
    """Clients that send their next request when the last one has ended.

    A request that is refused at once is sent again after the time that the refusal names, or after 1 ms. Each attempt
    counts as a request.
    """

    models: list[str] | None = Field(None, min_length=1, description="The models; absent: all.")
    clients: int = Field(
        ge=1, description="Number of clients of each model. All send their first request at time 0."
    )
    think_s: float = Field(
        0.0, ge=0, description="Pause of a client between the end of a request and its next request."
    )


class TraceKeys(Part):
    """Recorded requests: a CSV with the header t,model and any of rows,deadline_s,priority,variant,length,committed."""

    path: str = Field(description="Path of the file, relative to the scenario file.")
    scale: float = Field(1.0, gt=0, description="Factor for all times t.")


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _traces(traces: object) -> object:
    return [
        {"path": trace} if isinstance(trace, str) else trace
        for trace in (traces if isinstance(traces, list) else [traces])
    ]


_Several = BeforeValidator(_listed)


class Arrivals(Part):
    """The sources of requests. Each is one mapping or a list of mappings. A plain list of requests is short for `requests`."""

    requests: list[RequestKeys] = Field([], description="Single requests, in any order.")
    poisson: Annotated[list[Poisson], _Several] = Field([], description=str(Poisson.__doc__))
    zipf: Annotated[list[Zipf], _Several] = Field([], description=str(Zipf.__doc__))
    bursts: Annotated[list[Bursts], _Several] = Field([], description=str(Bursts.__doc__))
    closed: Annotated[list[ClosedLoop], _Several] = Field(
        [], description=str(ClosedLoop.__doc__).splitlines()[0]
    )
    trace: Annotated[list[TraceKeys], BeforeValidator(_traces)] = Field(
        [], description=f"{TraceKeys.__doc__} A trace can also be the path alone."
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_list(cls, value: Any) -> Any:
        return {"requests": value} if isinstance(value, list) else value

    @property
    def endless(self) -> list[str]:
        """The keys of sources that only the scenario's duration ends."""
        sources: dict[str, Iterable[Poisson | Zipf | Bursts]]
        sources = {"poisson": self.poisson, "zipf": self.zipf, "bursts": self.bursts}
        endless = [key for key, listed in sources.items() if any(source.stop is None for source in listed)]
        return endless + (["closed"] if self.closed else [])


class GatewayKeys(PlannerOptions):
    """The planner's options, and the pause between two probes."""

    probe_s: float = Field(0.5, ge=0.05, le=60, description="Pause between two probes of the devices.")


class File(Part):
    """All of a scenario file."""

    discipline: str | None = Field(
        None,
        description="Rule that chooses the next model: a discipline of the scheduler, or one of the simulator "
        "(round_robin, static_priority). Replaces `settings.discipline`.",
    )
    seed: int = Field(
        0, description="Seed of all random values. Equal scenarios with equal seeds give equal results."
    )
    duration: float | None = Field(
        None,
        gt=0,
        le=LONGEST,
        description="Seconds in which requests arrive. The figures of the device cover only these seconds. Requests that wait at "
        "the end are still served. Required if arrivals do not end by themselves.",
    )
    device: DeviceKeys = Field(DeviceKeys(), description=str(DeviceKeys.__doc__))
    devices: int = Field(1, ge=1, le=1000, description="Number of equal devices. Each serves all models.")
    servers: int | None = Field(
        None,
        ge=1,
        description="Number of servers, which have equal numbers of devices; absent: one per device. The gateway chooses the "
        "server of a request, and the model's stub there chooses the device.",
    )
    gateway: GatewayKeys | None = Field(
        None,
        description="Routes of requests and places of weights. Keys are those of rsrv.yaml's section `placement` and of the "
        "policy, and `probe_s`. Absent: the defaults, if there are several devices. A single server places models itself, by the "
        "same keys.",
    )
    front_s: float = Field(
        0.0,
        ge=0,
        le=LONGEST,
        description="Seconds that an answer takes outside the runtime: in Triton, in its front, in the network and in the client.",
    )
    settings: SchedulerSection = Field(
        SchedulerSection(), description="The section `scheduler` of rsrv.yaml."
    )
    runtime: RuntimeKeys = Field(RuntimeKeys(), description=str(RuntimeKeys.__doc__))
    models: dict[Annotated[str, Field(min_length=1)], ModelKeys] = Field(
        min_length=1, description="The models by name, in listing order."
    )
    arrivals: Arrivals = Field(description="The traffic.")
