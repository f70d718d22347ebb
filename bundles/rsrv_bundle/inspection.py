"""Parsing of modules in a child process, which may crash.

jaxlib's parser is native code. For most modules with a few damaged bytes, it reports an error. About one in a few hundred such
modules crashes it, and about one in a few thousand makes it run forever. So a separate process parses each module first, with
limits on memory and time. It is not a sandbox, because it runs as the same user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rsrv_bundle.errors import BundleError
from rsrv_bundle.modules import Signature, signature_of
from rsrv_bundle.products import Precision

#: Maximum number of bytes of address space. jaxlib itself takes a large part of it.
_MEMORY = 3 << 30
#: Additional bytes of address space for each byte of a module.
_MEMORY_PER_BYTE = 8
#: Maximum number of seconds of CPU time.
_SECONDS = 5
#: Additional seconds of CPU time for each byte of a module.
_SECONDS_PER_BYTE = 1e-6
#: Maximum wall time as a multiple of the maximum CPU time, because the machine may be busy.
_PATIENCE = 4
#: A timeout is the module's fault only if the child has used this share of its CPU time.
_FAIR = 0.5
#: Exit statuses of a process that the kernel (out of memory) or an operator killed. A parser that fails does not end in this way.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
#: Seconds within which the process must start and load jaxlib.
_START = 120.0
#: Maximum number of bytes of a signature. No model comes near it.
_MAX_ANSWER = 64 << 20


class InspectorError(Exception):
    """The parsing process failed because of the machine. No module is to blame."""


class _Lost(InspectorError):
    """The process did not start, or was killed. Another process may succeed."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    sock: socket.socket
    answers: IO[bytes]
    ready: bool = False


class Inspector:
    """Calls `rsrv_bundle.modules.signature_of` in a child process that may crash. For one thread at a time.

    The child starts when it is needed, and runs until `close`, or until this process ends. After a bad module, a new child
    replaces the old one, because the module may have damaged its memory. `known` maps the SHA-256 of modules to their signatures.
    Modules in `known` are not parsed again, and signatures of other modules are added to it.
    """

    def __init__(self, known: MutableMapping[str, Signature] | None = None) -> None:
        self._known = known
        self._child: _Child | None = None

    def start(self) -> None:
        """Start the child early, so that it has loaded jaxlib by the time it is needed.

        If any signature is known already, do nothing, because the child may not be needed.
        """
        if not self._known:
            self._start()

    def _start(self) -> None:
        if self._child is None:
            # If the child does not start, the check of the next module reports it.
            with contextlib.suppress(OSError):
                self._child = _spawn()

    def __call__(self, blob: bytes, file: str) -> Signature:
        """Return the signature of a module. `file` is the name of its file, for errors. Raises BundleError, InspectorError."""
        digest = "" if self._known is None else hashlib.sha256(blob).hexdigest()
        if self._known is not None and digest in self._known:
            return self._known[digest]
        try:
            signature = self._ask_child(blob, file)
        except _Lost:
            signature = self._ask_child(blob, file)
        if self._known is not None:
            self._known[digest] = signature
        return signature

    def _ask_child(self, blob: bytes, file: str) -> Signature:
        child = self._started()
        pid, allowed = child.process.pid, _seconds(len(blob))
        began = _cpu_seconds(pid)
        child.sock.settimeout(allowed * _PATIENCE)
        try:
            child.sock.sendall(json.dumps({"file": file, "bytes": len(blob)}).encode() + b"\n" + blob)
            answer = json.loads(child.answers.readline(_MAX_ANSWER))
        except TimeoutError:
            used = _cpu_seconds(pid) - began
            self.close()
            if used < _FAIR * allowed:
                raise InspectorError(
                    f"{file}: parsing this file got only {used:.1f} s of processor time in {allowed * _PATIENCE:.0f} s: "
                    "the machine is too busy; the module may be valid"
                ) from None
            raise BundleError(f"{file}: {_BLAME.format('takes forever')}") from None
        except (OSError, ValueError):
            how = _end(child.process)
            lost = child.process.returncode in _FROM_OUTSIDE
            self.close()
            if lost:
                raise _Lost(
                    f"{file}: the process that parses this file {how}: perhaps the machine has too little memory; "
                    "the module may be valid"
                ) from None
            raise BundleError(f"{file}: {_BLAME.format(how)}") from None
        if "problems" in answer:
            self.close()
            self._start()
            raise BundleError(answer["problems"])
        return signature_from_json(answer)

    def close(self) -> None:
        """End the child. The next module starts a new one."""
        child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            child.process.wait()
            child.answers.close()
            child.sock.close()

    def _started(self) -> _Child:
        self._start()
        child = self._child
        if child is not None and not child.ready:
            child.sock.settimeout(_START)
            with contextlib.suppress(OSError):
                child.ready = child.answers.readline(16) == b"ready\n"
        if child is None or not child.ready:
            self.close()
            raise _Lost(
                "the process that parses modules does not start; to see why, run "
                f"{sys.executable} -m {__name__}"
            )
        return child


def signature_from_json(value: Mapping[str, Any]) -> Signature:
    """Return a signature from its JSON object. Raises LookupError, TypeError, ValueError."""
    inputs, outputs = (
        tuple((str(token), tuple(map(int, shape))) for token, shape in value[side])
        for side in ("inputs", "outputs")
    )
    return Signature(inputs, outputs, str(value["digest"]), Precision(**value["precision"]))


def _spawn() -> _Child:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
    return _Child(process, ours, ours.makefile("rb"))


_BLAME = "parsing this file {}: the file is damaged, or was made to do harm"


def _end(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended that has not answered."""
    try:
        status = process.wait(10)
    except subprocess.TimeoutExpired:
        return "gives no answer"
    if status == -signal.SIGXCPU:
        return "takes forever"
    return f"ends in {signal.Signals(-status).name}" if status < 0 else "gives no answer"


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, which may have ended but must not have been waited for."""
    # Read the fields after the process's name, which ends with the last parenthesis and may contain any character.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _seconds(nbytes: int) -> float:
    return _SECONDS + nbytes * _SECONDS_PER_BYTE


def main() -> None:
    """Answer each line of JSON and the module after it with one line of JSON, until the other end of stdin closes."""
    import jaxlib.mlir.dialects.stablehlo  # noqa: F401 - loaded before the limits are set

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=sys.stdin.fileno()) as sock, sock.makefile("rwb") as stream:
        stream.write(b"ready\n")
        stream.flush()
        while line := stream.readline():
            request = json.loads(line)
            blob = stream.read(request["bytes"])
            _limit(len(blob))
            stream.write(json.dumps(_answer(blob, request["file"])).encode() + b"\n")
            stream.flush()


def _limit(nbytes: int) -> None:
    """Set the limits for the next module. The kernel ends this process if the module exceeds the time limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_at_most(hard, _MEMORY + nbytes * _MEMORY_PER_BYTE), hard))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = int(time.process_time() + _seconds(nbytes)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(hard, seconds), hard))


def _at_most(hard: int, limit: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(hard, limit)


def _answer(blob: bytes, file: str) -> dict[str, Any]:
    try:
        signature = signature_of(blob, file)
    except BundleError as error:
        return {"problems": error.problems}
    return dataclasses.asdict(signature)


if __name__ == "__main__":
    main()
