"""The commands in the documentation, which run unchanged on one server that was started as on the first page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import example_bundles as examples
from local_triton import LAUNCHER
from rsrv.serve import demo
from tests.e2e.gateways import entry, running_gateway
from tests.e2e.harness import RunningTriton, running_triton
from tests.e2e.openais import running_openai
from tests.onnx_files import encoder
from tests.pages import NOT_RUN, PLACEHOLDERS, ROOT, RUN, Command, blocks, commands
from tests.waiting import wait_until

#: These tests take long. tests/unit/test_docs.py checks names and flags of every command within seconds.
pytestmark = pytest.mark.long

START = ROOT / "docs" / "index.md"
#: Commands of the first page that export bundles. They run before the server starts, because other pages use these bundles.
EXPORTS = [
    command
    for command in commands()
    if command.page == START.name
    and command.words[:2] == ["rsrv-bundle", "export"]
    and command.words[command.words.index("-o") + 1] in ("bundles/classify", "bundles/tagger")
]
COMMANDS = [
    command
    for command in commands()
    if command.program in RUN
    and " ".join(command.words[:2]) not in NOT_RUN
    and command.text not in {export.text for export in EXPORTS}
]
#: Commands that must exit with 1 here, and the reasons.
FAILS = {
    "rsrv-bundle diff": "the bundles differ, as with diff(1)",
    "rsrv why REQUEST": "no request is under way, and none was slow",
    "rsrv placement --dry-run": "the server has one device",
    "rsrv status pictures": "the server has no such model; a test of the lifecycle runs this with one",
}
#: The page with the commands that start a server by hand.
EXISTING_TRITON = ROOT / "docs" / "existing-triton.md"
#: Models of the demo that the pages use.
DEMO_MODELS = (demo.MODEL, "glossary_bytes")
#: Further examples that the pages use.
EXAMPLES = ("glossary", "mlp")


@dataclass
class World:
    """A folder in which the commands run, and the ports of the server that they use."""

    folder: Path
    ports: dict[str, str]

    def is_ready(self, model: str) -> bool:
        address = self.ports["localhost:8000"]
        return self.run(f"curl -sf http://{address}/v2/models/{model}/ready")[0] == 0

    def text(self, command: Command) -> str:
        """Return the text of a command with values in place of its placeholders."""
        text = command.text
        for known, here in {**self.ports, **PLACEHOLDERS}.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(known)}(?![\w-])", here, text)
        return text

    @contextmanager
    def started(self, text: str) -> Iterator[subprocess.Popen[str]]:
        """Run the text in a shell. At the end of the block, the shell and its children are killed."""
        with subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def run(self, text: str) -> tuple[int, str]:
        """Run the text in a shell, and return its exit status and its output."""
        with self.started(text) as process:
            out, _ = process.communicate(timeout=180)
        return process.returncode, out


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Yield the state of a reader at the end of the first page: a folder, a server, and a gateway in front of the server."""
    with tempfile.TemporaryDirectory(prefix="docs-") as made, pytest.MonkeyPatch.context() as patch:
        folder = Path(made)
        # Commands search this folder for a server, and find the one server in it.
        patch.setenv("RSRV_RUNTIME_DIR", str(folder / "run"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "docs" / "scenarios").mkdir(parents=True)
        for scenario in (ROOT / "docs" / "scenarios").iterdir():
            # Two seconds are enough to show that the command works. Other tests check the figures on the pages.
            text = re.sub(r"(?m)^duration: \d+", "duration: 2", scenario.read_text())
            (folder / "docs" / "scenarios" / scenario.name).write_text(text)
        built = examples.ensure(EXAMPLES)
        ready = (demo.DATA / demo.BUNDLES / name for name in DEMO_MODELS)
        for bundle in (*(built / name for name in EXAMPLES), *ready):
            shutil.copytree(bundle, folder / "bundles" / bundle.name)
        world = World(folder, {})
        pages = ("client.md", "exporting.md", "hugging-face.md", "text-model.md")
        for page in (START, *(ROOT / "docs" / name for name in pages)):
            _write_files(page, folder)
        encoder(folder / "encoder.onnx")
        np.save(folder / "images.npy", np.zeros((20, 8, 8, 1), np.float32))
        assert [world.run(export.text)[0] for export in EXPORTS] == [0, 0]
        (folder / "reference.py").write_text(_block(ROOT / "docs" / "bundle-tools.md", "python"))
        (folder / "rsrv.yaml").write_text(_block(ROOT / "docs" / "configuration.md", "yaml"))
        (generate,) = (
            command
            for command in commands()
            if command.page == EXISTING_TRITON.name and command.program == "rsrv-gen"
        )
        assert world.run(generate.text)[0] == 0
        with running_triton(
            folder / "gen", folder / "server.log", extra_args=_flags(EXISTING_TRITON)
        ) as server:
            world.ports = _ports(server)
            with (
                running_gateway(folder, [entry(server, "one")], mode="lpt_packing"),
                running_openai(server.grpc_port) as api,
            ):
                world.ports["localhost:8005"] = f"127.0.0.1:{api.port}"
                yield world


def _write_files(page: Path, folder: Path) -> None:
    """Write each Python block of the page whose first line names a file, such as `# pictures.py`."""
    for language, _, lines in blocks(page.read_text()):
        if language == "python" and (named := re.fullmatch(r"# (\w+\.py)", lines[0])):
            (folder / named[1]).write_text("\n".join(lines) + "\n")


def _block(page: Path, kind: str) -> str:
    """Return the page's only block in this language."""
    (lines,) = (lines for language, _, lines in blocks(page.read_text()) if language == kind)
    return "\n".join(lines)


def _flags(page: Path) -> list[str]:
    """Return the flags of the page's tritonserver that serves only rsrv's models, without the flag for the repository."""
    alone = ["tritonserver", "--model-repository=gen/"]
    (command,) = (
        candidate for candidate in commands() if candidate.page == page.name and candidate.words[:2] == alone
    )
    return list(command.words[2:])


def _ports(server: RunningTriton) -> dict[str, str]:
    ports = {8000: server.http_port, 8001: server.grpc_port, 8002: server.metrics_port}
    return {f"localhost:{public}": f"127.0.0.1:{port}" for public, port in ports.items()}


@pytest.mark.parametrize("command", COMMANDS, ids=[command.where for command in COMMANDS])
def test_a_command_in_the_documentation_succeeds(world: World, command: Command) -> None:
    """A command on a page succeeds unchanged, except that models and ports are those of the test."""
    text = world.text(command)
    if command.program == "rsrv" and command.words[1] in ("watch", "top"):
        with world.started(text) as watch:
            assert watch.stdout is not None
            assert "runtime " in watch.stdout.readline()
    else:
        if match := re.search(r"^curl .*(http://)?(127\.0\.0\.1:\d+)/v2/models/(\w+)/infer", text):
            # The model may still load, because an earlier command of the page may have exported it.
            wait_until(lambda: world.is_ready(match[3]))
        status, out = world.run(text)
        expected = int(command.text.startswith(tuple(FAILS)))
        assert status == expected, f"{text}\n{out}"


def test_the_flags_of_tritonserver_exist() -> None:
    """The help of tritonserver contains every flag of tritonserver on the pages."""
    process = subprocess.run([LAUNCHER, "--help"], check=False, capture_output=True, text=True)
    known = process.stdout + process.stderr
    used = {
        flag
        for command in commands()
        if command.program == "tritonserver"
        for flag in re.findall(r"--[\w-]+", command.text)
    }
    assert used
    assert {flag for flag in used if flag not in known} == set()
