"""Run cases one after the other in a child process. Detect crashes and hangs, and measure CPU time and memory."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a case."""

    seed: int
    #: The result of the case, or a value of BAD.
    outcome: str
    detail: str = ""
    #: CPU seconds that the case used in the child.
    seconds: float = 0.0
    #: Largest growth of the child's memory during the case, in bytes.
    nbytes: int = 0

    @property
    def bad(self) -> bool:
        return self.outcome in BAD


#: Bad outcomes. "crash": the child or a server died. "hang": the case did not end in time. "fault": an error was raised. "slow":
#: the case used too much CPU time. "bloat": the case used too much memory. "unanswered": a bad request got no answer. "leak": an
#: answer showed internals of the server. "harm": honest requests got wrong answers. "noise": bad requests caused many log lines.
BAD = ("crash", "hang", "fault", "slow", "bloat", "unanswered", "leak", "harm", "noise")

Case = Callable[[int], str]


def watch(case: Case, seeds: Sequence[int], *, seconds: float, nbytes: int) -> Iterator[Verdict]:
    """Run `case(seed)` for each seed in a child process. When the child dies, another one is forked.

    A case may use `seconds` of CPU time, twelve times as much time by the clock, and `nbytes` of memory in addition to the memory
    before it.
    """
    remaining = list(seeds)
    while remaining:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            _run(case, remaining, write)
        os.close(write)
        with open(read, "rb", buffering=0) as pipe:
            for line in _lines(pipe, 12 * seconds, child):
                verdict = Verdict(**json.loads(line))
                if not verdict.bad and verdict.seconds > seconds:
                    verdict = replace(verdict, outcome="slow", detail=f"{verdict.outcome}: {verdict.detail}")
                elif not verdict.bad and verdict.nbytes > nbytes:
                    verdict = replace(verdict, outcome="bloat", detail=f"{verdict.outcome}: {verdict.detail}")
                yield verdict
                del remaining[0]
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if remaining:
            hung = status == -signal.SIGKILL
            yield Verdict(remaining.pop(0), "hang" if hung else "crash", "" if hung else f"status {status}")


def _lines(pipe: FileIO, seconds: float, child: int) -> Iterator[bytes]:
    """Yield the child's lines until it ends. If it prints no line for this many seconds, kill it."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
        more = pipe.read(65536)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from lines


def _run(case: Case, seeds: Sequence[int], out: int) -> NoReturn:
    """Run the cases. This is the code of the child."""
    try:
        for seed in seeds:
            before, started = _forget_peak(), time.process_time()
            detail = ""
            try:
                outcome = case(seed)
            except Exception as error:  # noqa: BLE001 - what is looked for
                outcome, detail = "fault", f"{type(error).__name__}: {error}"[:300]
                place = error.__traceback__
                while place is not None and place.tb_next is not None:
                    place = place.tb_next
                if place is not None:
                    detail += f" ({Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno})"
            grown = _memory("VmHWM") - before
            verdict = Verdict(seed, outcome, detail, time.process_time() - started, grown)
            os.write(out, json.dumps(asdict(verdict)).encode() + b"\n")
    finally:
        os._exit(0)


def _forget_peak() -> int:
    """Reset the kernel's record of this process's peak memory. Return the current memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(figure: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(figure))
    return int(kilobytes) * 1024
