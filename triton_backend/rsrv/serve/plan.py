"""Plan of `rsrv serve`: the server's command line, environment and addresses. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rsrv.address import Address, parse_address
from rsrv.settings import Settings
from rsrv.triton_command_line import Options

#: model repository, in the directory of `rsrv serve`
REPOSITORY = "models"
#: Threads of tritonserver for each model, which carry late answers and calls through Triton. By default there are 32, most
#: of a server's threads. With 2, late answers came as fast; calls of a meta model came slower (0.69 times as many with 8
#: clients), because each holds a thread and one must stay for answers.
_THREADS_PER_MODEL = 2
#: one more than the calls that a stub has in flight (`rsrv.stub.bls.MAX_CALLS`)
CALLING_THREADS = 9


class ServeError(Exception):
    """The server cannot be started; the message names the option or setting, and the remedy."""

    #: exit status of the command
    status = 1


class NoBundlesError(ServeError):
    """The command line names paths that will never hold bundles."""

    status = 2


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The tritonserver that `rsrv serve` keeps running."""

    argv: tuple[str, ...]
    #: additions to the environment of `rsrv serve`
    environment: Mapping[str, str]
    #: addresses by Triton's word for each: http, grpc, metrics
    ports: Mapping[str, Address]
    #: its model repository
    repository: Path
    #: seconds for requests in flight when it stops
    drain_s: float
    #: address of the live page; None: there is none
    page: Address | None

    def describe(self) -> str:
        """Return the plan as text, with a command for a shell."""
        words = [f"{key}={value}" for key, value in sorted(self.environment.items())]
        command = shlex.join([*(["env", *words] if words else ()), *self.argv])
        addresses = ", ".join(f"{kind} {address}" for kind, address in self.ports.items())
        page = f"live page: http://{self.page}/\n" if self.page else ""
        return f"{command}\naddresses: {addresses}\n{page}"


def plan(
    settings: Settings,
    directory: Path,
    tritonserver: str,
    *,
    ports: Mapping[str, int],
    arguments: Sequence[str] = (),
    drain_s: float = 30.0,
    threads: Mapping[str, str] | None = None,
    calling: bool = False,
) -> ServerPlan:
    """Return the plan. Raises ServeError.

    Args:
        settings: those of rsrv.yaml, with the devices of the command line.
        directory: an absolute path.
        tritonserver: path of the program.
        ports: by Triton's word for each.
        arguments: more flags for tritonserver, which take precedence.
        drain_s: seconds for requests in flight when the server stops.
        threads: variables with the thread counts of libraries.
        calling: a bundle calls models through Triton.
    """
    repository = directory / REPOSITORY
    flags = [
        f"--model-repository={repository}",
        # The control process needs these two to exchange models.
        "--model-control-mode=explicit",
        "--load-model=*",
        # A failed model must not stop the others, nor must a loading one.
        "--exit-on-error=false",
        "--strict-readiness=false",
        # The generated configurations are complete; completing them costs an extra stub and 1 s a model.
        "--disable-auto-complete-config",
        "--model-load-thread-count=32",
        "--backend-config=python,shm-default-byte-size=1048576",
        f"--backend-config=python,thread-pool-size={CALLING_THREADS if calling else _THREADS_PER_MODEL}",
        f"--exit-timeout-secs={max(1, round(drain_s))}",
        *(f"--{kind}-port={port}" for kind, port in ports.items()),
        *arguments,
    ]
    options = Options(flags)
    environment = dict(threads or {})
    if "devices" in settings.runtime.model_fields_set:
        # The command line's devices take precedence over the environment's.
        environment["RSRV_RUNTIME__DEVICES"] = json.dumps(settings.runtime.devices)
    listen = settings.metrics.listen if settings.control.enabled else None
    return ServerPlan(
        (tritonserver, *flags),
        environment,
        {kind: _address(kind, options) for kind in ports},
        repository,
        drain_s,
        _page(listen) if listen else None,
    )


def _address(kind: str, options: Options) -> Address:
    """Return where a tritonserver with these options listens."""
    host = options.last(f"{kind}-address", "0.0.0.0")
    try:
        return parse_address(str(Address(host, 0)).removesuffix("0") + options.last(f"{kind}-port", ""))
    except ValueError as error:
        raise ServeError(f"tritonserver's address for {kind}: {error}") from None


def _page(listen: str) -> Address:
    try:
        address = parse_address(listen)
    except ValueError as error:
        raise ServeError(f"metrics.listen: {error}") from None
    return Address(address.local, address.port)
