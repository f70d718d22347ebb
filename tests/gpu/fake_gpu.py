"""The cards of the fake CUDA driver: their settings, which a process follows at once, and the record of its calls."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
#: made by tests/gpu/install.py
INSTALLED = ROOT / ".gpu"

MIB, GIB = 1 << 20, 1 << 30
#: CUDA_ERROR_ILLEGAL_ADDRESS, and CU_COMPUTEMODE_EXCLUSIVE_PROCESS
ILLEGAL_ADDRESS, EXCLUSIVE_PROCESS = 700, 3

#: seconds after which a call on the card has failed
_CALL_TIMEOUT_S = 150.0

T = TypeVar("T")


class OneCard(ctypes.Structure):
    """Settings of a physical card."""

    _fields_ = (
        ("memory_bytes", ctypes.c_int64),
        # what other processes hold of it
        ("others_bytes", ctypes.c_int64),
        # 1: a T4, whose products are cuBLASLt's; 0: an H100
        ("is_t4", ctypes.c_int64),
    )


class CardSettings(ctypes.Structure):
    """Settings of all cards; `Cards` of driver/card.h begins with them."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "count",
                # of the link, in each direction; 0: a copy takes no longer than the host's
                "pinned_bytes_per_s",
                "pageable_bytes_per_s",
                # a larger copy moves nothing, so it costs the machine no time; 0: every copy moves its bytes
                "moved_bytes_max",
                "kernel_ns",
                # launches of all processes until one has the CUDA error `fault`; -1: none has
                "launches_until_fault",
                "fault",
                # of each card, with equal shares of its memory; 0: the cards are not partitioned
                "mig_instances",
                "compute_mode",
                # for which the driver holds the memory of a process that has ended
                "held_ns",
                # 1: the cards have no virtual memory management, as some vGPUs
                "without_vmm",
                # what a context takes of a card
                "context_bytes",
            )
        ),
        ("cards", OneCard * 8),
    )


#: bytes of `Cards`: the settings, and the holders of memory, which only the driver reads
_CARDS_BYTES = ctypes.sizeof(CardSettings) + 8 * 16 * 24


class Call(NamedTuple):
    """A call that the driver has carried out; times are those of `time.monotonic`.

    `kind`: context, alloc, free, no-room, register, unregister, h2d, d2h, kernel, graph, graph-update or fault. `bytes` of a launch are its
    kernels. `detail` of a copy: how it reads the host's memory (page-locked, copied, pageable). `stream` of an alloc or a
    no-room, and of a context: the card.
    """

    start: float
    end: float
    pid: int
    kind: str
    bytes: int
    stream: int
    detail: str


class FakeGpu:
    """Cards whose state lies in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: interpreter of `run`
        self.python = sys.executable
        self.record = directory / "record"
        path = directory / "cards"
        path.write_bytes(bytes(_CARDS_BYTES))
        self.settings = _map(path)
        self.settings.count = 1
        for card in self.settings.cards:
            card.memory_bytes = 80 * GIB
        self.settings.launches_until_fault = -1
        self.settings.fault = ILLEGAL_ADDRESS

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that finds the cards, its own aside."""
        return {
            "RSRV_FAKE_GPU": str(self.directory),
            "LD_LIBRARY_PATH": str(INSTALLED / "driver"),
            "PYTHONPATH": f"{INSTALLED / 'site'}",
            # jax would ask each of NVIDIA's libraries for its version; most of them are missing.
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            # XLA logs each refused allocation in hundreds of lines.
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    def calls(self, *kinds: str) -> list[Call]:
        """Return what the driver has carried out so far, in the order of the ends."""
        found = []
        for line in self.record.read_text().splitlines() if self.record.exists() else ():
            start, end, pid, kind, nbytes, stream, *detail = line.split(" ", 6)
            if not kinds or kind in kinds:
                found.append(
                    Call(float(start), float(end), int(pid), kind, int(nbytes), int(stream), "".join(detail))
                )
        return found

    def run(self, function: Callable[..., T], *arguments: Any, **variables: str) -> T:
        """Return the result of a function of a test module in a process of its own, which finds the cards.

        The arguments are for the function; `variables` are added to the process's environment. Raises AssertionError
        with the process's output if it fails.
        """
        done = subprocess.run(
            [self.python, "-m", "tests.gpu.fake_gpu", function.__module__, function.__qualname__],
            input=pickle.dumps((self.directory, arguments)),
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, **self.environment, **variables},
            timeout=_CALL_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"status {done.returncode}:\n{done.stderr.decode(errors='replace')}"
        result: T = pickle.loads((self.directory / "result").read_bytes())
        return result


def settings_here() -> CardSettings:
    """Return the settings of the cards that this process finds, for a function that `FakeGpu.run` calls."""
    return _map(Path(os.environ["RSRV_FAKE_GPU"]) / "cards")


def _map(path: Path) -> CardSettings:
    with path.open("r+b") as file:
        return CardSettings.from_buffer(mmap.mmap(file.fileno(), _CARDS_BYTES))


def _main() -> None:
    """Call the function that the command line names, with the arguments of the standard input."""
    import importlib

    directory, arguments = pickle.load(sys.stdin.buffer)
    result = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*arguments)
    (directory / "result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main()
