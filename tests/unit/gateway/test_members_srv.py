"""Workers by SRV records, from a real DNS server on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from inspect import cleandoc
from typing import Any

import dns.message
import dns.zonefile
import grpc
import pytest
from dns.asyncresolver import Resolver
from dns.name import from_text as dns_name
from dns.nameserver import Do53Nameserver
from dns.rcode import NXDOMAIN, SERVFAIL
from dns.rdatatype import AAAA, SRV, A
from dns.rrset import RRset
from tritonclient.grpc import service_pb2, service_pb2_grpc

from rsrv.placement.contract import Worker
from rsrv.placement.options import PlannerOptions
from rsrv.placement.planner import Planner
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway import members as members_module
from rsrv_gateway.brain import GatewayLoop, Proxy
from rsrv_gateway.connections import PROBE_S, PROBE_TIMEOUT_S, ChannelFactory
from rsrv_gateway.members import Members
from rsrv_gateway.probes import GrpcProber, Probes
from tests.unit.gateway.workers import FakeServer, serving
from tests.waiting import looped

NAME = "_grpc._tcp.rsrv.test"


class DnsServer(asyncio.DatagramProtocol):
    """Answers with the records of `zone`, which is written as in a zone file; other names do not exist."""

    def __init__(self) -> None:
        self.zone = ""
        #: SRV records come with all addresses
        self.glue = False
        #: names that get no answer, and names that get an error
        self.silent: set[str] = set()
        self.broken: set[str] = set()
        #: the questions
        self.asked: list[str] = []
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append(f"{name} {question.rdtype.name}")
        if name in self.silent:
            return
        answer = dns.message.make_response(query)
        records = _records(self.zone)
        answer.answer = [
            one for one in records if one.name == question.name and one.rdtype == question.rdtype
        ]
        if name in self.broken:
            answer.set_rcode(SERVFAIL)
        elif question.name not in {one.name for one in records}:
            answer.set_rcode(NXDOMAIN)
        if self.glue and question.rdtype == SRV:
            answer.additional = [one for one in records if one.rdtype in (A, AAAA)]
        self._transport.sendto(answer.to_wire(), addr)

    @property
    def port(self) -> int:
        return int(self._transport.get_extra_info("sockname")[1])

    def resolver(self) -> Resolver:
        """Return a resolver that asks this server only, and gives up soon if a name is silent."""
        resolver = Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = self.port
        resolver.lifetime = 0.2 if self.silent else 10
        return resolver

    def members(self, **settings: Any) -> Members:
        section = GatewaySection.model_validate({"workers_dns": NAME, **settings})
        return Members(section, resolver=self.resolver)


@lru_cache(maxsize=1)
def _records(zone: str) -> list[RRset]:
    return dns.zonefile.read_rrsets(cleandoc(zone), default_ttl=5)


@asynccontextmanager
async def dns_server(zone: str) -> AsyncIterator[DnsServer]:
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        DnsServer, local_addr=("127.0.0.1", 0)
    )
    server.zone = zone
    try:
        yield server
    finally:
        transport.close()


def at(name: str, host: str, grpc_port: int) -> Worker:
    """Return a worker whose other ports are beside the gRPC port, as Triton's are."""
    http, metrics, control = (f"{host}:{grpc_port + offset}" for offset in (-1, 1, 2))
    return Worker(name, f"{host}:{grpc_port}", http, metrics, control)


@pytest.mark.parametrize("glue", [False, True])
@looped
async def test_each_record_is_a_worker_with_its_port(glue: bool) -> None:
    """Each record is one worker at its port, and its priority does not count; one without a port or a target is none."""
    zone = f"""
        {NAME}. SRV 0 5 8001 one.test.
        {NAME}. SRV 9 0 8011 One.test.
        {NAME}. SRV 0 0 8001 six.test.
        {NAME}. SRV 0 0 0 one.test.
        {NAME}. SRV 0 0 8001 .
        one.test. A 10.0.0.2
        one.test. A 10.0.0.1
        one.test. AAAA fd00::1
        six.test. AAAA fd00::6
    """
    async with dns_server(zone) as server:
        server.glue = glue
        members = server.members(workers_ports={"control": 8003})
        await members.look()
        assert members.workers() == {
            "one.test:8001": at("one.test:8001", "10.0.0.1", 8001),
            "one.test:8011": at("one.test:8011", "10.0.0.1", 8011),
            "six.test:8001": at("six.test:8001", "[fd00::6]", 8001),
        }
        if glue:
            assert server.asked == [f"{NAME} SRV", "six.test A"]


@looped
async def test_ports_that_cannot_be_are_none() -> None:
    """A server has no port beside the record's that would be below 1 or above 65535, and none that `workers_ports` leaves out."""
    async with dns_server(
        f"{NAME}. SRV 0 0 1 one.test.\n{NAME}. SRV 0 0 65535 one.test.\none.test. A 10.0.0.1"
    ) as server:
        members = server.members(workers_ports={"grpc_port": 9001, "http_port": 9000, "metrics_port": None})
        await members.look()
        assert members.workers() == {
            "one.test:1": Worker("one.test:1", "10.0.0.1:1"),
            "one.test:65535": Worker("one.test:65535", "10.0.0.1:65535", "10.0.0.1:65534"),
        }


@looped
async def test_a_short_name_is_searched_for_in_the_machines_domains() -> None:
    """A name without its domain is found in the machine's search domains, as a pod's short names are."""
    async with dns_server(f"{NAME}. SRV 0 0 8001 one.test.\none.test. A 10.0.0.1") as server:

        def resolver() -> Resolver:
            searching = server.resolver()
            searching.search = [dns_name("no.such.domain."), dns_name("test.")]
            return searching

        section = GatewaySection(workers_dns=NAME.removesuffix(".test"))
        members = Members(section, resolver=resolver)
        await members.look()
        assert list(members.workers()) == ["one.test:8001"]


@pytest.mark.parametrize(
    ("zone", "state", "message"),
    [
        ("", "", "does not exist"),
        (f"{NAME}. TXT hello", "", "does not contain an answer"),
        ("", "broken", "SERVFAIL"),
        ("", "silent", "no answer in time"),
    ],
)
@looped
async def test_a_dns_that_fails_takes_no_worker_away(
    zone: str, state: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is missing, broken or silent removes no worker, and is logged once, as is its return."""
    good = f"{NAME}. SRV 0 0 8001 one.test.\none.test. A 10.0.0.1"
    async with dns_server(good) as server:
        members = server.members()
        await members.look()
        with caplog.at_level(logging.INFO):
            server.zone = zone
            if state:
                getattr(server, state).add(NAME)
            for _ in range(2):
                await members.look()
                assert list(members.workers()) == ["one.test:8001"]
            assert caplog.text.count(message) == 1
            assert f"gateway.workers_dns: {NAME}: " in caplog.text
            server.zone = good
            server.broken, server.silent = set(), set()
            await members.look()
            assert "is readable again" in caplog.text


@looped
async def test_a_name_may_say_that_there_is_no_server() -> None:
    """If all records say that there is no server, all workers leave."""
    async with dns_server(f"{NAME}. SRV 0 0 8001 one.test.\none.test. A 10.0.0.1") as server:
        members = server.members()
        await members.look()
        assert list(members.workers()) == ["one.test:8001"]
        server.zone = f"{NAME}. SRV 0 0 0 ."
        await members.look()
        assert members.workers() == {}


@looped
async def test_a_target_without_an_address_holds_back_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """A target whose address is unknown keeps its last one, or is absent, while other records come and go."""
    async with dns_server(
        f"""
        {NAME}. SRV 0 0 8001 one.test.
        {NAME}. SRV 0 0 8001 two.test.
        one.test. A 10.0.0.1
        two.test. A 10.0.0.2
        """
    ) as server:
        members = server.members()
        await members.look()
        server.zone = f"""
        {NAME}. SRV 0 0 8001 one.test.
        {NAME}. SRV 0 0 8001 new.test.
        {NAME}. SRV 0 0 8001 three.test.
        three.test. A 10.0.0.3
        new.test. TXT none
        """
        server.broken = {"one.test"}
        await members.look()
        addresses = {name: worker.grpc for name, worker in members.workers().items()}
        assert addresses == {"one.test:8001": "10.0.0.1:8001", "three.test:8001": "10.0.0.3:8001"}
        assert "new.test:8001: it has no address" in caplog.text


@looped
async def test_a_target_without_an_answer_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers whose addresses are known are found, though a target's name server never answers."""
    monkeypatch.setattr(members_module, "_TARGETS_TIMEOUT_S", 0.2)
    async with dns_server(
        f"{NAME}. SRV 0 0 8001 one.test.\n{NAME}. SRV 0 0 8001 two.test.\ntwo.test. A 10.0.0.2"
    ) as server:
        server.glue = True  # so that no busy machine makes the other one late
        patient = server.resolver()
        server.silent = {"one.test"}
        members = Members(GatewaySection(workers_dns=NAME), resolver=lambda: patient)
        await members.look()
        assert list(members.workers()) == ["two.test:8001"]
        assert "one.test:8001: no answer in time" in caplog.text


@looped
async def test_many_targets_leave_the_process_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """More targets than the process may open files are found, and each is asked for once, however many servers it has."""
    monkeypatch.setattr(members_module, "_TARGETS_MAX", 10)
    hosts = [f"h{number}.test" for number in range(60)]
    zone = "\n".join(f"{NAME}. SRV 0 0 8001 {host}.\n{host}. A 10.0.0.1" for host in hosts)
    zone += f"\n{NAME}. SRV 0 0 9001 {hosts[0]}."
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with dns_server(zone) as server:
        members = server.members()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
        try:
            await members.look()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        # Of equal addresses the first one counts.
        assert len(members.workers()) == 2
        assert sorted(server.asked) == sorted([f"{NAME} SRV", *(f"{host} A" for host in hosts)])


@looped
async def test_name_servers_that_take_turns_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A machine that asks its name servers in turns logs their errors once, too."""
    async with dns_server("") as one, dns_server("") as two:
        one.broken = two.broken = {NAME}

        def resolver() -> Resolver:
            turning = Resolver(configure=False)
            turning.nameservers = [Do53Nameserver("127.0.0.1", server.port) for server in (one, two)]
            turning.rotate = True
            return turning

        members = Members(GatewaySection(workers_dns=NAME), resolver=resolver)
        for _ in range(8):
            await members.look()
        assert caplog.text.count(NAME) == 2  # in one line


@looped
async def test_a_gateway_serves_with_the_servers_of_the_records() -> None:
    """A gateway finds two servers on one host by their ports, and sends requests to both."""
    tritons = FakeServer(), FakeServer()
    async with serving(tritons[0]) as one, serving(tritons[1]) as two:
        zone = f"{NAME}. SRV 0 0 {one} host.test.\n{NAME}. SRV 0 0 {two} host.test.\nhost.test. A 127.0.0.1"
        async with dns_server(zone) as server:
            section = GatewaySection(workers_dns=NAME, grpc="127.0.0.1:0", http=None, mode="round_robin")
            channels = ChannelFactory(section)
            proxies: list[Proxy] = []

            def make_proxy(gateway: GatewayLoop) -> Proxy:
                proxies.append(Proxy(section, gateway))
                return proxies[0]

            gateway = GatewayLoop(
                Members(section, resolver=server.resolver),
                partial(Probes, lambda worker: GrpcProber(worker, channels, PROBE_TIMEOUT_S), PROBE_S),
                Planner(PlannerOptions(mode="round_robin")),
                make_proxy,
                drain=1,
            )
            stop = asyncio.Event()
            running = asyncio.create_task(gateway.run(stop))
            while not gateway.ready:
                assert not running.done()
                await asyncio.sleep(0.01)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{proxies[0].grpc.port}") as channel:
                stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                for _ in range(4):
                    await stub.ModelInfer(service_pb2.ModelInferRequest(model_name="m"))
            assert [triton.requests for triton in tritons] == [2, 2]
            stop.set()
            await running
