"""Properties of the host's weights after any order of events."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rsrv.runtime.allocation import LARGE
from rsrv.runtime.host_memory import MemoryLimit, SharedMemory
from rsrv.runtime.host_weights import HostStore, HostWeights
from tests.builders import FEW_EXAMPLES
from tests.unit.runtime.weights import Array, bundle_of, check_counts, large, small


class Runtimes(RuleBasedStateMachine):
    """Two runtimes on one /dev/shm. Models are added, removed and change residency, and processes die."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rsrv-test-")
        self.path = Path(self.directory.name)
        pool = [large(1), large(2), large(3), small(1), small(2), np.zeros((2, 0), np.int8)]
        self.arrays = [
            pool[0:3],
            [pool[0], pool[3]],
            [pool[0], pool[0], pool[5]],
            [pool[1], pool[3], pool[4]],
        ]
        self.files = [
            bundle_of(self.path, {f"w{i}": array for i, array in enumerate(arrays)}, f"b{index}")
            for index, arrays in enumerate(self.arrays)
        ]
        #: Limit of the second runtime's host copies: two large tensors and a small one.
        self.limit = 2 * large(1).nbytes + small(1).nbytes
        self.stores = [self.start(0), self.start(1)]
        self.models: list[list[tuple[HostWeights, list[Array]]]] = [[], []]
        #: Files that processes may have left when they were killed.
        self.left: set[str] = set()
        self.views: list[tuple[Array, Array]] = []

    def start(self, runtime: int) -> HostStore:
        limit = MemoryLimit(self.limit, 0) if runtime else None
        return HostStore(SharedMemory(self.path), limit=limit)

    @rule(runtime=st.integers(0, 1), bundle=st.integers(0, 3), keep=st.booleans())
    def open(self, runtime: int, bundle: int, keep: bool) -> None:
        weights = self.stores[runtime].open(self.files[bundle], keep=keep)
        self.models[runtime].append((weights, self.arrays[bundle]))

    @precondition(lambda self: any(self.models))
    @rule(data=st.data(), action=st.sampled_from(["keep", "drop", "close", "read"]))
    def act(self, data: st.DataObject, action: str) -> None:
        runtime = data.draw(st.sampled_from([i for i in (0, 1) if self.models[i]]))
        model = data.draw(st.sampled_from(self.models[runtime]))
        if action == "read":
            index = data.draw(st.integers(0, len(model[1]) - 1))
            self.views.append((model[0].read(index), model[1][index]))
        else:
            getattr(model[0], action)()
        if action == "close":
            self.models[runtime].remove(model)

    @rule()
    def forget_views(self) -> None:
        self.views.clear()

    @rule(runtime=st.integers(0, 1))
    def stop(self, runtime: int) -> None:
        self.stores[runtime].close()
        self.stores[runtime] = self.start(runtime)
        self.models[runtime].clear()

    @rule(runtime=st.integers(0, 1))
    def die(self, runtime: int) -> None:
        """End a runtime as SIGKILL does: the kernel closes its files and removes none."""
        self.left |= self.held(runtime)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rsrv.runtime.host_memory.os.unlink", _refuse)
            self.stop(runtime)

    @rule(runtime=st.integers(0, 1))
    def sweep(self, runtime: int) -> None:
        removed = self.stores[runtime].sweep()
        assert removed == len(self.left - self.held(0) - self.held(1))
        self.left.clear()

    def held(self, runtime: int) -> set[str]:
        return {
            tensor.key.digest
            for weights, _ in self.models[runtime]
            for tensor in weights.tensors
            if weights.kept and tensor.nbytes >= LARGE
        }

    @invariant()
    def the_books_are_right(self) -> None:
        for store in self.stores:
            check_counts(store)
        assert self.stores[1].taken == self.stores[1].counts.physical <= self.limit
        names = {path.name for path in self.path.glob("rsrv-weights-*/*")}
        held = self.held(0) | self.held(1)
        assert held <= names <= held | self.left
        # When a left file is used again, its last user removes it, and it is not expected any more.
        self.left &= names
        for read, expected in self.views:
            np.testing.assert_array_equal(read, expected)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.directory.cleanup()


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError


TestRuntimes = Runtimes.TestCase
TestRuntimes.settings = settings(FEW_EXAMPLES, stateful_step_count=25)
