"""A disk with bundles and a fake tritonserver, for tests of the reconciler."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from unittest.mock import patch

from rsrv.control.presence import Presence, StubPoll
from rsrv.control.runtime_state import ModelVersion
from rsrv.control.triton import Mode, State, TritonError
from rsrv.settings import dump_settings, load_settings
from rsrv_gen.cli import main as rsrv_gen
from rsrv_gen.write import carried, is_alias, newest
from tests.unit.gen.bundles_for_tests import write_bundle

#: Text of a module that no server loads.
BAD = "bad"


class FakeTriton:
    """Serves the content of the repository. A load takes `seconds`."""

    def __init__(self, repository: Path, mode: Mode = "explicit") -> None:
        self.repository = repository
        self.mode: Mode = mode
        self.address = "nowhere"
        self.trouble = ""
        self.started_ns = 0
        self.program: str | None = None
        self.exits_on_error = False
        self.seconds = 1.0
        #: Text of the modules, and time of the newest file, by model.
        self.served: dict[str, tuple[str, int]] = {}
        #: Models that were unloaded by hand.
        self.dismissed: set[str] = set()
        #: Models that failed to load when the server started.
        self.failed: set[str] = set()
        #: Models whose stub is dead.
        self.dead: set[str] = set()
        #: Models whose stub lives without a connection to the runtime.
        self.cold: set[str] = set()
        #: Number of calls of `states`.
        self.asked = 0
        self.view = FakeView(self)
        #: The requests, in order: "load NAME", "loaded NAME", "unload NAME".
        self.log: list[str] = []

    def processes(self) -> set[str]:
        return self.served.keys() - self.dead

    async def states(self) -> Mapping[str, State]:
        self.asked += 1
        states: dict[str, State] = dict.fromkeys(self.dismissed, "dismissed")
        states |= dict.fromkeys(self.failed, "other")
        return {**states, **dict.fromkeys(self.served, "ready")}

    async def load(self, name: str) -> None:
        self.log.append(f"load {name}")
        folder = self.repository / name
        seen = newest(folder)
        # The stub reads the bundle after its start.
        await asyncio.sleep(self.seconds)
        if not (folder / "config.pbtxt").exists():
            raise TritonError(f"failed to load '{name}', failed to poll from model repository")
        if name in self.served and seen <= self.served[name][1]:
            return
        bundle = folder / "1" / "bundle"
        # An alias has no bundle of its own. It is served from its configuration.
        text = whole(bundle) if bundle.exists() else (folder / "config.pbtxt").read_text()
        if text == BAD:
            raise TritonError("no module")
        self.served[name] = text, seen
        self.dead.discard(name)
        self.log.append(f"loaded {name}")
        self.view.stir()

    async def unload(self, name: str) -> None:
        self.log.append(f"unload {name}")
        self.served.pop(name, None)
        self.view.stir()

    def kill(self, name: str) -> None:
        self.dead.add(name)
        self.view.stir()

    def texts(self) -> dict[str, str]:
        return {name: text for name, (text, _) in self.served.items()}


class FakeView:
    """A runtime that is up, with the live stubs."""

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton
        self.up = True
        self.asleep = False
        self.entries: Mapping[str, ModelVersion] = {}
        self.cold: Collection[str] = ()
        self.presence = FakePresence(self)
        self.changes = 0
        self._changed = asyncio.Event()

    @property
    def other_changes(self) -> int:
        return self.changes

    def see_stubs(self, poll: StubPoll) -> frozenset[str]:
        self.cold = poll.unconnected
        return self.presence.see(poll, asyncio.get_running_loop().time())[1]

    def connected(self) -> set[str]:
        connected = self._triton.processes() - self._triton.cold
        folders = [self._triton.repository / name for name in connected]
        return connected.union(*(carried(folder) for folder in folders if is_alias(folder)))

    def stir(self) -> None:
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, seen: int | None = None) -> None:
        if seen is None or seen == self.changes:
            await self._changed.wait()


class FakePresence(Presence):
    """The presence of one device. Its stubs are those of the test."""

    def __init__(self, view: FakeView) -> None:
        super().__init__(1)
        self._view = view

    @property
    def attached(self) -> set[str]:
        return self._view.connected() if self._view.up else set()


def whole(bundle: Path) -> str:
    """Return the text of the modules. All modules must be of one version."""
    small, large = ((bundle / f"model.b{size}.mlir").read_text().split()[0] for size in (1, 8))
    assert small == large, "a half-written bundle was taken"
    return small


def place(path: Path, text: str, *, internal: bool = False) -> None:
    """Write a bundle with this text in its modules. It appears in one step, by a rename."""
    aside = path.with_name(f".{path.name}")
    write_bundle(aside, text, internal=internal)
    shutil.rmtree(path, ignore_errors=True)
    aside.rename(path)


class World:
    """Roots with bundles, their repository, and a server that has loaded the repository."""

    def __init__(
        self, folder: Path, bundles: Mapping[str, Mapping[str, str]], *, lifecycle: str = ""
    ) -> None:
        """`bundles` has the text of the modules by root and name."""
        self.roots = {root: folder / root for root in bundles}
        for root, held in bundles.items():
            self.roots[root].mkdir()
            for name, text in held.items():
                place(self.roots[root] / name, text)
        self.repository = folder / "gen"
        config = folder / "settings.yaml"
        places = [str(path) for path in self.roots.values()]
        config.write_text(f"lifecycle: {{poll_s: 1, bundles: {places}{lifecycle and ', ' + lifecycle}}}\n")
        # The modules of these bundles are plain text, which jaxlib would refuse.
        with patch("rsrv_gen.run.find_spec", return_value=None):
            rsrv_gen([*places, "-o", str(self.repository), "--config", str(config)])
        self.settings = load_settings(config.read_text())
        if not self.repository.exists():  # no root has a bundle
            self.repository.mkdir()
            (self.repository / "rsrv.yaml").write_text(dump_settings(self.settings))
        self.triton = FakeTriton(self.repository)
        for path in sorted(self.repository.iterdir()):
            if path.is_dir() and (path / "1" / "bundle").is_dir():
                self.triton.served[path.name] = whole(path / "1" / "bundle"), newest(path)
