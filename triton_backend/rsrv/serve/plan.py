"""Plan of `rsrv serve`: the server's command line, environment and addresses. It has no side effects."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from rsrv.address import LOOPBACK, Address, parse_address
from rsrv.serve.operator_key import KEY_FILE
from rsrv.settings import Settings
from rsrv.triton_command_line import (
    OPERATOR_APIS,
    OPERATOR_HEADER,
    RESTRICTIONS,
    Options,
    address_flag,
    listening,
    open_apis_warning,
    restrictions,
    unusable_characters,
)

#: Name of the model repository in the directory of `rsrv serve`.
REPOSITORY = "models"
#: Number of tritonserver's threads for each model. They send late answers, and wait for calls through Triton. With the default
#: of 32, they would be most of a server's threads. In measurements, late answers were as fast with 2 threads as with 32. Calls
#: through Triton were slower (0.69 times as many with 8 clients), because each call occupies a thread, and one thread must stay
#: free for answers.
_THREADS_PER_MODEL = 2
#: Number of threads if a bundle calls models through Triton: one more than `rsrv.stub.bls.MAX_CALLS`.
CALLING_THREADS = 9
#: Placeholder of the operators' key on the command line until the server starts.
_KEY = "OPERATOR-KEY"


class ServeError(Exception):
    """The server cannot be started. The message names the option or setting, and the remedy."""

    #: Exit status of the command.
    status = 1


class NoBundlesError(ServeError):
    """The command line names no source of bundles, or paths that will never hold bundles."""

    status = 2


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The tritonserver that `rsrv serve` keeps running."""

    argv: tuple[str, ...]
    #: Additions to the environment of `rsrv serve`.
    environment: Mapping[str, str]
    #: Addresses by Triton's name of each protocol: http, grpc, metrics.
    ports: Mapping[str, Address]
    #: Path of the model repository.
    repository: Path
    #: Path of a link to the folder that contains the repository, or None if Triton can use the folder's own path. The link is
    #: made before the start.
    link: Path | None
    #: Seconds for requests in flight when the server stops.
    drain_s: float
    #: Address of the live page, or None if it is off.
    page: Address | None
    #: Prefix of the names of the stubs' shared memory. No other server on the machine has the same prefix.
    regions: str

    @property
    def key_file(self) -> Path:
        """The file with the key of the operators' APIs."""
        return self.repository.parent / KEY_FILE

    def with_key(self, key: str) -> ServerPlan:
        """Return the plan with the key of the operators' APIs on its command line."""
        return replace(
            self,
            argv=tuple(
                word.replace(f"{OPERATOR_HEADER}={_KEY}", f"{OPERATOR_HEADER}={key}") for word in self.argv
            ),
        )

    @property
    def warning(self) -> str:
        """A warning about what clients on other machines can do with the operators' APIs. Empty if they can do nothing."""
        return open_apis_warning(Options(self.argv), "Leave out --host or --client-shm (docs/security.md)")

    def describe(self) -> str:
        """Return the plan as text. The shell command in it reads the operators' key from the key's file."""
        words = [f"{key}={value}" for key, value in sorted(self.environment.items())]
        command = shlex.join([*(["env", *words] if words else ()), *self.argv])
        command = command.replace(
            f"{OPERATOR_HEADER}={_KEY}", f'{OPERATOR_HEADER}="$(cat {shlex.quote(str(self.key_file))})"'
        )
        addresses = ", ".join(f"{kind} {address}" for kind, address in self.ports.items())
        page = f"live page: http://{self.page}/\n" if self.page else ""
        if self.link is not None:
            made = shlex.join(["ln", "-sfn", str(self.repository.parent), str(self.link)])
            command = f"{made}\n{command}"
        return f"{command}\naddresses: {addresses}\n{page}"


def plan(
    settings: Settings,
    directory: Path,
    tritonserver: str,
    *,
    links: Path,
    ports: Mapping[str, int],
    host: str = LOOPBACK,
    client_shm: bool = False,
    arguments: Sequence[str] = (),
    drain_s: float = 30.0,
    variables: Mapping[str, str] | None = None,
    calling: bool = False,
    machine: str = "",
) -> ServerPlan:
    """Return the plan. Raises ServeError.

    Args:
        settings: Settings of rsrv.yaml with the devices of the command line.
        directory: Absolute path of the server's directory.
        tritonserver: Path of the program.
        links: Private folder for a link to `directory`, if Triton needs one.
        ports: Ports by Triton's name of each protocol.
        host: IP address at which tritonserver listens.
        client_shm: True if clients may register shared memory.
        arguments: More flags for tritonserver, which take precedence.
        drain_s: Seconds for requests in flight when the server stops.
        variables: Additions to tritonserver's environment.
        calling: True if a bundle calls models through Triton.
        machine: Name of the machine or pod. Servers in other containers may see another name.
    """
    repository = directory / REPOSITORY
    link = _link(directory, links) if unusable_characters(directory) else None
    # Servers that share /dev/shm differ in one of these values, so the prefix is unique. Triton does not let clients use names
    # with this prefix.
    identity = repr((machine, str(directory), sorted(ports.items())))
    regions = f"triton_python_backend_shm_region_{sha256(identity.encode(errors='surrogateescape')).hexdigest()[:12]}_"
    flags = [
        f"--model-repository={(link or directory) / REPOSITORY}",
        # The control process needs these two flags to load and unload models.
        "--model-control-mode=explicit",
        "--load-model=*",
        # The other models must start even if one fails or is still loading.
        "--exit-on-error=false",
        "--strict-readiness=false",
        # The generated configurations are complete. To complete them would cost an additional stub and 1 s per model.
        "--disable-auto-complete-config",
        "--model-load-thread-count=32",
        "--backend-config=python,shm-default-byte-size=1048576",
        f"--backend-config=python,shm-region-prefix-name={regions}",
        f"--backend-config=python,thread-pool-size={CALLING_THREADS if calling else _THREADS_PER_MODEL}",
        f"--exit-timeout-secs={max(1, round(drain_s))}",
        *(f"--{kind}-port={port}" for kind, port in ports.items()),
        *(address_flag(kind, host) for kind in ports),
        *_restricting(Options(arguments), client_shm=client_shm),
        *arguments,
    ]
    options = Options(flags)
    environment = dict(variables or {})
    if "devices" in settings.runtime.model_fields_set:
        # The command line's devices take precedence over the environment's.
        environment["RSRV_RUNTIME__DEVICES"] = json.dumps(settings.runtime.devices)
    listen = settings.metrics.listen if settings.control.enabled else None
    return ServerPlan(
        (tritonserver, *flags),
        environment,
        {kind: _address(kind, options) for kind in ports},
        repository,
        link,
        drain_s,
        _page(listen) if listen else None,
        regions,
    )


def _restricting(own: Options, *, client_shm: bool) -> list[str]:
    """Return flags that restrict the operators' APIs where the operator's own flags do not already do so."""
    flags = []
    for front, option in RESTRICTIONS.items():
        theirs = restrictions(own, front)
        apis = [
            api for api in OPERATOR_APIS if api not in theirs and not (client_shm and api == "shared-memory")
        ]
        if apis:
            flags.append(f"--{option}={','.join(apis)}:{OPERATOR_HEADER}={_KEY}")
    return flags


def _link(directory: Path, links: Path) -> Path:
    """Return the path of a link to a folder whose own path Triton cannot use. Raises ServeError if Triton cannot use the link."""
    link = links / f"folder-{sha256(os.fsencode(directory)).hexdigest()[:16]}"
    if characters := unusable_characters(link):
        raise ServeError(
            f"Triton cannot load models from {directory}, nor through a link in {links}, because of the characters {characters}. "
            "Choose another folder with --directory, or a folder for links with RSRV_RUNTIME_DIR"
        )
    return link


def _address(kind: str, options: Options) -> Address:
    """Return where a tritonserver with these options listens."""
    try:
        return listening(options, kind)
    except ValueError as error:
        raise ServeError(f"tritonserver's address for {kind}: {error}") from None


def _page(listen: str) -> Address:
    try:
        address = parse_address(listen)
    except ValueError as error:
        raise ServeError(f"metrics.listen: {error}") from None
    return Address(address.local, address.port)
