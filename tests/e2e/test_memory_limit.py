"""A server may use less memory than its models need. It stays within the limit, and the kernel kills no process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from local_triton import TritonServer
from rsrv_bundle.export import export_bundle
from rsrv_bundle.writer import write_weights
from tests.e2e.calls import Array, Caller, assert_same, at_once
from tests.e2e.harness import StartTriton, make_repository
from tests.status import read_status
from tests.unit.bundle.forge import seal
from tests.waiting import wait_until

pytestmark = pytest.mark.long

#: Bytes that the server may use. Without models, its processes need 200 MB.
LIMIT = 400 << 20
MODELS = 80
#: Number of rows of each model's matrices. Each model has two of these matrices as weights, which are 0.6 GB for all models. In
#: addition, each module has half a matrix as a constant. An executable takes as much memory as this constant, or twice as much
#: if the executable comes from the compilation cache.
_ORDER = 1024
CLIENTS, REQUESTS = 4, 50


@dataclass(frozen=True)
class ControlGroup:
    """A control group with a memory limit, of version 1 or 2 of the kernel's interface."""

    path: Path

    def limit(self, nbytes: int) -> None:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (self.path / name).exists():
                (self.path / name).write_text(str(nbytes))
                return
        raise OSError(f"{self.path} limits no memory")

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed because the memory was used up."""
        return self._numbers("memory.events", "memory.oom_control")["oom_kill"]

    @property
    def taken(self) -> int:
        """Bytes of the group that the kernel cannot reclaim, which are all bytes except cached files."""
        numbers = self._numbers("memory.stat")
        return (
            numbers["total_rss"] + numbers["total_shmem"]
            if "total_rss" in numbers
            else numbers["anon"] + numbers["shmem"]
        )

    def _numbers(self, *names: str) -> dict[str, int]:
        file = next(self.path / name for name in names if (self.path / name).exists())
        lines = (line.split() for line in file.read_text().splitlines())
        return {name: int(number) for name, number in lines}


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    """Make a control group with the limit. Remove it when its processes have ended."""
    mounts = {"": Path("/sys/fs/cgroup"), "memory": Path("/sys/fs/cgroup/memory")}
    reason: object = "there are no control groups"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        mount = mounts.get(controllers)
        if mount is None:
            continue
        # With version 2, only a group without processes of its own may limit its subgroups. So try the parent groups as well.
        place = mount / own.strip("/")
        for parent in (place, *place.parents):
            if not parent.is_relative_to(mount):
                break
            made = ControlGroup(parent / f"rsrv-test-{os.getpid()}")
            try:
                made.path.mkdir()
                made.limit(LIMIT)
            except OSError as error:
                reason = error
                with suppress(OSError):
                    made.path.rmdir()
                continue
            try:
                yield made
            finally:
                _remove(made.path)
            return
    pytest.skip(f"no control group with a limit of memory can be made here: {reason}")


def _remove(path: Path) -> None:
    # The runtime and the control process end a moment after the server.
    wait_until(lambda: not (path / "cgroup.procs").read_text(), what="the end of the group's processes")
    path.rmdir()


def matrices(number: int) -> dict[str, Array]:
    rng = np.random.default_rng(number)
    return {name: rng.integers(-2, 3, (_ORDER, _ORDER)).astype(np.float32) for name in "ab"}


def constant(number: int) -> Array:
    rng = np.random.default_rng([number, 1])
    return rng.integers(-1, 2, (_ORDER, _ORDER // 2)).astype(np.float32)


def question(seed: int) -> Array:
    return np.random.default_rng(seed).integers(-1, 2, (1, _ORDER)).astype(np.float32)


def answer(number: int, x: Array) -> Array:
    weights = matrices(number)
    y: Array = (x @ weights["a"] + x @ weights["b"]) @ constant(number)
    return y


def make_bundles(folder: Path) -> None:
    """Make bundles with different modules and weights. Only the first one is exported, which takes a second."""
    first, own = folder / "m0", jnp.asarray(constant(0))
    export_bundle(
        lambda weights, x: {"y": (x @ weights["a"] + x @ weights["b"]) @ own},
        matrices(0),
        {"x": question(0)},
        batch_sizes=(1,),
        out_dir=first,
        max_constant_bytes=2 * constant(0).nbytes,
    )
    module = (first / "model.b1.mlir").read_bytes()
    assert module.count(constant(0).tobytes()) == 1
    for number in range(1, MODELS):
        path = folder / f"m{number}"
        shutil.copytree(first, path)
        (path / "model.b1.mlir").write_bytes(
            module.replace(constant(0).tobytes(), constant(number).tobytes())
        )
        write_weights(path / "weights.safetensors", list(matrices(number).items()))
        seal(path)


@pytest.mark.timeout(1800)
def test_a_memory_limit_shows_as_starts_and_loads_not_as_a_kill(
    group: ControlGroup, start_triton: StartTriton, tmp_path: Path
) -> None:
    """Weights and executables need more than twice the limit, and clients ask every model.

    All answers are right, and the runtime survives.
    """
    make_bundles(tmp_path / "bundles")
    repository = make_repository(tmp_path, settings="runtime: {start: lazy}\nstub: {front: native}")

    class LimitedServer(TritonServer):
        def command(self) -> list[str]:
            join = f'echo $$ > {group.path}/cgroup.procs && exec "$@"'
            return ["/bin/sh", "-c", join, "sh", *super().command()]

    # The large executables would fill the cache that other tests share.
    cache = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    server = start_triton(repository, make=LimitedServer, spare=True, env=cache)
    runtime = read_status(server.pid)["pid"]
    share = 1 / np.arange(1, MODELS + 1) ** 0.5
    share /= share.sum()

    def work(call: Caller, client: int) -> int:
        rng, most = np.random.default_rng(client), 0
        # First, the clients together ask every model once. After that, they ask popular models more often.
        first = range(client, MODELS, CLIENTS)
        for number in (*first, *rng.choice(MODELS, REQUESTS, p=share)):
            x = question(client)
            assert_same(call(f"m{number}", {"x": x}), {"y": answer(int(number), x)})
            most = max(most, group.taken)
        return most

    most = max(at_once(server, CLIENTS, work))

    fallen = server.log_text().count("memory is short, so it falls back to cold")
    print(f"most memory taken: {most / 1e6:.0f} MB of {LIMIT / 1e6:.0f}; models that fell back: {fallen}")
    assert group.kills == 0
    assert read_status(server.pid)["pid"] == runtime
    assert most < LIMIT
    assert fallen > 0
