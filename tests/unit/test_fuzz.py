"""Some hundred seeds of what `make fuzz` tries ten thousand of, and what finds something bad."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from tests.fuzz.drafts import PIECES, honest, http_bytes, message_bytes
from tests.fuzz.noise import LINES, Noise
from tests.fuzz.requests import make
from tests.fuzz.sending import Answer, judged

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("what", ["bundles", "frames", "answers"])
def test_hostile_input_is_refused_and_harms_nobody(what: str) -> None:
    """In a process of its own, because children are forked there, which this one's threads forbid."""
    counts = dict.fromkeys(("bundles", "modules", "frames", "answers", "requests"), 0)
    counts[what] = 120 if what == "bundles" else 1000
    options = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{what}: {counts[what]} in " in done.stdout


def test_what_is_bad_is_found(tmp_path: Path) -> None:
    """The watch over the child is no better than what it notices: a death, a stall, an error, time, memory."""
    script = """
import os, sys, time
from tests.fuzz.watched import watch

def case(seed):
    match seed:
        case 1: os.abort()
        case 2: time.sleep(60)
        case 3: raise KeyError(seed)
        case 4:
            until = time.process_time() + 0.2
            while time.process_time() < until: pass
        case 5: bytearray(50 << 20)[::4096] = b"x" * (50 << 8)
    return "well"

for verdict in watch(case, range(7), seconds=0.1, nbytes=20 << 20):
    print(verdict.seed, verdict.outcome)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=ROOT, capture_output=True, text=True
    )
    expected = ["0 well", "1 crash", "2 hang", "3 fault", "4 slow", "5 bloat", "6 well"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_a_seed_makes_the_same_bad_request_again() -> None:
    """A failure names a seed, and some thousand seeds make every kind of change."""
    attacks = [make(seed) for seed in range(2000)]

    assert attacks[:200] == [make(seed) for seed in range(200)]
    assert {name for attack in attacks for name in attack.pieces} == set(PIECES)


def test_a_request_without_a_change_is_honest() -> None:
    """What is refused is refused because of the change: both encodings say what the client wants."""
    draft = honest(1, "elastic", binary=True)
    read = service_pb2.ModelInferRequest.FromString(message_bytes(draft))
    body = http_bytes(draft).partition(b"\r\n\r\n")[2]
    inputs = json.JSONDecoder().raw_decode(body.decode(errors="replace"))[0]["inputs"]

    assert [(one.name, one.datatype, list(one.shape)) for one in read.inputs] == [
        ("x", "UINT32", [1, 4]),
        ("steps", "INT32", [1, 1]),
    ]
    assert [one["shape"] for one in inputs] == [[1, 4], [1, 1]]
    assert body.endswith(b"".join(read.raw_input_contents))


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("400 parameter rsrv_priority must be an integer", "refused"),
        ('500 {"error":"Unable to parse \'id\': attempt to access JSON non-string as string"}', "refused"),
        ("500 the request could not be prepared", "fault"),
        ("INTERNAL UnicodeDecodeError: ... At:\n  /opt/rsrv/stub/request.py(21): read", "leak"),
        ("400 Traceback (most recent call last)", "leak"),
    ],
)
def test_what_a_client_may_be_told(said: str, outcome: str) -> None:
    """A refusal has no path and no traceback, and only Triton's own parsers call a client's fault internal."""
    assert judged(Answer("refused", said)).outcome == outcome


def test_logs_that_bad_requests_fill_are_noticed(tmp_path: Path) -> None:
    """More lines of one model in a second than a throttle lets through are told once; Triton's own are not counted."""
    log = tmp_path / "server.log"
    log.write_text("before\n" * 100)
    noise = Noise([log])
    ours = "2026-01-01 00:00:0{} I rsrv.stub {}: request '': INVALID\n"
    with log.open("a") as file:
        file.write('I0101 00:00:00.000000 1 http_server.cc:1] "x"\n' * 100)
        file.writelines(ours.format(f"{second},000", model) for second in range(9) for model in "ab" * LINES)
    assert noise.told() == []
    with log.open("a") as file:
        file.write(ours.format("8,500", "b") + "    Traceback\n" * 9)

    (said,) = noise.told()
    assert "00:00:08 rsrv.stub b" in said
