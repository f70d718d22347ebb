"""Pools of state on jax's device: each sequence finds its own state in any slot, and never another sequence's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime.device import Array, DeviceError, Executable, Launched
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.models import CompiledModel, warm_up
from rsrv.runtime.state_pool import SequenceTensors, SlotRow, StateLost, StatePool
from tests.builders import export_sums
from tests.unit.runtime.conftest import build_here

SLOTS = 3


@dataclass
class Machine:
    """A model of `export_sums` on a device, and the states that its sequences should have."""

    device: JaxDevice
    model: CompiledModel
    #: By sequence: its expected sum and its expected number of steps.
    expected: dict[str, tuple[float, int]] = field(default_factory=dict)
    tensors: dict[str, SequenceTensors] = field(default_factory=dict)

    @property
    def pool(self) -> StatePool:
        assert self.model.pool is not None
        return self.model.pool

    def step(self, *rows: tuple[str, int, bool], size: int = 3, value: float = 1.0) -> list[Array]:
        """Execute rows of (sequence, slot, begins), and check each answer."""
        slots = []
        for name, slot, begins in rows:
            tensors = self.tensors.setdefault(name, SequenceTensors())
            slots.append(SlotRow(slot, tensors, begins))
        x = np.full((size, 3), 1e6, np.float32)
        x[: len(rows)] = value
        outputs = self.execute(self.model.executables[0, size], x, slots)
        for index, (name, _, begins) in enumerate(rows):
            total, steps = (0.0, 0) if begins else self.expected[name]
            self.expected[name] = total + value, steps + 1
            np.testing.assert_array_equal(outputs[0][index], np.full(3, total + value + 1), name)
            assert outputs[1][index] == steps + 1
        return outputs

    def execute(self, executable: Executable, x: Array, rows: Sequence[SlotRow]) -> list[Array]:
        assert self.model.weights is not None
        launched, losses = self.pool.launch(self.device, executable, self.model.weights, [x], len(x), rows)
        return self.pool.read(self.device, launched, losses)[0]

    def end(self, name: str) -> None:
        self.tensors.pop(name).live = False
        del self.expected[name]


def fail(*_: object) -> None:
    raise DeviceError("told to")


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_sums(tmp_path_factory.mktemp("bundles") / "sums", slots=SLOTS)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def machine(request: pytest.FixtureRequest, sums: Path) -> Machine:
    device = JaxDevice("cpu", asynchronous_cpu=request.param)
    return Machine(device, build_here(sums, device))


def test_a_step_leaves_the_pools_where_they_are(machine: Machine) -> None:
    """A step adds its input to the state of each row. The pools stay in the same memory."""

    def addresses() -> list[int]:
        return [array.unsafe_buffer_pointer() for array in machine.pool._pools.arrays]  # type: ignore[union-attr]

    before = addresses()
    machine.step(("a", 0, True), ("b", 2, True))
    machine.step(("b", 2, False), ("a", 0, False), value=3.0)
    machine.step(("a", 0, False), size=1)
    assert addresses() == before
    assert machine.expected == {"a": (5.0, 3), "b": (4.0, 2)}


def test_a_warm_up_that_fails_on_the_device_leaves_no_broken_pools(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If reading the outputs of a warm-up fails, the state pools are broken as well, and are dropped."""
    with monkeypatch.context() as patched:
        patched.setattr(machine.device, "read", fail)
        with pytest.raises(DeviceError, match="told to"):
            warm_up(machine.model, machine.device)
    assert machine.pool.losses == 1
    machine.step(("a", 0, True))


def test_evicted_pools_keep_the_state_of_live_sequences(machine: Machine) -> None:
    """After an eviction, live sequences continue in any slot. Sequences that have ended take no memory."""
    machine.step(("a", 0, True), ("b", 1, True), ("c", 2, True), value=5.0)
    state = machine.tensors["b"]
    machine.end("b")
    machine.pool.unload(machine.device)
    assert state.arrays is None
    machine.pool.load(machine.device)
    machine.step(("c", 0, False))
    machine.step(("a", 1, False), ("c", 0, False), ("d", 2, True))


def test_state_that_was_lost_is_never_replaced_by_zeros(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the states are lost, a sequence that continues fails, and one that begins finds an empty slot."""
    machine.step(("a", 0, True), ("b", 1, True))
    with monkeypatch.context() as patched:
        patched.setattr(machine.device, "read", fail)
        with pytest.raises(DeviceError, match="told to"):
            machine.step(("a", 0, False))
    with pytest.raises(StateLost):
        machine.step(("b", 1, False))
    machine.step(("c", 1, True))
    # An execution from before the loss fails. It does not lose the new states.
    with monkeypatch.context() as patched:
        patched.setattr(machine.device, "read", fail)
        with pytest.raises(DeviceError, match="told to"):
            machine.pool.read(machine.device, Launched(None), 0)
    machine.step(("c", 1, False))


def test_a_launch_that_fails_with_the_pools_in_its_hands_loses_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a launch fails after it has taken the memory of the pools, all states are lost.

    The next execution gets new pools.
    """
    machine.step(("a", 0, True))
    launch = machine.device.launch

    def launch_and_fail(*arguments: object) -> None:
        launch(*arguments)  # type: ignore[arg-type]
        pools = arguments[4]
        for array in pools.arrays:  # type: ignore[attr-defined]
            array.delete()
        raise DeviceError("told to")

    with monkeypatch.context() as patched:
        patched.setattr(machine.device, "launch", launch_and_fail)
        with pytest.raises(DeviceError, match="told to"):
            machine.step(("a", 0, False))
    assert machine.pool.losses == 1
    with pytest.raises(StateLost):
        machine.step(("a", 0, False))
    machine.step(("b", 0, True))


@pytest.mark.parametrize("seed", range(3))
def test_nobody_sees_anothers_state(machine: Machine, seed: int) -> None:
    """Sequences begin, step, move and end in any slots, with evictions and refused executions in between.

    Each step must find the state of its own sequence.
    """
    rng = random.Random(seed)
    for round in range(120):
        match rng.choice(["step"] * 8 + ["evict", "refuse", "end", "warm"]):
            case "evict":
                machine.pool.unload(machine.device)
                machine.pool.load(machine.device)
            case "refuse" if machine.expected:
                name = rng.choice(sorted(machine.expected))
                row = SlotRow(rng.randrange(SLOTS), machine.tensors[name], rng.random() < 0.5)
                with pytest.raises(TypeError, match="Argument types differ"):
                    machine.execute(machine.model.executables[0, 3], np.zeros((3, 2), np.float32), [row])
            case "end" if machine.expected:
                name = rng.choice(sorted(machine.expected))
                machine.end(name)
            case "warm":
                machine.execute(machine.model.executables[0, 3], np.full((3, 3), 1e9, np.float32), ())
            case _:
                names = sorted({*machine.expected, f"s{round}"})
                chosen = rng.sample(names, k=rng.randint(1, min(SLOTS, len(names))))
                free = rng.sample(range(SLOTS), k=len(chosen))
                rows = [
                    (name, slot, name not in machine.expected or rng.random() < 0.1)
                    for name, slot in zip(chosen, free, strict=True)
                ]
                machine.step(*rows, value=float(rng.randrange(1, 1000)))
    assert all(state.arrays is None or state.slot is None for state in machine.tensors.values())
