"""The sections of rsrv.yaml about several devices and servers: placement, and the gateway."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rsrv.address import Address, bare, parse_address
from rsrv.settings_units import Bytes, Seconds


class Section(BaseModel):
    """Base of all sections of rsrv.yaml: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _are_replicas(value: Any) -> Any:
    """Refuse wrong values with one sentence. A union would give one sentence for each of its members."""
    text = str(value)
    if text not in ("auto", "all") and not (text.isdecimal() and 1 <= int(text) <= 1024):
        raise ValueError("must be a number from 1 to 1024, auto or all")
    return value


Replicas = Annotated[
    Annotated[int, Field(ge=1, le=1024)] | Literal["auto", "all"], BeforeValidator(_are_replicas)
]


#: Method by which the gateway chooses a request's worker.
GatewayMode = Literal["round_robin", "least_outstanding", "lpt_packing"]


def _as_text(value: Any) -> Any:
    """Return a port as text, because YAML reads it as a number."""
    return str(value) if type(value) is int else value


class WorkerPorts(Section):
    """Ports of a tritonserver."""

    grpc_port: int = Field(8001, ge=1, le=65535, description="Port of its gRPC front end.")
    http_port: int | None = Field(8000, ge=1, le=65535, description="Port of its HTTP front end; null: none.")
    metrics_port: int | None = Field(8002, ge=1, le=65535, description="Port of its metrics; null: none.")
    control: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        None,
        description="Its control service: PORT on its host, HOST:PORT, or unix:PATH. lpt_packing needs it. null: none.",
    )


class WorkerEntry(WorkerPorts):
    """A tritonserver behind the gateway."""

    host: str = Field(min_length=1, description="Its name or address.")
    name: str | None = Field(None, description="Its name in tables, metrics and logs; null: HOST:GRPC_PORT.")

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        try:
            parse_address(str(Address(bare(host), 1)))
        except ValueError:
            raise ValueError(f"{host!r} is not a name or address of a host") from None
        return host


class PlacementSection(Section):
    """Placement of models on devices: of this server, or of all servers behind the gateway that reads the file."""

    mode: Literal["lpt_packing", "least_outstanding", "external"] = Field(
        "lpt_packing",
        description="lpt_packing: models are packed onto devices by measured load; least_outstanding: each request goes to the "
        "device that is expected to answer first, even if it must load weights; external: a gateway places models on the "
        "devices of all its servers.",
    )
    replicas: Replicas = Field(
        "auto",
        description="Number of devices that share one model's requests. auto: one, and more while the model keeps its devices "
        "busy.",
    )


class PlacedModelSection(Section):
    """Placement of one model; absent keys take the general value."""

    devices: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        min_length=1,
        description="Devices that may have the model, by their position in runtime.devices. While none of them works, any "
        "other may. null: all.",
    )
    replicas: Replicas | None = Field(None, description="As placement.replicas, for this model.")


class GatewaySection(Section):
    """One endpoint in front of several tritonservers."""

    grpc: str | None = Field(
        "127.0.0.1:8001",
        description="HOST:PORT for clients' gRPC. The HOST 0.0.0.0 means all addresses. null: none.",
    )
    http: str | None = Field("127.0.0.1:8000", description="As `grpc`, for clients' HTTP.")
    admin: str | None = Field(
        "127.0.0.1:8002",
        description="HOST:PORT for /metrics, the live page, /healthz and /readyz. It requires no token: let only Prometheus, "
        "operators and load balancers reach it. null: none.",
    )
    workers: list[WorkerEntry] = Field(default_factory=list, description="The tritonservers.")
    workers_dns: str | None = Field(
        None,
        description="DNS name with the addresses of tritonservers.",
    )
    workers_file: Path | None = Field(None, description="YAML file with a list as in `workers`.")
    workers_ports: WorkerPorts = Field(
        WorkerPorts(),
        description="Ports of the tritonservers that `workers_dns` finds; `control` must be a PORT.",
    )
    mode: GatewayMode = Field(
        "lpt_packing",
        description="Which worker gets a request. round_robin: each in turn; least_outstanding: the one with the least "
        "outstanding work; lpt_packing: models are packed onto workers by measured load.",
    )
    request_timeout_s: Seconds = Field(
        60.0, gt=0, le=86400, description="Limit of requests without a deadline."
    )
    drain_s: Seconds = Field(
        30.0, ge=0, le=3600, description="How long requests in flight may take when the gateway stops."
    )
    max_message_bytes: Bytes = Field(
        2**31 - 1,
        ge=1,
        le=2**31 - 1,
        description="Limit of one request or response.",
    )
    tls_certificate: Path | None = Field(None, description="PEM file with the certificate chain for clients.")
    tls_key: Path | None = Field(None, description="PEM file with its private key.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file with the authorities of accepted client certificates. null: none are required.",
    )
    token_file: Path | None = Field(
        None, description="File with a secret that clients must send, as `authorization: Bearer SECRET`."
    )
    worker_ca: Path | None = Field(
        None,
        description="PEM file with the authorities of the workers' certificates. null: no TLS to workers.",
    )
    worker_certificate: Path | None = Field(
        None, description="PEM file with the gateway's certificate chain for workers."
    )
    worker_key: Path | None = Field(None, description="PEM file with its private key.")
    worker_token_file: Path | None = Field(
        None, description="File with the secret of the workers' control services."
    )
    worker_repository_key: str = Field(
        "rsrv-key",
        pattern="^[a-z0-9_.-]+$",
        description="KEY, in lower case, of the workers' flag --grpc-restricted-protocol=model-repository:KEY=VALUE.",
    )
    worker_repository_value_file: Path | None = Field(
        None,
        description="File with the VALUE of that flag; for `rsrv serve`, the file operator-key in its directory. null: the "
        "workers have no such flag.",
    )
    control_listen: str | None = Field(
        None,
        description="HOST:PORT of the gateway's control service, in addition to its Unix socket. It needs tls_client_ca or "
        "token_file.",
    )

    @model_validator(mode="after")
    def _whole(self) -> "GatewaySection":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key: both or neither")
        if not (self.workers_ports.control or "0").isdigit():
            raise ValueError(
                "workers_ports: control must be a PORT, because each server has its own control service"
            )
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if (self.worker_certificate is None) != (self.worker_key is None):
            raise ValueError("worker_certificate and worker_key: both or neither")
        if self.worker_certificate is not None and self.worker_ca is None:
            raise ValueError(
                "worker_certificate and worker_key need worker_ca: without worker_ca, the gateway does not use TLS to workers"
            )
        usual = type(self).model_fields["worker_repository_key"].default
        if self.worker_repository_key != usual and self.worker_repository_value_file is None:
            raise ValueError("worker_repository_key needs worker_repository_value_file")
        if self.control_listen is not None and self.tls_client_ca is None and self.token_file is None:
            raise ValueError(
                "control_listen needs tls_client_ca or token_file: TLS alone admits every client"
            )
        return self
