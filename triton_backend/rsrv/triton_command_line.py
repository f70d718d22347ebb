"""The command line of tritonserver: its options, where it listens, and which of its APIs need a key."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from rsrv.address import Address, bare, parse_address

#: Default ports, by tritonserver's name for each front end.
DEFAULT_PORTS: Mapping[str, int] = {"http": 8000, "grpc": 8001, "metrics": 8002}
#: The options that restrict APIs to callers with a key, as `API,API:KEY=VALUE`.
RESTRICTIONS: Mapping[str, str] = {"http": "http-restricted-api", "grpc": "grpc-restricted-protocol"}
#: APIs for operators, and what a client can do with each.
OPERATOR_APIS: Mapping[str, str] = {
    "model-repository": "load models, which runs code",
    "logging": "choose the file that the log is written to",
    "trace": "choose the file that traces are written to",
    "shared-memory": "register shared memory, a way into the server",
}

#: Longest time for a program to list its options, in seconds.
_HELP_S = 30.0

#: HTTP header in which a client sends the key for the operators' APIs of `rsrv serve`.
OPERATOR_HEADER = "rsrv-key"

#: Characters that a path may have if Triton's Python backend starts models in it.
_USABLE = re.compile(r"[\w@%+=:,./#~^*-]", re.ASCII)


def unusable_characters(path: Path) -> list[str]:
    """Return the characters that prevent Triton's Python backend from starting a model in this path.

    Up to release 25.08, Triton starts its stubs through a shell that splits and expands the path: the load never ends,
    and the log does not say why. On all releases, the Python of the stubs finds no module in a path that is not ASCII.
    """
    return sorted(set(_USABLE.sub("", str(path))))


def ask_flags(program: str, expected: str = "model-repository") -> frozenset[str]:
    """Return the names of a program's options. Raises OSError if the program does not list them.

    A list without the option `expected` also counts as no list. By default, `expected` is an option of tritonserver.
    """
    try:
        listed = subprocess.run(
            [program, "--help"], capture_output=True, text=True, timeout=_HELP_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{program} --help did not end within {_HELP_S:g} s") from None
    names = frozenset(re.findall(r"^\s*--([a-z0-9-]+)", listed.stdout + listed.stderr, re.MULTILINE))
    if expected not in names:
        reason = (listed.stderr or listed.stdout).strip().rpartition("\n")[2]
        raise OSError(f"{program} does not start: {reason or f'status {listed.returncode}'}")
    return names


def read_command_line(pid: int) -> list[str]:
    """Return the words of a process's command line, or no words if the process has ended or belongs to another user."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode("utf-8", "surrogateescape") for word in raw.split(b"\0")[:-1]]


class Options:
    """The options of a command line, as getopt_long reads them: `--name=value`, `--name value`, or `--name` for true.

    A name may be abbreviated if it is still unambiguous.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._given: list[tuple[str, str]] = []
        for word, following in zip_longest(words, words[1:], fillvalue="-"):
            if word == "--":
                return
            if word.startswith("-"):
                name, equals, value = word.lstrip("-").partition("=")
                self._given.append(
                    (name, value if equals else "true" if following.startswith("-") else following)
                )

    def values(self, name: str, shortest: str | None = None) -> list[str]:
        """Return the values of an option, in order. `shortest` is its shortest valid abbreviation (default: no abbreviation)."""
        shortest = shortest or name
        return [value for flag, value in self._given if flag.startswith(shortest) and name.startswith(flag)]

    def last(self, name: str, default: str) -> str:
        """Return the last value of an option, which is the value that tritonserver uses, or `default`."""
        return [default, *self.values(name)][-1]

    def is_on(self, name: str, *, default: bool) -> bool:
        return self.last(name, "true" if default else "false").lower() in ("true", "1", "on", "t")


def listening(options: Options, front: str) -> Address:
    """Return the address where the front end `front` (a key of DEFAULT_PORTS) listens. Raises ValueError if it is not valid."""
    # The HTTP and metrics front ends expect IPv6 addresses with a prefix, and gRPC expects them in brackets.
    host = bare(options.last(f"{front}-address", "0.0.0.0").removeprefix("ipv4:").removeprefix("ipv6:"))
    port = options.last(f"{front}-port", str(DEFAULT_PORTS[front]))
    return parse_address(f"{str(Address(host, 0)).removesuffix('0')}{port}")


def address_flag(front: str, host: str) -> str:
    """Return the flag that makes a front end listen at the IP address `host`."""
    if ":" in host:
        host = f"[{host}]" if front == "grpc" else f"ipv6:{host}"
    return f"--{front}-address={host}"


def restrictions(options: Options, front: str) -> dict[str, tuple[str, str]]:
    """Return, for each restricted API, the key and the value that its callers must send. The values are secrets."""
    secrets: dict[str, tuple[str, str]] = {}
    for value in options.values(RESTRICTIONS[front]):
        apis, _, secret = value.partition(":")
        key, _, word = secret.partition("=")
        secrets |= dict.fromkeys(apis.split(","), (key, word))
    return secrets


def restriction(key: str, value: str) -> tuple[str, str]:
    """Return the gRPC header (name, value) that an API requires if it is restricted with KEY=VALUE."""
    return f"triton-grpc-protocol-{key.lower()}", value


def open_apis(options: Options) -> tuple[list[str], list[str]]:
    """Return the addresses at which other machines can call APIs for operators without a key, and the names of these APIs."""
    reachable = set(OPERATOR_APIS)
    if options.last("model-control-mode", "none").lower() != "explicit":
        reachable.discard("model-repository")
    if not options.is_on("allow-client-shm", default=True):
        reachable.discard("shared-memory")
    addresses, apis = [], set[str]()
    for front in RESTRICTIONS:
        try:
            address = listening(options, front)
        except ValueError:
            continue
        unrestricted = reachable - restrictions(options, front).keys()
        if unrestricted and options.is_on(f"allow-{front}", default=True) and not address.is_loopback:
            addresses.append(str(address))
            apis |= unrestricted
    return addresses, [api for api in OPERATOR_APIS if api in apis]


def open_apis_warning(options: Options, remedy: str = "") -> str:
    """Return a warning about what other machines can do with the operators' APIs, or "" if they can do nothing.

    `remedy` is the last sentence of the warning. By default, this sentence names flags of tritonserver.
    """
    addresses, apis = open_apis(options)
    if not apis:
        return ""
    actions = ", and ".join(OPERATOR_APIS[api] for api in apis)
    remedy = remedy or (
        f"Start tritonserver with --http-address=127.0.0.1 --grpc-address=127.0.0.1, or restrict {', '.join(apis)} with "
        "--http-restricted-api and --grpc-restricted-protocol (docs/security.md)"
    )
    return f"anyone who reaches {' or '.join(addresses)} can {actions}. {remedy}"
