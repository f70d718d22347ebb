"""`rsrv top`: the live page's figures on a terminal, or line by line."""

import asyncio
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rsrv.cli.output import headline
from rsrv.cli.top import Top, print_events, show, to_screen
from tests.unit.control.peers import entry, served
from tests.unit.control.test_overview import histogram, model
from tests.waiting import looped

DEVICE = {
    "number": 0,
    "card": None,
    "limit": None,
    "budget": 5000,
    "pinned": 100,
    "logical": 1000,
    "physical": 800,
    "held": 800,
}


def state(
    t: float, *models: dict[str, Any], instance: str = "1", devices: list[dict[str, Any]] | None = None
) -> str:
    busy = sum(model["device_s"] for model in models)
    devices = devices or [{**DEVICE, "host": 1500, "device_s": busy}]
    return json.dumps(
        {"t": t, "up": True, "instance": instance, "devices": devices, "models": models, "findings": []}
    )


def shown(name: str, requests: int = 0, device_s: float = 0.0, **differs: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "model",
        "state": "ready",
        "residency": "system",
        "weights": "resident",
        "paused": None,
        "queued": 0,
        "executing": 0,
        "bytes": 1000,
        "requests": requests,
        "errors": 0,
        "device_s": device_s,
        "loads": 1,
        "load_s": 0.01,
        "on": [0],
        "p99_s": 0.004,
        "error": None,
        **differs,
    }


def test_programs_get_whole_states(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints a line for each event. A state has all models, including those that have not changed."""
    later = {**json.loads(state(2.0, shown("b", 5))), "gone": ["c"]}
    log = json.dumps({"t": 1.0, "text": "loaded"})
    print_events(
        [
            ("begin", "null"),
            ("state", state(1.0, shown("a"), shown("b"), shown("c"))),
            ("log", log),
            ("state", json.dumps(later)),
        ]
    )
    begin, first, line, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (begin["event"], line) == ("begin", {"event": "log", "is": json.loads(log)})
    assert [row["name"] for row in first["is"]["models"]] == ["a", "b", "c"]
    assert [(row["name"], row["requests"]) for row in second["is"]["models"]] == [("a", 0), ("b", 5)]
    assert "gone" not in second["is"]


def test_models_are_sorted_by_their_share_of_the_device() -> None:
    """Models are sorted by their share of the device between two states. A new model has no rates yet."""
    top = Top()
    assert not top.take("begin", "null")
    assert top.take("state", state(10.0, shown("a"), shown("b"), shown("c")))
    assert [row.share for row in top.rows] == [None, None, None]
    top.take("state", state(12.0, shown("a", 4, 0.2), shown("b", 2, 1.0), shown("c"), shown("d", queued=3)))

    assert [(row.model["name"], row.rate, row.share) for row in top.rows] == [
        ("b", 1.0, 0.5),
        ("a", 2.0, 0.1),
        ("c", 0.0, 0.0),
        ("d", None, None),
    ]
    assert [row.busy for row in top.rows] == [True, True, False, True]
    assert top.rows[0].cells() == ("b", "resident", "1 kB", "0", "0", "1/s", "50%", "4 ms", "1", "0")
    assert "device busy 60%, 3/s, 3 waiting, 4 resident" in top.headlines()[0]


def test_the_first_line_is_the_severest_finding() -> None:
    """The first line has the severest finding. Notes are counted only if there is nothing more severe."""
    note, warning = ("note", "a waits"), ("warning", "b fails")
    assert headline([], "d") == ""
    assert headline([note], "d") == "note: a waits (d: what to do)"
    assert headline([note, note], "d") == "note: a waits (d: 1 more, and what to do)"
    assert headline([warning, note], "d") == "warning: b fails (d: what to do)"


def test_keys_choose_the_order_of_the_models() -> None:
    """`s` sorts by the next column: figures from the largest on, words from a to z. `r` reverses the order."""
    top = Top()
    top.take(
        "state", state(0.0, shown("a", p99_s=0.1, errors=1), shown("b", p99_s=0.2), shown("c", errors=9))
    )

    orders = []
    for key in ("s", "s", "s", "r", "s"):
        top.press(key)
        orders.append("".join(row.model["name"] for row in top.rows))

    assert orders == ["bac", "abc", "cab", "bac", "cba"]


def test_a_filter_shows_the_models_whose_names_have_what_is_typed() -> None:
    """Keys are letters of the filter until Enter. Backspace removes the last letter, and Esc shows all models again."""
    top = Top()
    top.take("state", state(0.0, shown("cats"), shown("dogs"), shown("quails")))

    def press(keys: str) -> str:
        for key in keys:
            top.press(key)
        return "".join(row.model["name"][0] for row in top.shown)

    assert press("/") == "cdq"
    assert press("qs") == ""
    assert top.keys().startswith("/qs_ ")
    assert press("\x7f") == "q"
    assert press("\n") == "q"
    assert top.keys().endswith("/ filter by name (q)")
    assert press("\x1b") == "cdq"


def test_the_latest_rates_of_a_model_are_a_line() -> None:
    """A row draws the model's latest rates, relative to the highest of them. Old rates drop out."""
    top = Top()
    for second, requests in enumerate((0, 8, 12, 12, 13)):
        top.take("state", state(float(second), shown("a", requests)))
    assert top.sparks(top.rows[0]) == " █▄ ▁"
    for second in range(5, 30):
        top.take("state", state(float(second), shown("a", 13)))
    assert top.sparks(top.rows[0]) == 10 * " "


def test_another_runtime_has_no_rates_at_first() -> None:
    """A new runtime has no rates at first, because its counters begin again. Without a runtime, the reason is shown."""
    top = Top()
    top.take("state", state(10.0, shown("a", 100)))
    top.take("state", json.dumps({"t": 11.0, "up": False, "instance": "1", "why": "it\nis\x1b gone"}))
    assert top.headlines() == ["it is? gone"]
    top.take("state", state(12.0, shown("a", 3), instance="2"))

    assert [row.rate for row in top.rows] == [None]


def test_each_of_several_devices_has_a_line() -> None:
    """Each device has a line with its weights, its GPU's memory and its load. A model's row has the devices of its weights."""
    card = {"used_bytes": 3_000_000_000, "total_bytes": 8_000_000_000}

    def devices(seconds: float) -> list[dict[str, Any]]:
        first = {**DEVICE, "card": card, "host": 1500, "device_s": seconds}
        return [first, {"number": 1, "card": None, "down_since": 0.0}]

    top = Top()
    top.take("state", state(10.0, shown("a"), devices=devices(1.0)))
    top.take("state", state(12.0, shown("a", 4, 1.0), devices=devices(2.0)))

    first, second, rest = top.headlines()
    assert (
        first
        == "device 0: 800 B (1 kB without sharing, 20% saved) of 5 kB for weights (100 B pinned), 3 GB of 8 GB in use, busy 50%"
    )
    assert second.startswith("device 1: its runtime has not answered since ")
    assert rest == "2/s, 0 waiting, 1 resident, host 1.5 kB"
    assert top.rows[0].cells()[1] == "resident on 0"


def test_models_of_a_device_that_sleeps_are_asleep() -> None:
    """The line of a sleeping device says that it sleeps. Cold models of this device are also called asleep."""
    devices = [{"number": 0, "card": None, "asleep_since": 0.0}]
    fields = json.loads(state(1.0, shown("a", weights="asleep"), devices=devices))
    top = Top()
    top.take("state", json.dumps({**fields, "asleep": True, "cold": 2}))

    (line,) = top.headlines()
    assert re.fullmatch(r"asleep since \d\d:\d\d:\d\d, 0/s, 0 waiting, 3 asleep, host 0 B", line)


def test_models_behind_aliases_are_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """A model behind an alias has a row with the alias, the share, the rate and errors. A state without aliases keeps earlier rows."""

    def said(t: float, *targets: tuple[str, str, int, str]) -> str:
        keys = ("model", "share", "answered", "copies")
        rows = [{**dict(zip(keys, target, strict=True)), "errors": 1} for target in targets]
        return json.dumps({**json.loads(state(t, shown("a"))), "aliases": [{"name": "ab", "targets": rows}]})

    top = Top()
    top.take("state", said(10.0, ("a", "100%", 1, ""), ("b", "shadow", 0, "2 same")))
    top.take("state", said(12.0, ("a", "100%", 5, ""), ("b", "shadow", 0, "6 same")))
    assert [tuple(filter(None, row.cells())) for row in top.aliases] == [
        ("ab", "100% → a", "2/s", "1"),
        ("ab", "shadow → b", "0/s", "1"),
    ]
    assert [row.model["name"] for row in top.rows] == ["a"]
    top.take("state", json.dumps({**json.loads(state(14.0, shown("a"))), "gone": []}))
    assert [row.rate for row in top.aliases] == [0.0, 0.0]

    show([("state", said(float(t), ("a", "100%", 2 * t, ""))) for t in range(2)])
    assert "  ab: sends 100% → a, requests 2/s, errors 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("differs", "cell"),
    [
        ({"residency": "device"}, "pinned, resident"),
        ({"state": "loading", "weights": "starting"}, "starting"),
        ({"paused": "hold"}, "paused (hold)"),
        ({"kind": "meta", "weights": "ready", "residency": None, "bytes": None}, "ready"),
    ],
)
def test_where_a_model_is_takes_one_word_or_two(differs: dict[str, Any], cell: str) -> None:
    """The column of states has the most important state, in one or two words."""
    top = Top()
    top.take("state", state(0.0, shown("a", **differs)))
    assert top.rows[0].cells()[1] == cell


def test_without_a_terminal_there_are_lines_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, events are printed at once, and the figures of busy models every five seconds."""
    show(
        [
            ("begin", "null"),
            ("log", json.dumps({"t": 0.0, "text": "a: ready\x1b"})),
            *(("state", state(float(t), shown("a", 10 * t, 0.1 * t), shown("idle"))) for t in range(10)),
        ]
    )

    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "a: ready?"
    figures = lines[1::2]
    assert len(figures) == len(lines[2::2]) == 2
    assert all("10/s" in line for line in figures)
    assert set(lines[2::2]) == {
        "  a: state resident, size 1 kB, queued 0, running 0, requests 10/s, device 10%, p99 4 ms, loads 1, errors 0"
    }


@looped
async def test_a_terminal_shows_the_table_until_q(tmp_path: Path) -> None:
    """On a terminal, the table is shown until the user presses q, and then the screen is restored."""
    async with served(tmp_path, models=["alpha"]) as server:
        server.runtime.models["alpha"] = model(histogram(0.002), "alpha")
        spans = {"instance": server.runtime.instance, "next": 0, "end": 0, "spans": []}
        server.runtime.answers = lambda command: spans
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        top = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rsrv.cli.main", "top", "--server", f"unix:{server.socket}"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "24"},
        )
        os.close(theirs)
        screen = ""
        while not ("alpha" in screen and "of 5 kB for weights" in screen):
            screen += (await asyncio.to_thread(os.read, ours, 4096)).decode(errors="replace")
        assert "\x1b[?1049h" in screen
        server.runtime.change("alpha@1", entry("alpha", weights="absent"))
        while "warm" not in screen:
            screen += (await asyncio.to_thread(os.read, ours, 4096)).decode(errors="replace")
        assert "DEVICE▼" in screen
        os.write(ours, b"s")
        while "P99▼" not in screen:
            screen += (await asyncio.to_thread(os.read, ours, 4096)).decode(errors="replace")
        os.write(ours, b"q")
        while "\x1b[?1049l" not in screen:
            screen += (await asyncio.to_thread(os.read, ours, 4096)).decode(errors="replace")
        assert await top.wait() == 0
        os.close(ours)


@pytest.mark.parametrize("columns", [80, 110])
def test_figures_stay_whole_beside_long_names(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is little room, names and states are cut. Figures are never cut, because a cut figure would look like another figure."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    top = Top()
    for second in range(2):
        name = "fraud-detection-europe-2026-11-28"
        late = shown(name, 125 * second, 0.5 * second, weights="resident, in an older version", p99_s=0.0246)
        top.take("state", state(float(second), late))
    console = Console(width=columns, height=24, file=StringIO())
    with console.capture() as capture:
        console.print(to_screen(top))
    screen = capture.get()
    for whole in (
        "QUEUED",
        "REQUESTS",
        "DEVICE▼",
        "ERRORS",
        " 125/s",
        " 50%",
        "24.6 ms",
        "fraud-det",
        "resident",
    ):
        assert whole in screen, screen


def test_a_small_terminal_shows_names_rates_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 40 columns and 12 lines, the headline and the keys are whole, and each model has its name, rate, share and p99."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "12")
    top = Top()
    top.take("state", state(1.0, *(shown(f"model-with-a-name-{number}") for number in range(1000))))
    for number in range(6):
        top.take("log", json.dumps({"t": 1.0, "text": f"event {number} of a rather long name"}))
    console = Console(width=40, height=12, file=StringIO())
    with console.capture() as capture:
        console.print(to_screen(top))
    screen = capture.get()

    assert screen.count("\n") <= 12
    assert re.search(r"MODEL +REQUESTS +DEVICE. +P99", screen)
    assert "model-with-a" in screen
    assert "event 5" in screen
    assert "filter" in screen
