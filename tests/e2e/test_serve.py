"""`rsrv serve` as a user types it: bundles in, a real server out, until Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from local_triton import EXEC_BOUND, INSTALLATION, LOOPBACK
from rsrv_gen import cli as rsrv_gen
from tests.e2e.harness import compilation_cache
from tests.e2e.lives import COLUMNS, place, write_version
from tests.e2e.nodes import answer, free_block
from tests.waiting import wait_until

QUICK = "lifecycle: {look_s: 0.1}\n"


class Terminal:
    """A running `rsrv serve`, and its output."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, port: int) -> None:
        self.process = process
        self._output = output
        self.grpc_port = port + 1

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait_for(self, words: str, timeout: float = 60) -> None:
        wait_until(lambda: words in self.text, timeout, what=f"{words!r} in {self.text}")


@contextmanager
def serving(folder: Path, *arguments: str, gpu: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    """Run `rsrv serve bundles` in this folder, on ports of its own.

    `gpu`: variables that name the machine's GPUs; without them it serves from the CPU.
    """
    (folder / "rsrv.yaml").write_text(QUICK)
    port = free_block(3)
    ports = [f"--http-port={port}", f"--grpc-port={port + 1}", f"--metrics-port={port + 2}"]
    environment = {
        **os.environ,
        "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(compilation_cache()),
        "RSRV_METRICS__LISTEN": "null",
        "PATH": f"{INSTALLATION.launcher.parent}:{os.environ['PATH']}",
        **(gpu or {}),
    }
    command = [sys.executable, "-m", "rsrv.cli.main", "serve", "bundles", "--config=rsrv.yaml"]
    if gpu is None:
        command.append("--cpu")
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid()), "", *command, *ports, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Terminal(process, folder / "output", port)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bundles").mkdir()
    place(write_version(tmp_path / "first", 1), tmp_path / "bundles" / "cats")
    return tmp_path


def test_a_folder_of_bundles_is_served_followed_and_stopped(folder: Path) -> None:
    """One command serves the bundles, prints the addresses, follows changes, and ends with Ctrl-C."""
    with serving(folder) as terminal:
        terminal.wait_for("Stop with Ctrl-C")
        assert "cats is ready" in terminal.text
        assert f"gRPC       localhost:{terminal.grpc_port}" in terminal.text
        assert answer(terminal.grpc_port, "cats") == 1
        place(write_version(folder / "second", 2), folder / "bundles" / "dogs")
        terminal.wait_for("dogs is ready")
        assert answer(terminal.grpc_port, "dogs") == 2
        place(write_version(folder / "third", 3), folder / "bundles" / "cats")
        terminal.wait_for("cats serves its new bundle")
        wait_until(lambda: answer(terminal.grpc_port, "cats") == 3, 20, what="the new answer")
        shutil.rmtree(folder / "bundles" / "dogs")
        terminal.wait_for("dogs is removed")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text
        assert terminal.text.endswith("Ctrl-C again stops at once.\n")


def test_a_broken_bundle_is_named_and_the_others_are_served(folder: Path) -> None:
    """A bundle without its weights is reported with what to do; it does not keep the server from starting."""
    broken = write_version(folder / "second", 2)
    (broken / "weights.safetensors").unlink()
    place(broken, folder / "bundles" / "dogs")
    with serving(folder) as terminal:
        terminal.wait_for("Stop with Ctrl-C")
        assert "Serving 1 of 2 models" in terminal.text
        assert "dogs is not served: weights.safetensors: is missing" in terminal.text
        assert answer(terminal.grpc_port, "cats") == 1


def test_a_port_that_is_taken_ends_it_before_anything_is_loaded(folder: Path) -> None:
    """The message names the port, and the command does not start a server that could not listen."""
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serving(folder, f"--http-port={port}") as terminal:
            assert terminal.process.wait(30) == 1
            assert f"{port} cannot be taken for http" in terminal.text


def test_the_plain_command_of_triton_serves(folder: Path) -> None:
    """`tritonserver --model-repository=gen/` has no other flag, but for ports where the default ones are taken."""
    assert rsrv_gen.main([str(folder / "bundles"), "-o", str(folder / "gen")]) == 0
    ports, flags = (8000, 8001, 8002), []
    if not all(map(_is_free, ports)):
        first = free_block(3)
        ports = (first, first + 1, first + 2)
        flags = [
            f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True)
        ]
    command = [str(INSTALLATION.launcher), "--model-repository=gen/", *flags]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid()), "", *command],
            cwd=folder,
            env={
                **os.environ,
                "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(compilation_cache()),
                "RSRV_METRICS__LISTEN": "null",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: not _is_free(ports[0]), 60, what="Triton's HTTP port")
        assert answer(ports[1], "cats") == 1
        body = json.dumps(
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, COLUMNS], "data": [0] * COLUMNS}]}
        )
        url = f"http://{LOOPBACK}:{ports[0]}/v2/models/cats/infer"
        with urlopen(Request(url, body.encode()), timeout=20) as reply:
            outputs = {one["name"]: one["data"] for one in json.load(reply)["outputs"]}
        assert outputs["second"] == [1] * COLUMNS
    finally:
        process.kill()
        process.wait()


def _is_free(port: int) -> bool:
    """Return whether nothing listens on this port, on any address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
