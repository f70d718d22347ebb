"""Workers join and leave while the gateway runs. A source of workers that fails changes nothing."""

import asyncio
import logging
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rsrv.placement.contract import Worker
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.connections import cancel
from rsrv_gateway.members import Members, MembersError, parse_workers, read_workers
from tests.unit.control.virtual import run


class Dns:
    """Answers with `addresses`, or fails if `addresses` is None. `asked` counts the calls."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | None = addresses
        self.asked = 0

    async def __call__(self, name: str) -> Iterable[str]:
        self.asked += 1
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_AGAIN, f"no answer about {name}")
        return self.addresses


def section(**keys: object) -> GatewaySection:
    return GatewaySection.model_validate(keys)


def test_a_worker_of_the_settings_has_its_ports_and_a_name() -> None:
    """By default, a worker is named after its gRPC address. A control port without a host is on the worker's host."""
    members = Members(
        section(
            workers=[
                {"host": "a", "grpc_port": 18001, "http_port": None, "control": "7000"},
                {"host": "::1", "name": "six", "control": "unix:/run/control.sock"},
            ]
        )
    )

    assert members.workers() == {
        "a:18001": Worker("a:18001", "a:18001", None, "a:8002", "a:7000"),
        "six": Worker("six", "[::1]:8001", "[::1]:8000", "[::1]:8002", "unix:/run/control.sock"),
    }


def test_without_any_source_of_workers_there_is_no_gateway() -> None:
    """Without any source of workers, the error names the settings."""
    with pytest.raises(MembersError, match=r"gateway\.workers_dns"):
        Members(section())


def test_two_workers_of_one_name_are_refused() -> None:
    """Two workers with the same name are refused."""
    with pytest.raises(MembersError, match="called 'x'"):
        Members(section(workers=[{"host": "a", "name": "x"}, {"host": "b", "name": "x"}]))


def test_all_addresses_behind_a_name_are_workers_and_come_and_go() -> None:
    """Every 5 s, all addresses of a DNS name become workers, with the ports of workers_ports. Workers of old addresses leave."""
    dns = Dns("10.0.0.1", "10.0.0.2", "fd00::3")
    members = Members(section(workers_dns="workers", workers_ports={"grpc_port": 9001, "control": 8003}), dns)

    async def main() -> None:
        await members.refresh()
        assert list(members.workers()) == ["10.0.0.1:9001", "10.0.0.2:9001", "[fd00::3]:9001"]
        controls = [worker.control for worker in members.workers().values()]
        assert controls == ["10.0.0.1:8003", "10.0.0.2:8003", "[fd00::3]:8003"]
        dns.addresses = ("10.0.0.2", "10.0.0.4")
        changed = asyncio.Event()
        running = asyncio.create_task(members.run(changed.set))
        began = asyncio.get_running_loop().time()
        await changed.wait()
        assert asyncio.get_running_loop().time() - began == pytest.approx(5, abs=0.1)
        assert list(members.workers()) == ["10.0.0.2:9001", "10.0.0.4:9001"]
        running.cancel()

    run(main())


@pytest.mark.parametrize("control", ["unix:/run/control.sock", "10.0.0.9:8003"])
def test_one_control_service_cannot_be_that_of_all_that_the_dns_finds(control: str) -> None:
    """For workers from DNS, `control` must be a port. With a full address, all workers would have the same control service."""
    with pytest.raises(ValidationError, match="workers_ports: control must be a PORT"):
        section(workers_dns="workers", workers_ports={"control": control})


def test_a_dns_that_fails_takes_no_worker_away(caplog: pytest.LogCaptureFixture) -> None:
    """If DNS fails, no worker is removed. Each outage is logged once."""
    dns = Dns("10.0.0.1")
    members = Members(section(workers_dns="workers"), dns)

    async def main() -> None:
        await members.refresh()
        for answers in (None, None, ("10.0.0.1",), None):
            dns.addresses = answers
            await members.refresh()
            assert list(members.workers()) == ["10.0.0.1:8001"]

    with caplog.at_level(logging.WARNING):
        run(main())
    assert dns.asked == 5
    assert len([record for record in caplog.records if "no answer about workers" in record.message]) == 2


def test_a_dns_that_hangs_is_not_waited_for_for_ever() -> None:
    """If DNS does not answer, the other sources are still read, and known workers stay."""

    async def hang(_: str) -> Iterable[str]:
        await asyncio.Event().wait()
        return ()

    members = Members(section(workers=[{"host": "a"}], workers_dns="workers"), hang)
    run(members.refresh())
    assert list(members.workers()) == ["a:8001"]


def test_a_dns_that_hangs_does_not_hold_back_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop can end while a name server does not answer, although the system's resolver may wait for a minute."""
    query_started, test_ended, waited_for = threading.Event(), threading.Event(), []

    def hang(*_: Any, **__: Any) -> Any:
        query_started.set()
        waited_for.append(not test_ended.wait(60))
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    members = Members(section(workers_dns="workers"))

    async def main() -> None:
        refresh = asyncio.create_task(members.refresh())
        await asyncio.to_thread(query_started.wait)
        refresh.cancel()
        await asyncio.wait([refresh])

    asyncio.run(main())
    assert waited_for == []
    test_ended.set()


def test_without_a_thread_no_worker_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the system cannot start a thread, neither DNS nor the workers file can be read, and the gateway keeps its workers."""
    file = tmp_path / "workers.yaml"
    file.write_text("[{host: b}]")
    members = Members(section(workers=[{"host": "a"}], workers_dns="workers", workers_file=file))

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        # The patch ends before the loop does, because the loop's end also starts a thread.
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            await members.refresh()

    asyncio.run(main())
    assert list(members.workers()) == ["a:8001"]
    assert caplog.text.count("can't start new thread") == 2


def test_without_a_thread_the_file_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the system cannot start the thread that watches the workers file, the gateway polls the file."""
    file = tmp_path / "workers.yaml"
    file.write_text("[{host: b}]")
    members = Members(section(workers_file=file), pause=0.01)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            changed = asyncio.Event()
            running = asyncio.create_task(members.run(changed.set))
            while "(can't start new thread), so the file is read" not in caplog.text:
                await asyncio.sleep(0)
                assert not running.done()
        await changed.wait()
        await cancel([running])

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert list(members.workers()) == ["b:8001"]


def test_one_address_is_one_worker_in_all_sources() -> None:
    """An address in several sources is one worker. It has the name from the settings' list."""
    members = Members(
        section(workers=[{"host": "10.0.0.1", "name": "one"}], workers_dns="workers"),
        Dns("10.0.0.1", "10.0.0.2"),
    )
    run(members.refresh())
    assert list(members.workers()) == ["one", "10.0.0.2:8001"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {hots: a}", "did you mean 'host'?"),
        ("- {host: a, grpc_port: 0}", "workers.0.grpc_port"),
        ("host: a", "must be a list"),
        ("", "must be a list"),
        ("- [", "not valid YAML"),
        ("- !!int ''", "not valid YAML"),
        ("[" * 500, "levels deep"),
        ("[{host: a}, {host: a}]", "two workers are called 'a:8001'"),
    ],
)
def test_a_broken_file_takes_no_worker_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, message: str
) -> None:
    """A broken, half-written or missing workers file removes no worker. The log has the problem."""
    file = tmp_path / "workers.yaml"
    file.write_text("[{host: a}, {host: b}]")
    members = Members(section(workers_file=file))
    run(members.refresh())
    file.write_text(text)
    caplog.set_level(logging.INFO)

    for _ in range(2):
        run(members.refresh())
        assert list(members.workers()) == ["a:8001", "b:8001"]
    assert message in caplog.text
    assert "can be read again" not in caplog.text

    file.unlink()
    run(members.refresh())
    assert list(members.workers()) == ["a:8001", "b:8001"]
    file.write_text("[]")
    run(members.refresh())
    assert members.workers() == {}


def test_a_change_of_the_file_is_seen_long_before_the_next_refresh(tmp_path: Path) -> None:
    """A change of the workers file is noticed before the next refresh, even if the file is replaced or is a link."""
    real = tmp_path / "real.yaml"
    real.write_text("[{host: a}]")
    file = tmp_path / "workers.yaml"
    file.symlink_to("real.yaml")
    members = Members(section(workers_file=file), pause=3600)

    async def main() -> None:
        await members.refresh()
        changed = asyncio.Event()
        running = asyncio.create_task(members.run(changed.set))
        for host in "bc":
            while True:
                # Write the file repeatedly, because the test cannot know when the kernel starts to send notices.
                aside = tmp_path / f"{host}.yaml"
                aside.write_text(f"[{{host: {host}}}]")
                aside.rename(file)
                try:
                    await asyncio.wait_for(changed.wait(), 0.5)
                    break
                except TimeoutError:
                    continue
            changed.clear()
            assert list(members.workers()) == [f"{host}:8001"]
        running.cancel()

    asyncio.run(main())


def test_a_file_that_the_kernel_cannot_watch_is_polled(tmp_path: Path) -> None:
    """The kernel cannot watch a workers file in a missing folder, so the gateway finds the file by polling."""
    file = tmp_path / "later" / "workers.yaml"
    members = Members(section(workers_file=file), pause=0.1)

    async def main() -> None:
        await members.refresh()
        changed = asyncio.Event()
        running = asyncio.create_task(members.run(changed.set))
        file.parent.mkdir()
        file.write_text("[{host: a}]")
        await changed.wait()
        assert list(members.workers()) == ["a:8001"]
        running.cancel()

    asyncio.run(main())


def test_the_command_line_names_grpc_ports() -> None:
    """The command line names only the gRPC ports. The distances to the other ports are those of Triton's default ports."""
    first, second = parse_workers("gpu1:8001, [::1]:18011")
    assert (first.host, first.grpc_port, first.http_port, first.metrics_port) == ("gpu1", 8001, 8000, 8002)
    assert (second.host, second.grpc_port) == ("::1", 18011)
    for wrong in ("gpu1", "gpu1:x", ":8001", "gpu1:70000"):
        with pytest.raises(MembersError, match="HOST:PORT"):
            parse_workers(wrong)


def test_a_list_of_no_workers_is_a_list() -> None:
    """An empty list in the workers file is valid."""
    assert read_workers("[]") == {}
