"""The cards of the fake CUDA driver. Their settings apply to running processes at once. The driver records its calls."""

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
#: Folder that tests/gpu/install.py makes.
INSTALLED = ROOT / ".gpu"

MIB, GIB = 1 << 20, 1 << 30
#: CUDA_ERROR_ILLEGAL_ADDRESS, and CU_COMPUTEMODE_EXCLUSIVE_PROCESS.
ILLEGAL_ADDRESS, EXCLUSIVE_PROCESS = 700, 3

#: Time limit in seconds of a call of `FakeGpu.run`.
_CALL_TIMEOUT_S = 150.0

T = TypeVar("T")


class OneCard(ctypes.Structure):
    """Settings of a physical card."""

    _fields_ = (
        ("memory_bytes", ctypes.c_int64),
        # Bytes of the card's memory that other processes hold.
        ("others_bytes", ctypes.c_int64),
        # 1 for a T4, on which matrix products use cuBLASLt; 0 for an H100.
        ("is_t4", ctypes.c_int64),
    )


class CardSettings(ctypes.Structure):
    """Settings of all cards. The struct `Cards` of driver/card.h begins with them."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "count",
                # Speeds of the link in each direction. With 0, a copy takes only the host's time.
                "pinned_bytes_per_s",
                "pageable_bytes_per_s",
                # Copies above this size move nothing, so they use no CPU time. With 0, every copy moves its bytes.
                "moved_bytes_max",
                "kernel_ns",
                # Number of launches of all processes before one has the CUDA error `fault`. With -1, no launch has it.
                "launches_until_fault",
                "fault",
                # Number of instances of each card, with equal shares of its memory. With 0, the cards are not partitioned.
                "mig_instances",
                "compute_mode",
                # Nanoseconds for which the driver still holds the memory of a process that has ended.
                "held_ns",
                # 1 if the cards have no virtual memory management, as some vGPUs.
                "without_vmm",
                # Bytes of a card's memory that a context takes.
                "context_bytes",
            )
        ),
        ("cards", OneCard * 8),
    )


#: Bytes of the struct `Cards`: the settings, and the holders of memory, which only the driver reads.
_CARDS_BYTES = ctypes.sizeof(CardSettings) + 8 * 16 * 24


class Call(NamedTuple):
    """A call that the driver has carried out. Times are those of `time.monotonic`.

    `kind`: context, alloc, free, no-room, register, unregister, h2d, d2h, kernel, graph, graph-update or fault. For a launch,
    `bytes` is the number of its kernels. For a copy, `detail` says how it reads the host's memory (page-locked, copied,
    pageable). For an alloc, a no-room and a context, `stream` is the number of the card.
    """

    start: float
    end: float
    pid: int
    kind: str
    bytes: int
    stream: int
    detail: str


class FakeGpu:
    """Fake cards. `directory` has their settings and the record of calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: Interpreter that `run` uses.
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
        """Variables with which a process finds the cards."""
        return {
            "RSRV_FAKE_GPU": str(self.directory),
            "LD_LIBRARY_PATH": str(INSTALLED / "driver"),
            "PYTHONPATH": f"{INSTALLED / 'site'}",
            # jax would ask each of NVIDIA's libraries for its version, and most of them are missing.
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            # XLA logs each refused allocation in hundreds of lines.
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    def calls(self, *kinds: str) -> list[Call]:
        """Return the calls that the driver has carried out so far, in the order of their ends."""
        calls = []
        for line in self.record.read_text().splitlines() if self.record.exists() else ():
            start, end, pid, kind, nbytes, stream, *detail = line.split(" ", 6)
            if not kinds or kind in kinds:
                calls.append(
                    Call(float(start), float(end), int(pid), kind, int(nbytes), int(stream), "".join(detail))
                )
        return calls

    def run(self, function: Callable[..., T], *arguments: Any, **variables: str) -> T:
        """Run a function of a test module in a separate process, which finds the cards. Return its result.

        `arguments` are passed to the function, and `variables` are added to the process's environment. If the process fails,
        AssertionError with its output is raised.
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
    """Return the settings of the cards that this process finds. This is for functions that `FakeGpu.run` calls."""
    return _map(Path(os.environ["RSRV_FAKE_GPU"]) / "cards")


def _map(path: Path) -> CardSettings:
    with path.open("r+b") as file:
        return CardSettings.from_buffer(mmap.mmap(file.fileno(), _CARDS_BYTES))


def _main() -> None:
    """Call the function that the command line names, with the arguments from the standard input."""
    import importlib

    directory, arguments = pickle.load(sys.stdin.buffer)
    result = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*arguments)
    (directory / "result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main()
