"""The sections of rsrv.yaml about several devices: the gateway's and the node's."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rsrv.address import Address, bare, parse_address


class Section(BaseModel):
    """Base of all sections of rsrv.yaml: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Replicas = Annotated[int, Field(ge=1, le=1024)] | Literal["all"]


def _as_text(value: Any) -> Any:
    """A port is a number to YAML."""
    return str(value) if type(value) is int else value


class WorkerPorts(Section):
    """Where a tritonserver listens on its host."""

    grpc_port: int = Field(8001, ge=1, le=65535, description="Of its gRPC front end.")
    http_port: int | None = Field(8000, ge=1, le=65535, description="Of its HTTP front end; null: none.")
    metrics_port: int | None = Field(8002, ge=1, le=65535, description="Of its metrics; null: none.")
    control: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        None,
        description="Its control service: PORT on its host, HOST:PORT, or unix:PATH; null: none that the gateway may ask. "
        "lpt_packing needs it.",
    )


class WorkerEntry(WorkerPorts):
    """A tritonserver that the gateway may send requests to."""

    host: str = Field(min_length=1, description="Its name or address.")
    name: str | None = Field(
        None, description="What it is called in tables, metrics and logs; null: HOST:GRPC_PORT."
    )

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        try:
            parse_address(str(Address(bare(host), 1)))
        except ValueError:
            raise ValueError(f"{host!r} is no name or address of a host") from None
        return host


class GatewayModelSection(Section):
    """Settings of one model; absent keys take the general value."""

    replicas: Replicas | None = Field(None, description="As gateway.replicas, for this model.")


class GatewaySection(Section):
    """One endpoint in front of several tritonservers."""

    grpc: str | None = Field("0.0.0.0:8001", description="HOST:PORT for clients' gRPC; null: none.")
    http: str | None = Field("0.0.0.0:8000", description="HOST:PORT for clients' HTTP; null: none.")
    admin: str | None = Field(
        "127.0.0.1:8002",
        description="HOST:PORT for /metrics (the gateway's and all workers' in one), the live page of all workers, /healthz and "
        "/readyz. It asks for no token: let only Prometheus, operators and load balancers reach it. null: none.",
    )
    workers: list[WorkerEntry] = Field(
        default_factory=list, description="The tritonservers, by name or address."
    )
    workers_dns: str | None = Field(
        None,
        description="A name whose addresses are those of tritonservers, all with the ports of `workers_ports`; read "
        "again every 5 s.",
    )
    workers_file: Path | None = Field(
        None, description="A YAML file with a list as in `workers`, which is watched."
    )
    workers_ports: WorkerPorts = Field(
        WorkerPorts(),
        description="The ports of the tritonservers that `workers_dns` finds; `control` must be a PORT there.",
    )
    mode: Literal["round_robin", "least_outstanding", "lpt_packing"] = Field(
        "least_outstanding",
        description="Who gets a request, of the workers that serve its model. round_robin: each in turn; "
        "least_outstanding: the one with the least work under way; lpt_packing: models are packed onto workers by the "
        "work that they make, and move when that changes.",
    )
    work_basis: Literal["compute", "items", "requests"] = Field(
        "compute",
        description="What counts as work. requests: each the same; items: the rows in it; compute: these times what a row "
        "of the model costs, as the workers measured it.",
    )
    replicas: Replicas = Field(
        1, description="lpt_packing: the workers that share one model's requests; `all`: each has it."
    )
    rebalance_device_s: float = Field(
        300.0,
        gt=0,
        description="lpt_packing: device seconds of all workers together after which all models are "
        "packed again; the first time after a tenth of it.",
    )
    hysteresis: float = Field(
        0.1,
        ge=0,
        le=10,
        description="lpt_packing: a model stays where it is unless its worker would be busier by more than this fraction "
        "than another.",
    )
    probe_s: float = Field(0.5, ge=0.05, le=60, description="Pause between two looks at each worker.")
    request_timeout_s: float = Field(
        60.0, gt=0, le=86400, description="For requests whose client has set no deadline."
    )
    drain_s: float = Field(
        30.0, ge=0, le=3600, description="When told to end: how long requests under way may take."
    )
    max_message_bytes: int = Field(
        2**31 - 1,
        ge=1,
        le=2**31 - 1,
        description="Of one request or response; Triton's own limit is the default.",
    )
    tls_certificate: Path | None = Field(None, description="PEM file with the certificate chain for clients.")
    tls_key: Path | None = Field(None, description="PEM file with its private key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file with the authorities whose clients are let in; null: all clients are."
    )
    token_file: Path | None = Field(
        None, description="File with a secret that clients must send, as `authorization: Bearer SECRET`."
    )
    worker_ca: Path | None = Field(
        None,
        description="PEM file with the authorities of the workers' certificates; null: no TLS to workers.",
    )
    worker_certificate: Path | None = Field(
        None, description="PEM file with the certificate chain to show to workers."
    )
    worker_key: Path | None = Field(None, description="PEM file with its private key.")
    worker_token_file: Path | None = Field(
        None, description="File with the secret of the workers' control services."
    )
    worker_repository_key: str | None = Field(
        None,
        pattern="^[a-z0-9_.-]+$",
        description="KEY, in small letters, where the workers' tritonservers have --grpc-restricted-protocol=model-repository:KEY=VALUE: "
        "without, they do not tell the gateway which models are ready; null: they are not restricted.",
    )
    worker_repository_value_file: Path | None = Field(None, description="File with its VALUE.")
    control_listen: str | None = Field(
        None,
        description="HOST:PORT of the gateway's control service, beside its Unix socket. As control.listen it needs "
        "tls_client_ca or token_file.",
    )
    models: dict[str, GatewayModelSection] = Field(default_factory=dict, description="Per model, by name.")

    @model_validator(mode="after")
    def _whole(self) -> "GatewaySection":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key: both or neither")
        if not (self.workers_ports.control or "0").isdigit():
            raise ValueError("workers_ports: control must be a PORT, for each server has its own service")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if (self.worker_certificate is None) != (self.worker_key is None):
            raise ValueError("worker_certificate and worker_key: both or neither")
        if self.worker_certificate is not None and self.worker_ca is None:
            raise ValueError(
                "worker_certificate and worker_key need worker_ca: without it, workers are spoken to without TLS"
            )
        if (self.worker_repository_key is None) != (self.worker_repository_value_file is None):
            raise ValueError("worker_repository_key and worker_repository_value_file: both or neither")
        if self.control_listen is not None and self.tls_client_ca is None and self.token_file is None:
            raise ValueError("control_listen needs tls_client_ca or token_file: TLS alone lets everybody in")
        return self


class NodeSection(Section):
    """One machine with a tritonserver per device."""

    gpus: list[int | str] | int | None = Field(
        None,
        description="Indices or UUIDs of the GPUs to use, or how many; null: those of CUDA_VISIBLE_DEVICES, or all that "
        "NVML finds.",
    )
    cpu_workers: int = Field(
        0, ge=0, le=64, description="Tritonservers on the CPU, where there is no GPU or none is wanted."
    )
    directory: Path = Field(
        Path("node"),
        description="Where the workers' model repositories are kept, and the list of workers; on the file system of the "
        "bundles, so that these are shared and not copied.",
    )
    arguments: list[str] = Field(default_factory=list, description="More arguments for it; they win.")
    first_port: int = Field(
        18000,
        ge=1,
        le=65000,
        description="With a gateway, worker n listens for HTTP, gRPC and metrics on this one + 10 n and the next two, of "
        "this machine only. One worker alone has the public ports.",
    )
    max_restarts: int = Field(
        10, ge=0, description="Restarts of a worker in a row after which the node ends; 0: no limit."
    )
    hang_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="A process that takes connections and has not answered for so long is killed, and started again; 0: it "
        "is left alone.",
    )
    drain_s: float = Field(30.0, ge=0, le=3600, description="When told to end: how long workers may take.")
