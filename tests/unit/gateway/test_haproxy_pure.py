"""What HAProxy is told of workers and models, and what is made of its words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.contract import Routes
from rsrv_gateway.haproxy.admin import AdminError, ServerCounts, parse_counts, pieces
from rsrv_gateway.haproxy.config import GRPC_WORKERS, HTTP_WORKERS, Target, configuration
from rsrv_gateway.haproxy.files import Files
from rsrv_gateway.haproxy.maps import Maps, Slots, commands, maps_of, text
from rsrv_gateway.haproxy.names import Names, name_in
from rsrv_gateway.haproxy.seen import Seen
from rsrv_gateway.haproxy.told import Told, code_of

SLOTS = {"x": "w1", "y": "w2", "z": "w3"}
ALL = ("x", "y", "z")
ROUTES, TURNS = Path("/routes"), Path("/turns")

models = st.sampled_from("abcde")
slots = st.sampled_from(["w1", "w2", "w3", "w4"])


@st.composite
def states(draw: st.DrawFn) -> Maps:
    """Each model has one worker, or any, or several in turn, or is not there."""
    routes: dict[str, str] = {}
    turns: dict[str, str] = {}
    for model in draw(st.sets(models)):
        found = draw(st.lists(slots, max_size=4, unique=True))
        if len(found) < 2:
            routes[model] = found[0] if found else "*"
        else:
            routes[model] = f"{len(found)}/{draw(st.integers(1, 3))}"
            turns.update((f"{place}/{model}", slot) for place, slot in enumerate(found))
    return Maps(routes, turns)


def served(maps: Maps, model: str) -> bool:
    """Whether each request of it finds a slot, whoever's turn it is."""
    route = maps.routes.get(model, "")
    if "/" not in route:
        return bool(route)
    return all(f"{place}/{model}" in maps.turns for place in range(int(route.split("/")[0])))


def obey(maps: Maps, command: str) -> Maps:
    """As HAProxy does it."""
    act, _, path, key, *value = command.split()
    routes, turns = dict(maps.routes), dict(maps.turns)
    entries = routes if path == str(ROUTES) else turns
    assert (key in entries) == (act != "add"), command
    if act == "del":
        del entries[key]
    else:
        entries[key] = value[0]
    return Maps(routes, turns)


@given(states(), states())
def test_maps_change_under_traffic(old: Maps, new: Maps) -> None:
    """The commands lead from any state to any other, and between two of them no model that stays is without a worker."""
    maps = old
    for command in commands(old, new, ROUTES, TURNS):
        maps = obey(maps, command)
        assert all(served(maps, model) for model in old.routes.keys() & new.routes.keys())
    assert maps == new


@given(states())
def test_nothing_has_changed(maps: Maps) -> None:
    """Nothing is said."""
    assert commands(maps, maps, ROUTES, TURNS) == []


@given(states(), models)
def test_one_model_moves(maps: Maps, model: str) -> None:
    """No other one's entries are touched."""
    moved = Maps(
        {**maps.routes, model: "w9"},
        {key: slot for key, slot in maps.turns.items() if not key.endswith(f"/{model}")},
    )
    for command in commands(maps, moved, ROUTES, TURNS):
        assert command.split()[3].rpartition("/")[2] == model


def test_where_models_are_decides_how_their_requests_go() -> None:
    """One worker, all of them, some of them, some of them packed, nobody, and one that is not to be reached."""
    table = {
        "one": Routes(ready=ALL, placed=("y",)),
        "all": Routes(ready=ALL),
        "some": Routes(ready=("x", "z"), quantum=7),
        "packed": Routes(ready=ALL, placed=("x", "y"), quantum=7),
        "everywhere": Routes(ready=ALL, placed=ALL, quantum=7),
        "spread": Routes(ready=ALL, placed=ALL),
        "nobody": Routes(ready=()),
        "elsewhere": Routes(ready=("unix",)),
    }

    maps = maps_of(table, SLOTS, in_turn=False)

    assert maps.routes == {
        "one": "w2",
        "all": "*",
        "some": "2/1",
        "packed": "2/7",
        "everywhere": "3/7",
        "spread": "*",
    }
    assert {key: slot for key, slot in maps.turns.items() if key.endswith("/some")} == {
        "0/some": "w1",
        "1/some": "w3",
    }
    assert maps_of(table, SLOTS, in_turn=True).routes["all"] == "3/1"


@pytest.mark.parametrize("name", ["a b", "a;b", "a\\b", "#a", "a/b", "ä", "", "a\nb", "x" * 256, "-a"])
def test_a_name_that_is_no_word_for_haproxy(name: str) -> None:
    """The model is not in its maps, so the plane behind serves it."""
    assert maps_of({name: Routes(ready=("x",))}, SLOTS, in_turn=False) == Maps()


@given(st.lists(st.sets(st.integers(0, 7), max_size=6), max_size=12))
def test_workers_come_and_go(looks: list[set[int]]) -> None:
    """Nobody shares a slot, who stays keeps it, and as many have one as there are."""
    slots = Slots(4)
    before: dict[str, str] = {}
    for look in looks:
        now = dict(slots.update(f"worker{number}" for number in sorted(look)))
        assert len(set(now.values())) == len(now) == min(len(look), 4)
        assert all(now[worker] == slot for worker, slot in before.items() if worker in now)
        assert all(slots.worker(slot) == worker for worker, slot in now.items())
        before = now


def test_a_worker_comes_back() -> None:
    """It finds its slot again; another one takes that of whoever has been away for longest."""
    slots = Slots(3)
    first = dict(slots.update(["a", "b", "c"]))
    slots.update(["b", "c"])
    slots.update(["c"])

    assert slots.update(["c", "b"])["b"] == first["b"]
    assert slots.update(["c", "b", "d"])["d"] == first["a"]


def test_a_configuration_says_what_the_settings_say(tmp_path: Path) -> None:
    """Addresses, limits, TLS, the token, and who is in the slots."""
    token = tmp_path / "token"
    section = GatewaySection(
        grpc="[::]:8001",
        http="unix:/run/http.sock",
        request_timeout_s=2.5,
        probe_s=0.25,
        max_message_bytes=1000,
        tls_certificate=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        tls_client_ca=tmp_path / "clients.pem",
        token_file=token,
        worker_ca=tmp_path / "workers.pem",
    )
    targets = {
        "w1": Target(("10.0.0.1", 8001), ("10.0.0.1", 8000)),
        "w2": Target(("fd00::1", 8001), None),
    }

    said = configuration(section, Files(tmp_path), ["w1", "w2", "w3"], targets, b"s3cret")

    lines = [line.strip() for line in said.splitlines()]
    assert f"bind [::]:8001 tcp-ut 20s ssl crt {tmp_path}/gateway.pem alpn h2" in said
    assert "bind unix@/run/http.sock mode 600 ssl" in said
    assert f"ca-file '{tmp_path}/clients.pem' verify required" in said
    assert "timeout server 2500ms" in lines
    assert "default-server check inter 250ms fall 3 rise 1" in lines
    assert "acl fits req.body,bytes(1,4),hex,hex2i le 1000" in lines
    assert "s3cret" not in said
    assert f"set-var proc.token bin({b's3cret'.hex()})" in lines
    tls = f"ssl verify required ca-file '{tmp_path}/workers.pem' alpn"
    assert sum(tls in line for line in lines) == 2
    assert [line.partition(" ssl")[0] for line in lines if line.startswith("server w")] == [
        "server w1 10.0.0.1:8001",
        "server w2 ipv6@[fd00::1]:8001",
        "server w3 127.0.0.1:1 disabled",
        "server w1 10.0.0.1:8000 track grpc_workers/w1",
        "server w2 127.0.0.1:1 disabled track grpc_workers/w2",
        "server w3 127.0.0.1:1 disabled track grpc_workers/w3",
    ]


def test_one_protocol_only(tmp_path: Path) -> None:
    """Nobody listens for the other one."""
    said = configuration(GatewaySection(http=None), Files(tmp_path), ["w1"], {})

    assert "frontend grpc" in said
    assert "frontend http" not in said


@given(st.lists(st.text("abc", max_size=3000), max_size=30))
def test_many_commands_are_said_in_pieces(parts: list[str]) -> None:
    """All are there, in their order, in pieces that HAProxy can take."""
    found = pieces(parts, ";")

    assert ";".join(found) == ";".join(parts)
    assert all(len(piece) <= 8000 for piece in found)


def test_a_map_is_written() -> None:
    """A line for each key."""
    assert text({"a": "w1", "0/b": "w2"}) == "a w1\n0/b w2\n"


@pytest.mark.parametrize(
    ("status", "code", "end", "meant"),
    [
        ("200", "-", "--", "OK"),
        ("200", "5", "--", "NOT_FOUND"),
        ("200", "8", "--", "RESOURCE_EXHAUSTED"),
        ("200", "-", "SD", "UNAVAILABLE"),
        ("200", "-", "sD", "UNAVAILABLE"),
        ("400", "-", "CD", "CANCELLED"),
        ("400", "-", "--", "INVALID_ARGUMENT"),
        ("404", "-", "--", "NOT_FOUND"),
        ("429", "-", "--", "RESOURCE_EXHAUSTED"),
        ("503", "-", "SC", "UNAVAILABLE"),
        ("504", "-", "sH", "DEADLINE_EXCEEDED"),
        ("200", "99", "--", "UNKNOWN"),
        ("418", "-", "--", "UNKNOWN"),
    ],
)
def test_how_a_request_ended(status: str, code: str, end: str, meant: str) -> None:
    """In gRPC's words, whichever protocol it came by."""
    assert code_of(status, code, end) == meant


def test_requests_are_counted() -> None:
    """By model, worker and code; and how long they took."""
    told = Told(lambda slot: {"w1": "x"}.get(slot, ""), lambda worker: None)
    for line in (
        "m w1 200 - 400 --",
        "m w1 200 - 2000000 --",
        "m <NOSRV> 503 - 10 SC",
        "what",
        "m w1 200 - x --",
    ):
        told.take(line)

    assert told.requests() == {("m", "x", "OK"): 2, ("m", "", "UNAVAILABLE"): 1}
    assert told.durations()["m"].counts[0] == 2
    assert told.durations()["m"].sum == pytest.approx(2.00041)
    assert sum(told.durations()["m"].counts) == 3
    assert told.strange == 2


def test_a_worker_that_does_not_have_what_it_had_is_looked_at() -> None:
    """It may be about to end; one that refuses for another reason is not."""
    doubted: list[str] = []
    told = Told({"w1": "x", "w2": "y", "w3": "z"}.__getitem__, doubted.append)
    for line in ("m w1 200 5 400 --", "m w2 503 - 400 --", "m w3 200 8 400 --", "m w3 200 - 400 --"):
        told.take(line)

    assert doubted == ["x", "y"]


def test_counters_are_read() -> None:
    """Those of each server, and whether it is up."""
    answer = (
        "# pxname,svname,scur,econ,wredis,status\nb,w1,3,,1,UP\nb,w2,0,2,0,DOWN 1/2\nb,w3,0,0,0,no check\n\n"
    )

    first, second, third = parse_counts(answer)

    assert (first.slot, first.up, first.current, first.refused, first.moved) == ("w1", True, 3, 0, 1)
    assert (second.up, second.refused) == (False, 2)
    assert third.up
    with pytest.raises(AdminError, match="cannot be read"):
        parse_counts("Unknown command\nwhat\n")


def test_counters_tell_of_workers_that_fail() -> None:
    """Each failure is told once; counters that start anew are no failure."""
    seen = Seen({"w1": "x", "w2": "y"}.__getitem__)

    def look(*servers: tuple[str, bool, int, int, int]) -> set[str]:
        return seen.take([ServerCounts(GRPC_WORKERS, *server) for server in servers])

    assert look(("w1", True, 2, 0, 0), ("w2", True, 1, 0, 0)) == set()
    assert seen.load() == {"x": 2, "y": 1}
    assert look(("w1", True, 0, 1, 1), ("w2", False, 0, 0, 0)) == {"x", "y"}
    assert look(("w1", True, 0, 1, 1), ("w2", False, 0, 0, 0)) == set()
    assert look(("w1", True, 0, 1, 3), ("w2", True, 0, 0, 0)) == set()
    seen.restarted()
    assert look(("w1", True, 0, 0, 1)) == set()
    assert seen.failovers["x"] == 4
    assert look(("w2", False, 0, 0, 0)) == {"y"}


def test_the_plane_behind_is_no_worker() -> None:
    """HAProxy counts it as a server; it counts its requests by itself, and nobody looks after it."""
    seen = Seen({"w1": "x"}.__getitem__)
    behind = ServerCounts("grpc_rest", "gateway", False, 3, 1, 1)

    assert seen.take([ServerCounts(HTTP_WORKERS, "w1", True, 2, 0, 1), behind]) == set()
    assert seen.load() == {"x": 2}
    assert seen.failovers == {"x": 1}


class FakeDNS:
    """Knows these names, of which one without addresses is an error; of others it says nothing."""

    def __init__(self, known: dict[str, list[str]]) -> None:
        self.known = known
        self.asked: list[str] = []
        self.waiting = 0

    async def resolve(self, name: str) -> Iterable[str]:
        self.asked.append(name)
        if name not in self.known:
            self.waiting += 1
            await asyncio.Event().wait()
        if not self.known[name]:
            raise OSError("no such name")
        return self.known[name]


def test_names_are_asked_for_once_and_at_the_same_time() -> None:
    """A DNS that says nothing of several is waited for once; who is known already asks nothing."""

    async def run() -> None:
        dns = FakeDNS({"a": ["10.0.0.1", "10.0.0.2"]})
        names = Names(0.1, dns.resolve)
        targets = ["a:1", "a:2", "b:1", "c:1", "10.0.0.3:1", "[fd00::1]:1", "unix:/run/x"]
        meeting = asyncio.create_task(names.meet(targets))
        while dns.waiting < 2:
            await asyncio.sleep(0)
        await meeting
        assert sorted(dns.asked) == ["a", "b", "c"]
        await names.meet(targets)
        assert len(dns.asked) == 3
        assert [names.address(target) for target in targets] == [
            ("10.0.0.1", 1),
            ("10.0.0.1", 2),
            None,
            None,
            ("10.0.0.3", 1),
            ("fd00::1", 1),
            None,
        ]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_name_keeps_its_address_while_it_has_it() -> None:
    """Other addresses may come, in any order, and the DNS may not know it for a while."""

    async def run() -> None:
        dns = FakeDNS({"a": ["10.0.0.1"]})
        names = Names(10, dns.resolve)
        await names.meet(["a:1"])
        for said, held in (
            (["10.0.0.9", "10.0.0.1"], "10.0.0.1"),
            ([], "10.0.0.1"),
            (["10.0.0.8", "10.0.0.9"], "10.0.0.8"),
        ):
            dns.known["a"] = said
            await names.look(["a:1"])
            assert names.address("a:1") == (held, 1)

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("target", "name"),
    [("gpu1:8001", "gpu1"), ("10.0.0.1:8001", None), ("[fd00::1]:8001", None), ("unix:/a:8001", None)],
)
def test_what_a_certificate_must_bear(target: str, name: str | None) -> None:
    """The worker's name, where it has one."""
    assert name_in(target) == name
