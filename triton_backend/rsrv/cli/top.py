"""`rsrv top`: shows the events of the live page in a terminal. Without a terminal, it prints lines of text."""

import json
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import ceil
from queue import SimpleQueue
from textwrap import wrap
from threading import Thread
from typing import Any, NamedTuple

from rsrv.cli.output import headline, is_terminal, saved
from rsrv.text import amount, duration, one_line, percent, printable, rate

#: Seconds between two blocks of lines without a terminal.
_BLOCK_INTERVAL_S = 5.0
#: Maximum number of models, and of models behind aliases, in a block of lines.
_MAX_MODELS = 10
#: Maximum number of events below the table on a terminal.
_MAX_EVENTS = 6
#: Width in characters of the bar that shows a model's share of the device's time, and of the chart of a model's latest rates.
_BAR = 10
_SPARKS = " ▁▂▃▄▅▆▇█"
_HEAD = ("MODEL", "STATE", "SIZE", "QUEUED", "RUNNING", "REQUESTS", "DEVICE", "P99", "LOADS", "ERRORS")
_SHARE, _RATE = _HEAD.index("DEVICE"), _HEAD.index("REQUESTS")
#: Only terminals with at least this many characters per line show the columns in _IF_WIDE.
_WIDE = 110
_IF_WIDE = ("SIZE", "RUNNING", "LOADS")
#: Terminals with fewer characters per line show only the columns in _IF_NARROW, and no bar.
_NARROW = 80
_IF_NARROW = ("MODEL", "REQUESTS", "DEVICE", "P99")


class ModelRow(NamedTuple):
    """A model's row. Values that are not known yet are None."""

    model: dict[str, Any]
    #: Requests per second since the previous event.
    rate: float | None
    #: Share of the device's time since the previous event.
    share: float | None
    #: True if the server has several devices.
    several: bool = False

    def values(self) -> tuple[str | float, ...]:
        """Return the values by which rows are sorted: one for each column of `cells`."""
        model, cells = self.model, self.cells()
        numbers = (model["bytes"], model["queued"], model["executing"], self.rate, self.share, model["p99_s"])
        return (*cells[:2], *(number or 0.0 for number in (*numbers, model["loads"], model["errors"])))

    @property
    def busy(self) -> bool:
        model = self.model
        return bool(model["queued"] or model["executing"] or self.rate or model["error"])

    def cells(self) -> tuple[str, ...]:
        model, weights = self.model, self.model["weights"]
        if model["paused"]:
            weights = f"paused ({model['paused']})"
        elif model["state"] == "ready" and model["residency"] == "device":
            weights = f"pinned, {weights}"
        if self.several and model["on"]:
            weights += f" on {' '.join(map(str, model['on']))}"
        return (
            printable(model["name"]),
            weights,
            amount(model["bytes"]) if model["bytes"] else "-",
            str(model["queued"]),
            str(model["executing"]),
            rate(self.rate),
            percent(self.share),
            duration(model["p99_s"]),
            str(model["loads"]),
            str(model["errors"]),
        )


class AliasRow(NamedTuple):
    """The row of a model behind an alias. The rate is None until it is known."""

    alias: str
    target: dict[str, Any]
    rate: float | None

    def cells(self) -> tuple[str, ...]:
        """Return the row's cells, in the order of _HEAD."""
        target, errors = f"{self.target['share']} → {self.target['model']}", str(self.target["errors"])
        return (
            printable(self.alias),
            printable(target),
            *("", "", "", rate(self.rate), "", "", ""),
            errors,
        )


class Top:
    """The latest picture of the server, from the stream's events. Pure."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"up": False, "why": "no figures yet"}
        self._before = self.state
        #: Rows of models, sorted by the chosen column.
        self.rows: list[ModelRow] = []
        #: Rows of the models behind aliases, sorted by name.
        self.aliases: list[AliasRow] = []
        self.column, self.reverse = _SHARE, False
        #: Only models whose names contain this text are shown. `typing` is True while the user types it.
        self.filter, self.typing = "", False
        #: The latest rates by model.
        self.rates: dict[str, deque[float]] = {}
        #: Events, the latest last.
        self.log: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)

    def take(self, event: str, text: str) -> bool:
        """Process an event. Return True if it has new figures."""
        if event == "begin":
            self.log.clear()
        if event == "log":
            self.log.append(json.loads(text))
        if event != "state":
            return False
        self._before, self.state = self.state, _whole(self.state, json.loads(text))
        if self.state["up"]:
            self.rows = list(_rows(self._before, self.state))
            self.aliases = list(_alias_rows(self._before, self.state))
            self.rates = {
                row.model["name"]: deque((*self.rates.get(row.model["name"], ()), row.rate or 0.0), _BAR)
                for row in self.rows
            }
            self._sort()
        return True

    def press(self, key: str) -> None:
        """Handle a key.

        `s` sorts by the next column. `r` reverses the order. `/` begins the typing of the filter, and Enter ends it. Esc
        removes the filter.
        """
        if key == "\x1b":
            self.filter, self.typing = "", False
        elif self.typing:
            self.typing = key not in "\r\n"
            self.filter = self.filter[:-1] if key in "\b\x7f" else self.filter + key.strip()
        elif key == "/":
            self.typing = True
        elif key == "s":
            self.column = (self.column + 1) % len(_HEAD)
        elif key == "r":
            self.reverse = not self.reverse
        self._sort()

    def _sort(self) -> None:
        """Sort words from a to z, figures from the largest, and equal rows by name."""
        self.rows.sort(key=lambda row: row.cells()[0])
        words = isinstance(next((row.values()[self.column] for row in self.rows), ""), str)
        self.rows.sort(key=lambda row: row.values()[self.column], reverse=self.reverse == words)

    @property
    def shown(self) -> list[ModelRow]:
        """Rows of the models whose names match the filter."""
        return [row for row in self.rows if self.filter in row.model["name"]]

    def sparks(self, row: ModelRow) -> str:
        """Return a chart of a model's latest rates in one line of text. The highest rate has the full height."""
        rates = self.rates[row.model["name"]]
        most = max(rates) or 1.0
        return "".join(_SPARKS[ceil(8 * rate / most)] for rate in rates)

    def keys(self) -> str:
        """Return the last line. It explains the keys, or has the filter while the user types it."""
        if self.typing:
            return f"/{self.filter}_   Enter keeps this part of the names, Esc shows all"
        shown = f" ({self.filter})" if self.filter else ""
        return f"q quit   s sort by the next column   r reverse   / filter by name{shown}"

    def headlines(self) -> list[str]:
        """Return the lines above the table.

        These are the severest finding, if any, and a line about a single device and the models. With several devices, each device
        has a line, and the models have another one.
        """
        if not self.state["up"]:
            return [one_line(self.state["why"])]
        devices = self.state["devices"]
        busy = {device["number"]: _busy(self._before, self.state, device) for device in devices}
        # Take the largest figure instead of the sum over the devices, because the runtimes share their host copies.
        host = amount(max((device.get("host", 0) for device in devices), default=0))
        models = (
            f"{rate(sum(row.rate or 0 for row in self.rows))}, "
            f"{sum(row.model['queued'] for row in self.rows)} waiting, {self._states()}, host {host}"
        )
        findings = [(finding["severity"], finding["evidence"]) for finding in self.state["findings"]]
        first = [text] if (text := headline(findings, "`rsrv doctor`")) else []
        if len(devices) == 1 and "asleep_since" in devices[0]:
            return [*first, f"{_asleep(devices[0])}, {models}"]
        if len(devices) == 1:
            return [
                *first,
                f"{_weights(devices[0])}, device busy {percent(busy[devices[0]['number']])}, {models}",
            ]
        lines = []
        for device in devices:
            text = f"{_weights(device)}, busy {percent(busy[device['number']])}"
            if "asleep_since" in device:
                text = _asleep(device)
            elif "held" not in device:
                text = f"its runtime has not answered since {_clock(device['down_since'])}"
            lines.append(f"device {device['number']}: {text}")
        return [*first, *lines, models]

    def _states(self) -> str:
        """Return the number of models in each state. Details of states are left out."""
        counts = Counter(row.model["weights"].partition(",")[0] for row in self.rows)
        counts["asleep" if self.state.get("asleep") else "cold"] += self.state.get("cold", 0)
        return ", ".join(f"{count} {word}" for word, count in sorted(counts.items()) if count) or "no models"


def _asleep(device: dict[str, Any]) -> str:
    return f"asleep since {_clock(device['asleep_since'])}"


def _weights(device: dict[str, Any]) -> str:
    """Return a text about the weights on a device, and about the memory of a GPU. Empty while the runtime is down."""
    if "held" not in device:
        return ""
    of = "" if device["budget"] is None else f" of {amount(device['budget'])}"
    card = device["card"]
    used = "" if card is None else f", {amount(card['used_bytes'])} of {amount(card['total_bytes'])} in use"
    held_bytes = amount(device["held"]) + saved(device["physical"], device["logical"])
    return f"{held_bytes}{of} for weights ({amount(device['pinned'])} pinned){used}"


def _busy(before: dict[str, Any], now: dict[str, Any], device: dict[str, Any]) -> float | None:
    """Return the share of a device's time since the previous event that executions took, or None if it is not known."""
    elapsed = _elapsed(before, now)
    old = {device["number"]: device for device in before["devices"]} if elapsed > 0 else {}
    then = old.get(device["number"], {}).get("device_s")
    if then is None or "device_s" not in device:
        return None
    return min(1.0, max(0.0, float(device["device_s"] - then) / elapsed))


def _whole(before: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return the whole state. A state with the key `gone` has only changed models, so add the unchanged ones from `before`."""
    if "gone" not in state:
        return state
    models = {model["name"]: model for model in (*before.get("models", ()), *state["models"])}
    for name in state["gone"]:
        models.pop(name, None)
    aliases = {"aliases": before.get("aliases", [])}
    fields = {key: value for key, value in state.items() if key != "gone"}
    return {**aliases, **fields, "models": list(models.values())}


def _elapsed(before: dict[str, Any], now: dict[str, Any]) -> float:
    """Return the seconds between two states, or 0 if their counters cannot be compared."""
    same = before["up"] and before["instance"] == now["instance"]
    return float(now["t"] - before["t"]) if same else 0.0


def _rows(before: dict[str, Any], now: dict[str, Any]) -> Iterable[ModelRow]:
    elapsed = _elapsed(before, now)
    old = {model["name"]: model for model in before["models"]} if elapsed > 0 else {}
    several = len(now["devices"]) > 1
    for model in now["models"]:
        last = old.get(model["name"])
        if last is None:
            yield ModelRow(model, None, None, several)
        else:
            rate, share = (max(0.0, (model[k] - last[k]) / elapsed) for k in ("requests", "device_s"))
            yield ModelRow(model, rate, share, several)


def _alias_rows(before: dict[str, Any], now: dict[str, Any]) -> Iterable[AliasRow]:
    elapsed = _elapsed(before, now)
    old = (
        {(name, target["model"]): _requests(target) for name, target in _targets(before)}
        if elapsed > 0
        else {}
    )
    for name, target in _targets(now):
        last = old.get((name, target["model"]))
        per_second = None if last is None else max(0.0, (_requests(target) - last) / elapsed)
        yield AliasRow(name, target, per_second)


def _targets(state: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    return ((alias["name"], target) for alias in state.get("aliases", ()) for target in alias["targets"])


def _requests(target: dict[str, Any]) -> float:
    return float(target["answered"] + target["errors"])


def show(events: Iterable[tuple[str, str]]) -> None:
    """Show the events until they end."""
    if is_terminal():
        _show_live(events)
    else:
        _show_lines(events)


def print_events(events: Iterable[tuple[str, str]]) -> None:
    """Print each event as a line of JSON, for programs. The printed states are whole, unlike the states in the stream."""
    top = Top()
    for event, text in events:
        shown = top.state if top.take(event, text) else json.loads(text)
        print(json.dumps({"event": event, "is": shown}), flush=True)


def _show_live(events: Iterable[tuple[str, str]]) -> None:
    from rich.live import Live

    top = Top()
    inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    with Live(screen=True, auto_refresh=False) as screen, _keys(lambda key: inbox.put(("key", key))):
        Thread(target=_forward, args=(events, inbox), daemon=True).start()
        while True:
            event, content = inbox.get()
            if event == "end" or (content == "q" and not top.typing):
                break
            if event == "key":
                top.press(content)
            elif not top.take(event, content):
                continue
            screen.update(to_screen(top), refresh=True)
    if event == "end" and content is not None:
        raise content


def _forward(events: Iterable[tuple[str, str]], inbox: "SimpleQueue[tuple[str, Any]]") -> None:
    """Put each event into the inbox. At the end, put the event `end` with the error that ended the stream, or None."""
    try:
        for event in events:
            inbox.put(event)
    except Exception as error:  # noqa: BLE001  the other thread raises it
        inbox.put(("end", error))
    else:
        inbox.put(("end", None))


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """If standard input is a terminal, call `press` with each key, on a thread. Ctrl-C is still a signal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    def read() -> None:
        # Do not use sys.stdin.read, because the interpreter needs its lock at exit.
        while key := os.read(sys.stdin.fileno(), 1):
            press(key.decode(errors="replace"))

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    Thread(target=read, daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def to_screen(top: Top) -> Any:
    """Return the headlines, the table with the aliases and models, the latest events, and the explanation of the keys."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    size = shutil.get_terminal_size()
    wide, narrow = size.columns >= _WIDE, size.columns < _NARROW
    names = _IF_NARROW if narrow else [name for name in _HEAD if wide or name not in _IF_WIDE]
    shown = [_HEAD.index(name) for name in names]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for at in shown:
        name = _HEAD[at]
        # If there is little room, cut off the ends of names and states, but show figures whole.
        most = max(1, size.columns - 27) if at == 0 and narrow else None
        mark = ("▲" if top.reverse else "▼") if at == top.column else ""
        table.add_column(
            name + mark,
            justify="left" if at < 2 else "right",
            no_wrap=at >= 2,
            max_width=most,
        )
    heads = [part for line in top.headlines() for part in wrap(line, size.columns)]
    keys = wrap(top.keys(), size.columns)
    events = list(top.log)[-max(1, size.lines // 4) :]
    # Subtract the two lines of the table's head.
    room = size.lines - len(events) - len(heads) - len(keys) - 2
    aliases = [row for row in top.aliases if top.filter in row.alias][: max(1, room // 3)]
    for alias in aliases:
        table.add_row(*(Text(alias.cells()[at], no_wrap=True, overflow="ellipsis") for at in shown))
    for row in top.shown[: max(1, room - len(aliases))]:
        cells = list(row.cells())
        if not narrow:
            cells[_SHARE] = f"{'█' * round(_BAR * min(1.0, row.share or 0)):<{_BAR}} {cells[_SHARE]:>5}"
        if wide:
            cells[_RATE] = f"{top.sparks(row):>{_BAR}} {cells[_RATE]:>6}"
        texts = (Text(cells[at], no_wrap=True, overflow="ellipsis") for at in shown)
        table.add_row(*texts, style="bold" if row.model["error"] else None)
    # Do not wrap events, because `room` was computed with one line for each event.
    lines = [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in (*map(_line, events), *keys)]
    return Group(*(Text(line, "bold") for line in heads), table, *lines)


def _show_lines(events: Iterable[tuple[str, str]]) -> None:
    top, next_at = Top(), None
    for event, text in events:
        new = top.take(event, text)
        if event == "log":
            print(_line(top.log[-1]), flush=True)
        if not new:
            continue
        # Do not print the first state, because it has no rates. Print the second state, and then one state every few seconds.
        at = top.state["t"]
        if next_at is None and top.state["up"]:
            next_at = at
            continue
        if next_at is None or at >= next_at:
            next_at = at + _BLOCK_INTERVAL_S
            for line in top.headlines():
                print(f"{_clock(at)} {line}", flush=True)
            busy = [row for row in top.rows if row.busy][:_MAX_MODELS]
            rows: list[AliasRow | ModelRow] = [*top.aliases[:_MAX_MODELS], *busy]
            for row in rows if top.state["up"] else ():
                heads = ("SENDS", *_HEAD[2:]) if isinstance(row, AliasRow) else _HEAD[1:]
                pairs = zip(heads, row.cells()[1:], strict=True)
                cells = ", ".join(f"{name.lower()} {cell}" for name, cell in pairs if cell not in ("", "-"))
                print(f"  {row.cells()[0]}: {cells}", flush=True)


def _line(event: dict[str, Any]) -> str:
    return f"{_clock(event['t'])} {one_line(event['text'])}"


def _clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))
