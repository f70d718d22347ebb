"""The command rsrv: its requests to the server and its output."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import trustme
from google.protobuf import json_format

from rsrv.cli import main as cli
from rsrv.cli.output import print_table, to_json
from rsrv.cli.server_pages import print_update, reasons
from rsrv.control import find
from rsrv.control.bundle_states import BundleFailure
from rsrv.control.grpc_server import listen
from rsrv.control.grpc_service import word
from rsrv.control.presence import StubPoll
from rsrv.control.sentences import clock_time
from rsrv.control.v1 import control_pb2 as pb
from rsrv.settings import ControlSection
from rsrv.wire.paths import start_time
from tests.unit.control.peers import FakeRuntime, Served, entry, served, slow_request, until
from tests.unit.control.test_findings import model, outcomes
from tests.waiting import looped


@dataclass
class Said:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs the command in a thread, while the server runs on the event loop."""

    def __init__(self, server: Served, capsys: pytest.CaptureFixture[str]) -> None:
        self.server = server
        self._capsys = capsys

    async def __call__(self, *arguments: str, address: str | None = None) -> Said:
        where = ["--server", address or f"unix:{self.server.socket}"]
        status = await asyncio.to_thread(_main, [*arguments, *where])
        return Said(status, *self._capsys.readouterr())


def _main(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as error:  # The exit of argparse.
        return int(error.code or 0)


@asynccontextmanager
async def shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], models: tuple[str, ...] = ("a", "b")
) -> AsyncIterator[Shell]:
    async with served(tmp_path, models=models) as server:
        yield Shell(server, capsys)


def test_commands_need_no_settings_reader_and_no_numpy() -> None:
    """The module of the commands imports no pydantic, numpy or rich: pydantic alone would double the time of a command."""
    program = (
        "import sys, rsrv.cli.server_commands; "
        "print([name for name in ('rich', 'pydantic', 'numpy', 'asyncio') if name in sys.modules])"
    )

    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "pydantic" not in process.stdout
    assert "numpy" not in process.stdout
    assert "rich" not in process.stdout


@looped
async def test_a_watched_status_goes_on_through_a_runtimes_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rsrv status --watch` prints the status again and again. If the runtime does not answer, it prints a line. Ctrl-C ends it."""
    polls = 0
    loop = asyncio.get_running_loop()

    def pause(seconds: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 2:
            loop.call_soon_threadsafe(server.runtime.die)
            asyncio.run_coroutine_threadsafe(until(server.runtimes, lambda: not server.link.up), loop).result(
                30
            )
        if polls == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("rsrv.cli.server_commands.time.sleep", pause)
    async with shell(tmp_path, capsys) as rsrv:
        server = rsrv.server

        result = await rsrv("status", "--watch")

        assert result.status == 130
        assert result.out.count("server     tritonserver ") == 2
        assert result.err.count("the runtime does not answer") == 2


@looped
async def test_the_status_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, `rsrv status` prints plain columns, failures included."""
    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.lifecycle.failures["c"] = BundleFailure(
            "manifest.yaml:\n  no such key", since=1.0, tries=3
        )
        rsrv.server.runtime.change("m@1", entry("m", kind="meta", weights=None, models=["a@1"]))
        await until(rsrv.server.runtimes, lambda: "m@1" in rsrv.server.link.state.entries)

        # With a pattern, the status has the failures of matching models only. A command for a failed model prints the reason.
        result = await rsrv("status", "c*")
        assert result.out.splitlines() == ["", "c has failed, 3 tries: manifest.yaml: no such key"]
        refused = {"error": "there is no model 'c'", "code": "NOT_FOUND"}
        rsrv.server.runtime.answers = lambda command: refused if command["command"] == "evict" else {}
        result = await rsrv("evict", "c")
        assert result.err == "rsrv evict: c has failed: manifest.yaml: no such key\n"

        result = await rsrv("status")

        assert (result.status, result.err) == (0, "")
        lines = result.out.splitlines()
        assert lines[0].startswith(f"server     tritonserver {os.getpid()}, dynamic, ")
        assert "\x1b" not in result.out
        head = next(line for line in lines if line.startswith("MODEL"))
        row = next(line for line in lines if line.startswith("a "))
        assert row.split() == [
            *("a", "resident", "1", "kB", "1", "2"),
            *("7", "1", "3", "250", "ms", "system", "1"),
        ]
        assert head.index("STATE") == row.index("resident")
        assert "DEVICE TIME" in head
        assert any(line.startswith("m ") for line in lines)
        assert lines[-1] == "c has failed, 3 tries: manifest.yaml: no such key"


def test_a_member_of_a_newer_server_has_no_name() -> None:
    """If a newer server sends a member of an enum that this version does not know, the word for it is empty, and there is no error."""
    assert (word(pb.Weights, pb.WEIGHTS_RESIDENT), word(pb.Weights, 0), word(pb.Weights, 99)) == (
        "resident",
        "",
        "",
    )


def remember(runtime: FakeRuntime) -> None:
    """Give a runtime the records of a GPU with two models that share tensors."""
    runtime.record = pb.DeviceRecord(
        memory={
            "name": "L4",
            "limit_bytes": 20_000_000,
            "budget_bytes": 15_000_000,
            "pinned_bytes": 4_000_000,
            "logical_bytes": 12_000_000,
            "physical_bytes": 9_000_000,
            "held_bytes": 9_000_000,
        },
        host={"logical_bytes": 12_000_000, "physical_bytes": 9_000_000, "tensors": 3},
        scratch_bytes=3_000_000,
        kept_bytes=500_000,
        in_use_bytes=10_000_000,
        largest_free_bytes=4_000_000,
        shared=[pb.SharedTensors(bytes=3_000_000, models=["a", "b"], on_device=True)],
    )
    runtime.models["a"].MergeFrom(
        pb.ModelRecord(device_bytes=7_000_000, state_bytes=500_000, host_bytes=7_000_000, pinned=True)
    )
    runtime.models["b"].MergeFrom(pb.ModelRecord(device_bytes=5_000_000, weights=pb.WEIGHTS_ABSENT))


@looped
async def test_memory_is_divided_by_what_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv memory` prints how the budget is computed, what is free, and each model's own and shared bytes.

    Each model has the names of the models that share tensors with it.
    """
    async with shell(tmp_path, capsys) as rsrv:
        remember(rsrv.server.runtime)

        lines = (await rsrv("memory")).out.splitlines()

        assert [line.split(maxsplit=1) for line in lines[:11]] == [
            ["device", "0: L4"],
            ["allocator", "20 MB (runtime.memory_fraction of the device)"],
            ["kept", "free      2 MB, a tenth"],
            ["executions", "3 MB"],
            ["budget", "15 MB for weights: the allocator's memory, less a tenth and executions"],
            ["weights", "9 MB (12 MB without sharing, 25% saved), 4 MB pinned"],
            ["free", "6 MB for weights"],
            ["kept", "500 kB for runs of meta models"],
            ["fragmentation", "60%: of 10 MB that are free, the largest piece has 4 MB"],
            ["host", "9 MB (12 MB without sharing, 25% saved)"],
            [],
        ]
        assert [line.split() for line in lines[11:14]] == [
            ["MODEL", "SIZE", "OWN", "SHARED", "WITH", "STATE", "ON", "DEVICE", "HOST", "COPY"],
            ["a", "7", "MB", "3.5", "MB", "3", "MB", "b", "500", "kB", "resident,", "pinned", "7", "MB"],
            ["b", "5", "MB", "2", "MB", "3", "MB", "a", "-", "absent", "-"],
        ]
        assert lines[16].split() == ["3", "MB", "2", "a,", "b", "yes"]
        (use,) = (await rsrv("memory", "--json")).json["devices"]
        assert (use["ownBytes"]["a"], use["record"]["shared"][0]["models"]) == (3_500_000, ["a", "b"])
        weights = (await rsrv("status", "a")).out.splitlines()[2]
        assert weights.endswith("3.5 MB own, 3 MB shared with b")


@looped
async def test_aliases_are_rows_of_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each model behind an alias has a line with its share and counts. The status of an alias names its models, and vice versa."""
    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.lifecycle.aliases = {"ab": {"a": 80.0, "b": 20.0, "lost": "shadow"}}
        models = rsrv.server.runtime.models
        models["a"].aliases["ab"].counts.update({"ok": 8, "internal": 2})
        models["lost"] = pb.ModelRecord(name="lost", weights=pb.WEIGHTS_ABSENT)
        models["lost"].shadows["ab"].counts["different"] = 3
        table = [
            ["ALIAS", "MODEL", "SHARE", "STATE", "ANSWERED", "ERRORS", "COPIES"],
            ["ab", "a", "80%", "resident", "8", "2"],
            ["ab", "b", "20%", "resident", "0", "0"],
            ["ab", "lost", "shadow", "0", "0", "3", "different"],
        ]
        for words in ((), ("a*",)):
            lines = [line.split() for line in (await rsrv("status", *words)).out.splitlines()]
            assert [line for line in lines if line in table] == table, words

        lines = [line.split() for line in (await rsrv("status", "ab")).out.splitlines()]
        assert lines[:2] == [["alias", "ab"], ["requests", "8", "answered,", "2", "errors"]]
        assert [line[:2] for line in lines if line[1:2] == ["resident"]] == [
            ["a", "resident"],
            ["b", "resident"],
        ]
        assert [line for line in lines if line in table] == table
        assert ["aliases", "ab", "(80%)"] in [
            line.split() for line in (await rsrv("status", "a")).out.splitlines()
        ]
        assert (await rsrv("alias")).out == "ab: a 80%, b 20%, lost shadow\n"


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (30, 3)])
@looped
async def test_the_doctor_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failed: int, status: int
) -> None:
    """A finding has figures, a cause and a cure. The exit status of `rsrv doctor` is that of the severest finding.

    `rsrv status` begins with the severest finding.
    """
    async with shell(tmp_path, capsys) as rsrv:
        responses = {"internal": failed}
        rsrv.server.runtime.models["a"] = model(
            name="a", device_bytes=1000, outcomes=outcomes(failed=failed), responses=responses
        )

        doctor = await rsrv("doctor")

        assert doctor.status == status
        lines = doctor.out.splitlines()
        if not failed:
            assert lines[0].startswith("no findings, from the figures of the last ")
            return
        assert lines[0].startswith("1 critical, from the figures of the last ")
        assert lines[2] == "critical: a: 30 of 1030 answers are failures of the server  [requests_fail]"
        assert lines[3] == "  why: its executions or loads fail"
        assert lines[4].startswith("  do:  read the server's log, which has the full reason of each failure")
        (finding,) = (await rsrv("doctor", "--json")).json["findings"]
        assert (finding["name"], finding["severity"]) == ("requests_fail", "SEVERITY_CRITICAL")
        first = (await rsrv("status")).out.splitlines()[0]
        assert first.startswith("findings   critical: a: 30 of 1030 answers")
        assert first.endswith("(`rsrv doctor`: what to do)")


@looped
async def test_cold_models_are_counted_and_listed_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thousand cold models are one number. A starting model, and each model that a pattern names, has a line of its own."""
    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtimes.see_stubs(StubPoll({f"cold-{number}" for number in range(1000)}))
        rsrv.server.runtime.record.starting["cold-7"] = "waits for its turn"

        result = await rsrv("status")

        lines = result.out.splitlines()
        models = next(line for line in lines if line.startswith("models "))
        assert "999 cold, 2 resident, 1 starting (" in models, models
        assert [line[:22] for line in lines if line.startswith("cold-")] == ["cold-7  starting, wait"]

        result = await rsrv("status", "cold-77?")
        assert [line.split()[1] for line in result.out.splitlines()[2:]] == ["cold"] * 10

        result = await rsrv("status", "dog*")
        assert (result.status, result.out) == (2, "")
        assert "no model matches 'dog*'" in result.err


@looped
async def test_the_status_of_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv status MODEL` prints its versions, executables and policy."""
    async with shell(tmp_path, capsys) as rsrv:
        result = await rsrv("status", "a")

        assert result.status == 0
        assert "policy      weight 1, max_delay_us 0, max_queue_depth 1024" in result.out
        assert "task        text-classification" in result.out
        rows = [line.split() for line in result.out.splitlines()]
        assert ["a@1", "resident", "100"] in rows
        assert ["0", "8", "4", "2", "ms", "f32", "5,", "pinned", "4,", "cholesky", "1"] in rows

        assert await rsrv("status", "x") == Said(
            1, "", "rsrv status: there is no model 'x'; known are a, b\n"
        )
        rsrv.server.lifecycle.failures["a"] = BundleFailure("no manifest", 0.0)
        assert "\na is served in an older version, 1 try: no manifest\n" in (await rsrv("status", "a")).out
        del rsrv.server.lifecycle.failures["a"]
        assert (await rsrv("alias", "x", "a", "b=shadow")).status == 0
        rsrv.server.lifecycle.failures["x"] = BundleFailure("it is\nwrong", 0.0)
        assert (await rsrv("alias")).out == "x: a 100%, b shadow (not in force: it is wrong)\n"
        assert "not in force  it is wrong" in (await rsrv("status", "x")).out
        # The alias is not a failed model.
        assert "models     2 resident\n" in (await rsrv("status")).out
        refused = {"error": "there is no model 'x'", "code": "NOT_FOUND"}
        rsrv.server.runtime.answers = lambda command: refused if command["command"] == "evict" else {}
        assert await rsrv("evict", "x") == Said(
            1, "", "rsrv evict: there is no model 'x'; the name is an alias of a, b: name one of these\n"
        )


@looped
async def test_a_table_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, rich draws the table. Text from a server is not interpreted as rich's markup."""
    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtime.change("c@1", entry("c", state="failed", error="[bold]no[/] [x", stubs=[]))
        await until(rsrv.server.runtimes, lambda: "c@1" in rsrv.server.link.state.entries)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr("rsrv.cli.output.is_terminal", lambda: True)

        result = await rsrv("status", "c")

        assert result.status == 0
        assert "[bold]no[/] [x" in result.out
        assert "━" in result.out or "─" in result.out


def test_a_table_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a narrow terminal, names are not cut, but columns are left out: first columns without values, then the last columns.

    A line names the omitted columns that have values. The column of errors is left out last.
    """
    monkeypatch.setattr("rsrv.cli.output.is_terminal", lambda: True)
    cells = {"MODEL": "a_long_name", "PAUSED": "", "ANSWERED": "123456", "STUBS": "1"}
    columns: dict[str, Callable[[dict[str, str]], str]] = {head: itemgetter(head) for head in cells}
    for width, heads, note in (
        ("60", ["MODEL", "PAUSED", "ANSWERED", "STUBS"], ""),
        ("30", ["MODEL", "ANSWERED", "STUBS"], ""),
        ("24", ["MODEL", "ANSWERED"], "Too wide for this terminal: STUBS"),
    ):
        monkeypatch.setenv("COLUMNS", width)
        print_table([cells], columns)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == heads
        assert lines[2].split()[:2] == ["a_long_name", "123456"]
        assert lines[3:] == ([note] if note else [])

    monkeypatch.setenv("COLUMNS", "45")
    del columns["STUBS"]
    print_table([cells], {**columns, "ERROR": lambda _: "the reason is a long text, which wraps"})
    assert capsys.readouterr().out.splitlines()[0].split() == ["MODEL", "ERROR"], "a reason is the last to go"


@looped
async def test_the_status_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys of `rsrv status --json` are stable."""
    async with shell(tmp_path, capsys) as rsrv:
        status = (await rsrv("status", "--json")).json

        assert set(status) == {
            *("server", "devices", "scheduler", "models", "metas", "failures", "findings", "aliases")
        }
        assert set(status["server"]) == {
            *("pid", "controlPid", "version", "mode", "repository", "settingsNotes")
        }
        (device,) = status["devices"]
        assert set(device) == {"number", "record", "revision", "error"}
        assert {"pid", "instance", "uptimeS", "connections", "compiled"} <= set(device["record"])
        assert set(device["record"]["memory"]) == {
            *("name", "budgetBytes", "pinnedBytes", "logicalBytes", "physicalBytes", "heldBytes")
        }
        assert set(status["scheduler"]) == {
            *("discipline", "depth", "metaConcurrency"),
            "maxQueueDepth",
        }
        model = status["models"][0]
        assert set(model) == {
            *("name", "versions", "paused", "record", "policy", "devices", "starting", "bundle", "front")
        }
        record = model["record"]
        assert (record["residency"], record["queued"], record["outcomes"]["answered"]) == (
            "RESIDENCY_SYSTEM",
            1,
            7,
        )
        assert set(model["devices"][0]) == {"number", "record", "error"}
        assert set(model["versions"][0]) == {
            *("key", "digest", "state", "error", "weights", "paused", "stubs", "calls")
        }
        executable = record["executables"][1]
        assert (executable["variant"], executable["size"], executable["costS"]) == (0, 8, 0.002)
        assert executable["precision"] == {
            **dict.fromkeys(("tf32", "hardware", "algorithm", "rewritten", "stripped"), 0),
            "f32": 5,
            "pinned": 4,
            "ungovernable": {"cholesky": 1},
        }
        assert model["policy"] == {"weight": 1.0, "maxDelayUs": 0, "maxQueueDepth": 1024}


def test_json_is_protobufs_json() -> None:
    """JSON output is protobuf's: its own parser restores the message."""
    message = pb.GetStatusResponse(
        devices=[
            pb.DeviceStatus(
                record=pb.DeviceRecord(uptime_s=float("inf"), memory=pb.DeviceMemory(limit_bytes=0)),
                revision=2**53,
            )
        ],
        models=[
            pb.ModelStatus(
                name="a",
                record=pb.ModelRecord(
                    residency=pb.RESIDENCY_DEVICE,
                    outcomes={"answered": 3},
                    executables=[pb.Executable(size=8, cost_s=float("nan"))],
                ),
            )
        ],
    )

    again = json_format.Parse(json.dumps(to_json(message)), pb.GetStatusResponse())

    assert str(again) == str(message)


#: Records of a history. The key `new` is from a newer runtime.
RECORDS: list[dict[str, Any]] = [
    {"at": 0.0, "new": 1, "what": "model ready", "why": "warmed up"},
    {"at": 2.5, "what": "weights absent", "why": "room", "model": "cats", "bytes": 6_500_000},
]


@pytest.mark.parametrize(
    ("arguments", "command", "out"),
    [
        (
            ["pin", "a"],
            {"command": "follow", "models": {"a": {"settings": {"residency": "device"}, "asked": 1}}},
            "a: residency device",
        ),
        (
            ["unpin", "a"],
            {"command": "follow", "models": {"a": {"settings": {"residency": "system"}, "asked": 1}}},
            "a: residency system",
        ),
        (
            ["residency", "a", "unpinned"],
            {"command": "follow", "models": {"a": {"settings": {"residency": "unpinned"}, "asked": 1}}},
            "a: residency unpinned",
        ),
        (
            ["policy", "a", "--weight", "2.5", "--max-delay-us", "100"],
            {"command": "follow", "models": {"a": {"settings": {"weight": 2.5, "max_delay_us": 100}}}},
            "a: weight 2.5, max_delay_us 100",
        ),
        (
            ["policy", "a", "--max-delay-us", "5ms"],
            {"command": "follow", "models": {"a": {"settings": {"max_delay_us": 5000}}}},
            "a: max_delay_us 5000",
        ),
        (
            ["prefetch", "a"],
            {"command": "follow", "models": {"a": {"prefetched": True, "asked": 1}}},
            "a: the weights will be loaded",
        ),
        (["evict", "--all"], {"command": "evict", "model": None}, "freed: a, b"),
        (["evict", "a", "--device", "0"], {"command": "evict", "model": "a"}, "freed: a, b"),
        (["compact"], {"command": "compact"}, "the weights that are not pinned are evicted and loaded again"),
        (["pause", "a"], {"command": "follow", "models": {"a": {"paused": "hold"}}}, "a: paused (hold)"),
        (
            ["pause", "--all", "--mode", "drain"],
            {"command": "follow", "paused": "drain"},
            "all models: paused (drain)",
        ),
        (["abort", "r7"], {"command": "abort", "request": "r7"}, "2 aborted, 1 already executing"),
        (
            ["history", "a"],
            {"command": "history", "model": "a"},
            f"{clock_time(1e9, 0)} ready\n{clock_time(1e9 + 2.5, 0)} evicted to make room for cats (6.5 MB)",
        ),
    ],
)
@looped
async def test_a_subcommand_is_one_command(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    command: dict[str, Any],
    out: str,
) -> None:
    """Each subcommand sends one command to the runtime, and prints the result."""
    answers: dict[str, dict[str, Any]] = {
        "evict": {"models": ["b", "a"]},
        "abort": {"aborted": 2, "executing": 1},
        "history": {"unix_s": 1e9, "histories": {"a@1": {"records": RECORDS, "waits_for": ""}}},
    }

    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtime.answers = lambda message: answers.get(message["command"], {})

        assert await rsrv(*arguments) == Said(0, out + "\n", "")
        assert rsrv.server.runtime.commands == [command]


@looped
async def test_an_eviction_of_pinned_weights_frees_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If an eviction frees nothing, the command prints the reason, and not an empty list."""
    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtime.answers = lambda command: {"models": []}
        result = await rsrv("evict", "a")

    assert result == Said(0, "freed: nothing (weights that are pinned or in use stay on the device)\n", "")


@looped
async def test_why_lists_all_requests_with_an_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv why` prints a sentence for each request with the id. If there is none, it says which requests are kept, and fails."""
    known = [slow_request(2.0, 0.5), slow_request(1.0, 0.25)]

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        expected = [{"command": "find", "request": "r"}, {"command": "slowest", "model": "a"}]
        return {"unix_s": 1e9, "requests": list(known if command in expected else ())}

    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtime.answers = answer
        result = await rsrv("why", "r")
        evicted, first, second = result.out.splitlines()
        assert "a was evicted to make room for b" in evicted
        assert ("after 250 ms" in first, "after 500 ms" in second) == (True, True)
        requests = (await rsrv("why", "r", "--json")).json["requests"]
        assert [(request["arrivedUnixS"], request["batchSize"]) for request in requests] == [
            (1e9 + 1.0, 8),
            (1e9 + 2.0, 8),
        ]
        table = (await rsrv("why", "--slowest", "a")).out.splitlines()
        assert [line.split()[0] for line in table[:3]] == ["NUMBER", "3.17", "3.17"]
        assert "OTHERS (the device executed other requests)" in "".join(table[3:])
        assert "500 ms" in table[1]
        known.clear()
        missing = await rsrv("why", "r")
        assert (missing.status, missing.out) == (1, "")
        assert "request 'r' is not known" in missing.err
        assert (await rsrv("why", "--slowest", "a")).out.startswith("no request has ended in a runtime")


@looped
async def test_a_followed_history_has_each_record_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A followed history prints each new record once. It also prints each new reason why the weights are not loaded."""
    answers: list[tuple[int, str]] = [
        (1, ""),
        (1, ""),
        (2, "queued: waits for a"),
        (2, "queued: waits for a"),
    ]
    monkeypatch.setattr("rsrv.cli.history._FOLLOW_S", 0.0)

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        if not answers:
            return {"error": "there is no model 'a'", "code": "NOT_FOUND"}
        records, waits_for = answers.pop(0)
        history = {"records": RECORDS[:records], "waits_for": waits_for}
        return {"unix_s": 1e9, "histories": {"a@1": history}}

    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtime.answers = answer
        result = await rsrv("history", "a", "--follow")
        ready, evicted, waits = result.out.splitlines()
        assert (ready[-6:], evicted[-9:], waits[-31:]) == (
            *(" ready", " (6.5 MB)"),
            "weights are queued: waits for a",
        )


WRONG = {
    "stauts": "rsrv: unknown command 'stauts'; did you mean 'status'?",
    "gateway repak": "rsrv gateway: unknown command 'repak'; did you mean 'repack'?",
    "pin": "rsrv pin: ",
    "pin a --wiat": "rsrv pin: unknown argument '--wiat'; did you mean '--wait'?",
    "residency a gpu": "rsrv residency: ",
    "pause": "rsrv pause: ",
    "pause a --all": "rsrv pause: ",
    "pause a --mode dran": "argument --mode: unknown value 'dran'; did you mean 'drain'?",
    "policy a": "rsrv policy: give at least one of --weight, ",
    "policy a --weight much": "argument --weight: ",
    "scheduler depth": "rsrv scheduler: 'depth' is not KEY=VALUE",
    "scheduler dept=3": "rsrv scheduler: unknown key 'dept'; did you mean 'depth'?",
    "scheduler depth=many": "rsrv scheduler: depth cannot be 'many'",
    "scheduler discipline=fiar": "discipline cannot be 'fiar'; did you mean 'fair'?",
    "profile": "rsrv profile: give start or stop, or --seconds",
    "profile start --seconds 1": "rsrv profile: give start or stop, or --seconds",
    "profile --seconds 0": "argument --seconds: ",
    "why": "rsrv why: name a request, or a model with --slowest",
    "why r --slowest a": "rsrv why: name a request, or a model with --slowest",
    "status --timeout x": "argument --timeout: 'x' is not a time above 0, such as 30, 500ms or 5m",
    "status --timeout -1": "argument --timeout: ",
    "status --tls-cert cert.pem": "rsrv status: --tls-cert needs --tls-key",
}


@looped
async def test_a_wrong_command_line_sends_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command line exits 2. The error is above the usage, and names the nearest command, option, key or value."""
    async with shell(tmp_path, capsys) as rsrv:
        for words, error in WRONG.items():
            result = await rsrv(*words.split())
            assert (result.status, result.out) == (2, ""), words
            first, usage, *_ = result.err.splitlines()
            assert error in first
            assert usage.startswith("usage: rsrv")
        assert not rsrv.server.runtime.commands


@looped
async def test_the_scheduler_is_shown_and_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv scheduler` shows and changes settings by the keys and values of rsrv.yaml."""
    async with shell(tmp_path, capsys) as rsrv:
        result = await rsrv("scheduler")
        assert "discipline        fair\ndepth             2\n" in result.out

        result = await rsrv("scheduler", "discipline=edf", "depth=null", "meta_concurrency=3", "--json")
        assert result.json["scheduler"]["discipline"] == "DISCIPLINE_EDF"
        expected = {"discipline": "edf", "depth": None, "meta_concurrency": 3}
        assert expected.items() <= rsrv.server.runtime.document["scheduler"].items()


@looped
async def test_health_is_an_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv health` exits 0 or 1, for the server and for a model. In this test, one model loses its stub."""
    async with shell(tmp_path, capsys) as rsrv:
        assert await rsrv("health") == Said(0, "serving\n", "")
        assert (await rsrv("health", "--json")).json == {"status": "SERVING"}

        rsrv.server.runtime.change("a@1", None)
        await until(rsrv.server.runtimes, lambda: "a@1" not in rsrv.server.link.state.entries)

        reason = "not serving: a is not loaded\n"
        assert await rsrv("health") == Said(1, reason, "")
        assert await rsrv("health", "a") == Said(1, reason, "")
        assert await rsrv("health", "b") == Said(0, "serving\n", "")
        assert await rsrv("health", "x") == Said(
            1, "", "rsrv health: there is no model 'x'; known are a, b\n"
        )


@pytest.mark.parametrize("flag", [[], ["--json"]])
@looped
async def test_a_watch_prints_a_line_for_each_change_until_ctrl_c(tmp_path: Path, flag: list[str]) -> None:
    """`rsrv watch` prints each change at once, also without a terminal, and exits silently on Ctrl-C."""
    async with served(tmp_path, models=["a"]) as server:
        watch = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "rsrv.cli.main",
                "watch",
                "--server",
                f"unix:{server.socket}",
                *flag,
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert watch.stdout is not None
        if flag:
            first = json.loads(await watch.stdout.readline())
            assert first["snapshot"]["entries"][0]["version"]["state"] == "STATE_READY"
        else:
            assert await watch.stdout.readline() == b"runtime 1111111111111111, revision 5\n"
            line = await watch.stdout.readline()
            assert line == b"5 a@1 resident, residency system, 1 stub\n"

        server.runtime.change("a@1", entry("a", paused="hold"))
        line = await watch.stdout.readline()
        if flag:
            assert json.loads(line)["change"]["entry"]["version"]["paused"] == "PAUSE_HOLD"
        else:
            assert line == b"6 a@1 resident, residency system, 1 stub, paused (hold)\n"

        watch.send_signal(signal.SIGINT)
        assert await watch.communicate() == (b"", b"")
        assert watch.returncode == 130


def test_what_a_watch_says_of_failures_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv watch` prints the failure and the end of a model, and also the end of the runtime."""
    failed = pb.Version(key="a@1", state=pb.STATE_FAILED, error="no\nroom \x1b[2J")
    for update in (
        pb.WatchStateResponse(
            change=pb.Change(revision=6, key="a@1", entry=pb.Entry(name="a", version=failed))
        ),
        pb.WatchStateResponse(change=pb.Change(revision=7, key="a@1")),
        pb.WatchStateResponse(down=pb.RuntimeDown()),
        pb.WatchStateResponse(failures=pb.Failures(failures=[pb.Failure(name="b", text="no\nmanifest")])),
        pb.WatchStateResponse(failures=pb.Failures()),
    ):
        print_update(update)

    assert capsys.readouterr().out.splitlines() == [
        "6 a@1 failed, 0 stubs, no room ?[2J",
        "7 a@1 was removed",
        "the runtime does not answer",
        "b is not served as its bundle is now: no manifest",
        "all models are served as their bundles are now",
    ]


@looped
async def test_a_profile_of_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rsrv profile` starts a profile in a private folder, and stops it after the given time."""
    monkeypatch.setattr("rsrv.control.service.PROFILES", tmp_path / "profiles")
    async with shell(tmp_path, capsys) as rsrv:

        def answer(command: dict[str, Any]) -> dict[str, Any]:
            if "directory" in command:  # The runtime makes the directory.
                Path(command["directory"]).mkdir()
            return {}

        rsrv.server.runtime.answers = answer
        result = await rsrv("profile", "--seconds", "0.01")

        # On a slow machine, the live page sends other commands during the profile.
        first, second = (
            command for command in rsrv.server.runtime.commands if command["command"] == "profile"
        )
        assert result.out == first["directory"] + "\n"
        assert Path(first["directory"]).parent == tmp_path / "profiles"
        assert (tmp_path / "profiles").stat().st_mode & 0o777 == 0o700
        assert second == {"command": "profile"}


@looped
async def test_an_address_without_a_server_fails_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If nothing answers at the address, the command prints one line that names the address, and exits 1."""
    async with shell(tmp_path, capsys) as rsrv:
        result = await rsrv("status", address=f"unix:{tmp_path}/nobody.sock")
        assert result.status == 1
        assert result.err == (
            f"rsrv status: cannot connect to unix:{tmp_path}/nobody.sock: this socket does not exist; check that "
            "the server runs\n"
        )


@looped
async def test_the_runtime_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the runtime is gone, the control process still answers, and the command exits 1."""
    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtime.die()
        await until(rsrv.server.runtimes, lambda: not rsrv.server.link.up)

        result = await rsrv("status")
        assert (result.status, result.out) == (1, "")
        assert result.err.startswith("rsrv status: the runtime does not answer")
        result = await rsrv("health", "--json")
        assert (result.status, result.json, result.err) == (1, {"status": "NOT_SERVING"}, "")
        result = await rsrv("health")
        assert (result.status, result.err) == (1, "")
        assert result.out.startswith("not serving: the runtime does not answer")


@looped
async def test_no_proxy_is_asked_for_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server at a loopback address is reached, even if the environment names a proxy that does not answer."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    section = ControlSection(listen="127.0.0.1:0", token_file=tmp_path / "token")
    async with shell(tmp_path, capsys) as rsrv:
        listener, port = await listen(section, rsrv.server.service, rsrv.server.health)
        try:
            for host in ("127.0.0.1", "localhost"):
                token = ["--token-file", str(tmp_path / "token")]
                answer = await rsrv("health", *token, address=f"{host}:{port}")
                assert (answer.status, answer.out) == (0, "serving\n")
        finally:
            await listener.stop(0)


@looped
async def test_over_tcp_with_tls_and_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line names files for TLS and the token. A wrong token, or a missing file, is an error."""
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    for name, text in (("token", "secret"), ("other", "wrong")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    section = ControlSection(
        listen="localhost:0",
        tls_certificate=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        token_file=tmp_path / "token",
    )

    async with shell(tmp_path, capsys) as rsrv:
        listener, port = await listen(section, rsrv.server.service, rsrv.server.health)
        try:
            tls = ["--tls-ca", str(tmp_path / "ca.pem")]
            address = f"localhost:{port}"
            result = await rsrv("health", *tls, "--token-file", str(tmp_path / "token"), address=address)
            assert (result.status, result.out) == (0, "serving\n")
            result = await rsrv("health", *tls, "--token-file", str(tmp_path / "other"), address=address)
            assert result == Said(
                1,
                "",
                "rsrv health: the token is missing, or wrong; name the file that holds the token with --token-file\n",
            )
            assert (
                "the server closed the connection; it may require TLS"
                in (await rsrv("health", address=address)).err
            )
            wrong = ["--tls-ca", str(tmp_path / "other.pem")]
            result = await rsrv("health", *wrong, address=address)
            assert (
                "was not issued by a trusted authority; name its authority's file with --tls-ca" in result.err
            )
            result = await rsrv("health", *tls, "--token-file", str(tmp_path / "none"), address=address)
            assert result.status == 1
            assert result.err == f"rsrv health: --token-file: {tmp_path}/none: No such file or directory\n"
            (tmp_path / "other").write_bytes(b"\xff")
            result = await rsrv("health", *tls, "--token-file", str(tmp_path / "other"), address=address)
            assert result == Said(
                1,
                "",
                f"rsrv health: --token-file: {tmp_path}/other holds no token: one line of ASCII without spaces\n",
            )
        finally:
            await listener.stop(0)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder in which the commands look for the directories of runtimes."""
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RSRV_CONTROL_ADDRESS", raising=False)
    return tmp_path


def _server(base: Path, pid: int, gpu: int = 0, started: int | None = None) -> str:
    directory = base / f"{pid}-{start_time(pid) if started is None else started}-gpu{gpu}"
    directory.mkdir()
    (directory / "control.sock").touch()
    return f"unix:{directory}/control.sock"


@contextmanager
def _tritonserver(folder: Path, *flags: str) -> Iterator[int]:
    """Start a process with the command line of a tritonserver in a folder, and yield its pid."""
    (folder / "gen").mkdir(parents=True)
    program = [sys.executable, "-c", "input(chr(10))", "--model-repository=gen", *flags]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder) as process:
        assert process.stdout is not None
        # After its first output, its command line can be read.
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_the_only_server_is_found(servers: Path) -> None:
    """The directory of a dead server is ignored, even if another process has its pid."""
    _server(servers, 1, started=12345)
    address = _server(servers, os.getpid())

    assert find.address(None) == address


def test_several_servers_are_named_by_folder_and_port(
    servers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If several servers run, the error lists them by folder and port. A folder or a port chooses one."""
    monkeypatch.chdir(tmp_path)
    with (
        _tritonserver(tmp_path / "one") as first,
        _tritonserver(tmp_path / "two", "--grpc-port=8011", "--http-port", "8010") as second,
    ):
        addresses = {_server(servers, first), _server(servers, second)}

        with pytest.raises(find.NotFound) as raised:
            find.address(None)
        assert "several servers run on this machine: " in str(raised.value)
        assert "one/gen on 8001" in str(raised.value)
        assert "two/gen on 8011" in str(raised.value)
        assert {find.address("8001"), find.address("8010")} == addresses
        assert {find.address("one"), find.address("two/gen/")} == addresses
        with pytest.raises(
            find.NotFound, match="no server on this machine has the port or folder '8012'; running: "
        ):
            find.address("8012")
        with pytest.raises(find.NotFound, match="several servers"):
            find.address(".")


def test_a_command_asks_the_server_of_its_folder(
    servers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command asks the server that was started in the current folder or above it, or whose models are below it.

    In any other folder, the user must name one of several servers.
    """
    with _tritonserver(tmp_path / "one") as first, _tritonserver(tmp_path / "two") as second:
        addresses = {"one": _server(servers, first), "two": _server(servers, second)}
        (tmp_path / "two" / "bundles").mkdir()

        for folder, server in (("one", "one"), ("two", "two"), ("two/gen", "two"), ("two/bundles", "two")):
            monkeypatch.chdir(tmp_path / folder)
            assert find.address(None) == addresses[server]
        monkeypatch.chdir("/")
        with pytest.raises(find.NotFound, match="several servers run on this machine"):
            find.address(None)


def test_a_server_s_own_folder_precedes_a_folder_above(servers: Path, tmp_path: Path) -> None:
    """If a server's folder is below another server's folder, each server is chosen by its own folder."""
    with _tritonserver(tmp_path / "m") as upper, _tritonserver(tmp_path / "m" / "gen" / "b") as lower:
        addresses = [_server(servers, upper), _server(servers, lower)]

        folders = tmp_path / "m/gen", tmp_path / "m/gen/b/gen"
        assert [find.address(str(folder)) for folder in folders] == addresses


def test_two_devices_of_a_server_are_told_apart(servers: Path) -> None:
    """Two devices of a server have the same folder and port, so the error lists their addresses."""
    first, second = (_server(servers, os.getpid(), gpu) for gpu in (0, 1))

    with pytest.raises(find.NotFound) as raised:
        find.address("8001")

    assert first in str(raised.value)
    assert second in str(raised.value)


@pytest.mark.parametrize(("arguments", "prog"), [([], "rsrv"), (["status"], "rsrv status")])
def test_no_server_is_found(
    servers: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], prog: str
) -> None:
    """If no server is found, one line says where the command looked, and how to start a server."""
    assert cli.main(arguments) == 1
    assert capsys.readouterr().err == (
        f"{prog}: no server of this user runs on this machine (looked in {servers}). Start one with `rsrv serve bundles/`, "
        "or name another server with --server HOST:PORT or --server unix:PATH\n"
    )


def test_the_environment_names_the_server(servers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RSRV_CONTROL_ADDRESS chooses the server. The option --server takes precedence."""
    monkeypatch.setenv("RSRV_CONTROL_ADDRESS", "gpu7:8003")

    assert find.address(None) == "gpu7:8003"
    assert find.address("unix:/run/other.sock") == "unix:/run/other.sock"


@looped
async def test_without_a_command_the_status_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rsrv` alone prints what `rsrv status` prints, and a line that names --help."""
    async with shell(tmp_path, capsys) as rsrv:
        status, bare = await rsrv("status"), await rsrv()

        assert bare.status == 0
        assert [line.split()[0] for line in status.out.splitlines() if line] == [
            line.split()[0] for line in bare.out.splitlines()[:-2] if line
        ]
        assert bare.out.endswith("\n\n`rsrv --help` lists the commands.\n")


def test_health_names_each_model_that_does_not_serve_and_why() -> None:
    """A broken bundle, a failed version, a loading version and a model without a stub have different reasons."""
    failed = pb.Version(state=pb.STATE_FAILED, error="no\nroom", stubs=[1])
    status = pb.GetStatusResponse(
        models=[
            pb.ModelStatus(name="a", versions=[failed]),
            pb.ModelStatus(name="b", versions=[pb.Version(state=pb.STATE_LOADING, stubs=[1])]),
            pb.ModelStatus(name="c", versions=[pb.Version(state=pb.STATE_READY)]),
            pb.ModelStatus(name="d", versions=[pb.Version(state=pb.STATE_READY, stubs=[1])]),
        ],
        failures=[pb.Failure(name="e", text="no manifest")],
    )

    assert reasons(status) == [
        "e has failed: no manifest",
        "a failed: no room",
        "b is starting",
        "c has no stub process; the model is loaded again",
    ]
    assert reasons(pb.GetStatusResponse()) == [
        "a model of the repository is not loaded; the server's log says why"
    ]
