"""The keys of a scenario file: typed, with what they mean. `scenario` reads the file and checks it as a whole."""

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
    """Return the number in a text of digits. Keys of JSON are texts, and JSON is YAML."""
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
        None, ge=0, description="Device bytes that weights may take; absent: no limit."
    )
    h2d_bytes_per_s: float | None = Field(
        None,
        ge=1,
        description="Rate at which weights come to the device, one load at a time; absent: at once.",
    )
    read_bytes_per_s: float | None = Field(
        None, ge=1, description="Rate at which weights come from the disk to the host; absent: at once."
    )
    warm: bool = Field(
        False,
        description="Start with the weights of each model, in listing order, that the budget still has room for. "
        "Otherwise all start on the host.",
    )


def _of_a_model(idle: IdleSection) -> IdleSection:
    if "server" in idle.model_fields_set:
        raise ValueError("server: a simulated runtime does not sleep; leave it out")
    return idle


Idle = Annotated[IdleSection, AfterValidator(_of_a_model)]


class RuntimeKeys(Part):
    """Keys of rsrv.yaml's section `runtime` about cold models and idleness; of one device only."""

    start: Start = Field(
        "eager", description="eager: models are started at time 0; lazy: by their first request."
    )
    start_timeout_s: float = Field(
        60.0, gt=0, le=LONGEST, description="Requests for a model that starts wait at most this long."
    )
    idle: Idle = Field(
        IdleSection(),
        description="`{device, host, executable}`: times without requests after which weights leave the device and host "
        "memory, and after which the model is cold.",
    )
    host_memory_bytes: int | None = Field(
        None, ge=0, description="Host bytes for copies of weights; absent: no limit."
    )


class ModelKeys(Part):
    """One model, or `count` equal ones."""

    cost: Costs | None = Field(
        None,
        description="Compiled size: seconds of one execution. Required, unless there are `variants` or `compiled`.",
    )
    variants: list[Costs] | None = Field(
        None,
        min_length=1,
        description="Instead of `cost`: one such mapping for each compiled input-shape variant.",
    )
    lengths: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="Lengths of a padded axis, ascending, one for each of `variants`. A request takes the shortest that holds "
        "its `length`, and may be padded to a longer one to share an execution.",
    )
    share_lengths: bool = Field(
        True, description="false: requests of different `lengths` never share an execution."
    )
    compiled: Path | None = Field(
        None,
        description="Instead of `cost`: a file of `rsrv-gen --compile-for`, which has estimates for the model of this name.",
    )
    cost_jitter: float = Field(
        0.0,
        ge=0,
        description="Relative standard deviation of real executions from the cost, which the scheduler has to learn. "
        "None is shorter than a tenth of it.",
    )
    weight_bytes: int = Field(0, ge=0, le=2**60, description="Bytes of its weights.")
    shared_bytes: int = Field(
        0,
        ge=0,
        description="Of these, what all `count` models have in common, as fine-tunes of one backbone do: it is on the "
        "device once.",
    )
    shares: dict[str, Annotated[int, Field(ge=0)]] = Field(
        {},
        description="Of these, what it has in common with the models that name the same group: {GROUP: bytes}.",
    )
    residency: Literal["system", "device"] = Field(
        "system",
        description="device: its weights are loaded at the start and stay, beyond the budget if need be.",
    )
    weight: float = Field(
        1.0, ge=1e-3, le=1e3, description="Its share of device time relative to other models."
    )
    max_batch_size: int | None = Field(
        None, ge=1, description="Most useful rows in one execution; absent: the largest compiled size."
    )
    max_queue_depth: int | None = Field(
        None, ge=1, description="Requests that may wait; absent: as `settings.max_queue_depth`."
    )
    max_delay_us: float = Field(
        0.0, ge=0, description="Longest time a request is held back for others to join it, in us."
    )
    coalesce: bool = Field(True, description="Whether requests may share an execution.")
    start: Start | None = Field(None, description="As `runtime.start`, for this model.")
    start_s: float = Field(
        0.0,
        ge=0,
        le=LONGEST,
        description="Seconds of a cold start to compile it, or to load its stored executable. The read of its weights is added.",
    )
    idle: Idle = Field(
        IdleSection(), description="As `runtime.idle`, for this model; absent keys take its values."
    )
    count: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="This many such models, NAME-0, NAME-1, ...; in `models` of arrivals NAME means all of them.",
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

    t: float = Field(ge=0, le=LONGEST, description="When it arrives, in seconds from the start.")
    model: str = Field(description="Its model.")
    rows: int = Field(1, ge=0, description="Rows along the batch axis.")
    deadline_s: float | None = Field(
        None, le=LONGEST, description="Deadline, in seconds after its arrival; absent: it waits for ever."
    )
    priority: int = Field(0, ge=0, description="1 is the most urgent; 0 means the scheduler's default level.")
    variant: int = Field(0, ge=0, description="Index in the model's `variants`.")
    length: int = Field(
        0, ge=0, description="Length along a padded axis, in place of `variant`; 0: it has none."
    )
    committed: bool = Field(False, description="A sub-call of a running meta model: goes first.")


def _shares(models: object) -> object:
    return dict.fromkeys(models, 1.0) if isinstance(models, list) else models


class _SourceKeys(Part):
    rows: int = Field(1, ge=0, description="Rows of each request.")
    deadline_s: float | None = Field(
        None, gt=0, le=LONGEST, description="Deadline of each, in seconds after its arrival."
    )
    priority: int = Field(0, ge=0, description="Priority of each.")


class _OpenLoop(_SourceKeys):
    start: float = Field(0.0, ge=0, description="When it starts, in seconds.")
    stop: float | None = Field(None, ge=0, description="When it stops; absent: at `duration`.")


class Poisson(_OpenLoop):
    """Independent requests at a constant mean rate."""

    rate: float = Field(gt=0, description="Requests per second, of all its models together.")
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

    rate: float = Field(gt=0, description="Requests per second, of all its models together.")
    models: list[str] | None = Field(
        None, min_length=1, description="The models, most popular first; absent: all, in listing order."
    )
    exponent: float = Field(1.0, ge=0, description="How steeply popularity falls; 0: all are equal.")
    shuffle: bool = Field(False, description="Popularity in a random order of the models (seeded).")
    night: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of a model's highest rate that is left half a day later: rates rise and fall as a sine, and `rate` is "
        "their mean; absent: they are constant.",
    )
    day_s: float = Field(
        86400.0, gt=0, le=LONGEST, description="Length of a day; the rates are lowest at its start."
    )
    spread: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Each model's day begins later by a random share of the day, up to this (seeded).",
    )


class Bursts(_OpenLoop):
    """Groups of requests at one instant, at regular times."""

    models: list[str] | None = Field(None, min_length=1, description="The models; absent: all.")
    every_s: float = Field(ge=1e-6, description="Time from one burst of a model to its next.")
    size: int = Field(ge=1, description="Requests of each model in one burst.")
    jitter_s: float = Field(0.0, ge=0, description="Each burst comes up to this much later, uniformly.")


class ClosedLoop(_SourceKeys):
    """Clients that send their next request when the last one has ended.

    A request that is refused at once is sent again after the time that the refusal names, or after 1 ms. Each attempt
    counts as a request.
    """

    models: list[str] | None = Field(None, min_length=1, description="The models; absent: all.")
    clients: int = Field(ge=1, description="Clients of each model; all send first at time 0.")
    think_s: float = Field(0.0, ge=0, description="Pause between the end of a request and the next.")


class TraceKeys(Part):
    """Recorded requests: a CSV with the header t,model and any of rows,deadline_s,priority,variant,length,committed."""

    path: str = Field(description="The file, relative to the scenario.")
    scale: float = Field(1.0, gt=0, description="Multiplies all t.")


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _traces(traces: object) -> object:
    return [
        {"path": trace} if isinstance(trace, str) else trace
        for trace in (traces if isinstance(traces, list) else [traces])
    ]


_Several = BeforeValidator(_listed)


class Arrivals(Part):
    """Each source is one mapping, or a list of them. A plain list of requests is short for `requests`."""

    requests: list[RequestKeys] = Field([], description="Single requests, in any order.")
    poisson: Annotated[list[Poisson], _Several] = Field([], description=str(Poisson.__doc__))
    zipf: Annotated[list[Zipf], _Several] = Field([], description=str(Zipf.__doc__))
    bursts: Annotated[list[Bursts], _Several] = Field([], description=str(Bursts.__doc__))
    closed: Annotated[list[ClosedLoop], _Several] = Field(
        [], description=str(ClosedLoop.__doc__).splitlines()[0]
    )
    trace: Annotated[list[TraceKeys], BeforeValidator(_traces)] = Field(
        [], description=f"{TraceKeys.__doc__} A path alone will do."
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
        endless = [key for key, those in sources.items() if any(source.stop is None for source in those)]
        return endless + (["closed"] if self.closed else [])


class GatewayKeys(PlannerOptions):
    """The planner's options, and the pause between its looks."""

    probe_s: float = Field(0.5, ge=0.05, le=60, description="Pause between two looks at the devices.")


class File(Part):
    """All of a scenario file."""

    discipline: str | None = Field(
        None,
        description="Which model goes next: one of the scheduler's disciplines, or of the simulator's own "
        "(round_robin, static_priority); wins over `settings.discipline`.",
    )
    seed: int = Field(
        0, description="Of everything random. Equal scenarios with equal seeds give equal results."
    )
    duration: float | None = Field(
        None,
        gt=0,
        le=LONGEST,
        description="Seconds in which requests arrive and that the device's figures are about; what waits then is "
        "still served. Required with arrivals that do not end by themselves.",
    )
    device: DeviceKeys = Field(DeviceKeys(), description=str(DeviceKeys.__doc__))
    devices: int = Field(1, ge=1, le=1000, description="This many such devices; each serves all models.")
    servers: int | None = Field(
        None,
        ge=1,
        description="Servers that the devices are divided among equally; absent: one per device. A gateway chooses the server, "
        "and the model's stub there the device.",
    )
    gateway: GatewayKeys | None = Field(
        None,
        description="How requests are routed and weights placed: keys of rsrv.yaml's section `placement`, of the policy, and `probe_s`. "
        "With several devices its defaults hold. A single server places models itself, by the same keys.",
    )
    front_s: float = Field(
        0.0,
        ge=0,
        le=LONGEST,
        description="Seconds that an answer takes beside the runtime: in Triton, its front, the network and the client.",
    )
    settings: SchedulerSection = Field(
        SchedulerSection(), description="The section `scheduler` of rsrv.yaml."
    )
    runtime: RuntimeKeys = Field(RuntimeKeys(), description=str(RuntimeKeys.__doc__))
    models: dict[Annotated[str, Field(min_length=1)], ModelKeys] = Field(
        min_length=1, description="The models by name, in listing order."
    )
    arrivals: Arrivals = Field(description="The traffic.")
