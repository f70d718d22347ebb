"""Host copies under a limit: which models get one, which lose theirs, and what clients see."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.control.sentences import life
from rsrv.runtime import host_copies, host_weights, weight_mover
from rsrv.runtime.allocation import Bytes
from rsrv.runtime.device import Abandoned
from rsrv.runtime.host_copies import HostCopies, HostCopy, WarmModel, choose_cold, choose_copies
from rsrv.runtime.host_memory import HostMemory, MemoryLimit, memory_limit
from rsrv.runtime.host_weights import HostStore
from rsrv.runtime.weight_mover import HostMemoryMeasured, ModelClosed, WeightMover
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv_bundle import BundleError
from rsrv_bundle.weights import WeightsFile
from tests.fakes import FakeError, Gate
from tests.runtime_commands import command
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.engines import answered, make_engine, refused, send_one
from tests.unit.runtime.metas import answer_of
from tests.unit.runtime.watchers import set_residency
from tests.unit.runtime.weights import bundle_of, check_counts, large, small
from tests.waiting import wait_until

GIB = 1 << 30
#: Bytes of a model of `export_doubling`: three f32.
_BYTES = 12


def copy(model: str, used: float, **tensors: int) -> HostCopy:
    return HostCopy(model, tensors, used)


# --- figures in, names out --------------------------------------------------------------------------------


def test_a_copy_fits_within_the_limit_and_beside_everything_else() -> None:
    """A copy fits if it exceeds no limit and leaves an eighth of all memory free.

    So a new copy does not force another one to be dropped soon.
    """
    limit = MemoryLimit(copies=4 * GIB, total=16 * GIB)

    assert limit.fits(3 * GIB, 8 * GIB, GIB)
    assert not limit.fits(3 * GIB, 8 * GIB, GIB + 1)
    assert limit.fits(0, 3 * GIB, GIB)
    assert not limit.fits(0, 3 * GIB, GIB + 1)


def test_copies_give_back_what_exceeds_the_limit_or_what_others_need() -> None:
    """Copies are dropped if they exceed the limit, or if less than a sixteenth of all memory is free.

    In the second case, they are dropped until an eighth is free, so that the next check drops nothing.
    """
    limit = MemoryLimit(copies=4 * GIB, total=16 * GIB)

    assert limit.excess(5 * GIB, 8 * GIB) == GIB
    assert limit.excess(3 * GIB, 8 * GIB) <= 0
    assert limit.excess(3 * GIB, 8 * GIB, 2 * GIB) == GIB
    assert limit.excess(3 * GIB, GIB) <= 0
    assert limit.excess(3 * GIB, GIB // 2) == 2 * GIB - GIB // 2
    assert limit.excess(0, 2 * GIB, GIB) == GIB
    # After a shortage has begun, it lasts until enough memory is free.
    assert [limit.lacking(GIB, ends=ends) for ends in (False, True)] == [0, GIB]


def test_the_default_limit_leaves_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, copies may take three quarters of the memory. This is the container's memory, if that is limited."""
    monkeypatch.setattr("rsrv.runtime.host_memory.total_memory", lambda: 16 * GIB)

    assert memory_limit(None) == MemoryLimit(12 * GIB, 16 * GIB)
    assert memory_limit(5) == MemoryLimit(5, 16 * GIB)


def test_the_least_recently_used_copies_leave_first() -> None:
    """The least recently used copies are dropped first, and no more than needed.

    Only copies that were last used before the time `before` are dropped.
    """
    copies = [
        copy("new", 3.0, a=10),
        copy("old", 1.0, b=10),
        copy("middle", 2.0, c=10),
        copy("busy", inf, d=10),
    ]

    assert choose_copies(copies, 0) == ([], 0)
    assert choose_copies(copies, 15) == (["old", "middle"], 0)
    assert choose_copies(copies, 30) == (["old", "middle", "new"], 0)
    assert choose_copies(copies, 31) == (["old", "middle", "new"], 1)
    assert choose_copies(copies, 15, before=2.0) == (["old"], 5)


def test_a_shared_tensor_leaves_with_its_last_copy() -> None:
    """A shared tensor is freed when the last copy with this tensor is dropped.

    A copy is not chosen if other copies keep all of its tensors, because dropping it would free nothing.
    """
    copies = [copy("a", 1.0, base=10, head_a=1), copy("b", 2.0, base=10, head_b=1), copy("c", 3.0, base=10)]

    assert choose_copies(copies, 2) == (["a", "b"], 0)
    assert choose_copies(copies, 12) == (["a", "b", "c"], 0)
    assert choose_copies([copy("a", 1.0, base=10), copy("b", inf, base=10)], 5) == ([], 5)


@pytest.mark.parametrize(("left_bytes", "dropped"), [(0, ["old"]), (10, ["old"]), (20, [])])
def test_what_the_last_runtime_left_leaves_before_copies(left_bytes: int, dropped: list[str]) -> None:
    """Tensors that the last runtime left are removed before host copies of models are dropped.

    Copies are dropped only if this does not free enough.
    """
    mover, outbox = Mock(lacks_mappings=False), deque[Any]()
    mover.host = SimpleNamespace(
        limit=MemoryLimit(100, 1600), taken=120 - left_bytes, left=left_bytes, promised=0, ahead=0
    )
    hosts = {key: Mock(kept=True, copied={key: 50}, is_read_ahead=False) for key in ("old", "new")}
    entries = {
        key: SimpleNamespace(name=key, ending=False, weights="absent", model=Mock(key=key, host=host))
        for key, host in hosts.items()
    }
    catalog: Any = SimpleNamespace(
        entries=entries, get=lambda key: entries[key].model, policy=Mock(), moves=set(), touched=set()
    )
    catalog.policy.settings.idle_limits.return_value.host = inf
    scheduler: Any = SimpleNamespace(idle_since={"old": 1.0, "new": 2.0}.get, on_disk=lambda key: False)
    copies = HostCopies(catalog, scheduler, outbox)
    copies.begin(mover)

    copies.measure(10.0, 0)
    copies.measured(HostMemoryMeasured(1000, 10.0), 10.0)

    assert [call.args for call in mover.forget_left.call_args_list] == ([(20,)] if left_bytes else [])
    assert [host for (dropped_hosts,), _ in mover.drop_copies.call_args_list for host in dropped_hosts] == [
        hosts[key] for key in dropped
    ]


def test_a_measurement_before_a_model_is_closed_is_outdated() -> None:
    """A measurement is outdated while the memory of an unloaded model is not free, and if it is older than that memory."""
    messages: queue.SimpleQueue[ModelClosed] = queue.SimpleQueue()
    mover = WeightMover(Mock(), Mock(), Mock(post=messages.put), Mock())
    assert not mover.is_outdated(0.0)

    before = time.monotonic()
    mover.close(Mock())
    assert mover.is_outdated(inf)
    mover.closed(messages.get(timeout=60))

    assert mover.is_outdated(before)
    assert not mover.is_outdated(time.monotonic())


some_copies = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 2.0, inf]),
        st.dictionaries(st.sampled_from("tuvwx"), st.just(0), max_size=3),
    ),
    max_size=6,
)
_SIZES = {"t": 0, "u": 1, "v": 2, "w": 3, "x": 5}


@given(some=some_copies, excess=st.integers(-2, 14), before=st.sampled_from([0.5, 1.5, inf]))
def test_any_choice_frees_enough_or_all_that_may_leave(
    some: list[tuple[float, dict[str, int]]], excess: int, before: float
) -> None:
    """The choice frees enough memory, or contains all copies that may be dropped.

    It contains no copy that was used at or after `before`, and no copy whose drop is not needed.
    """
    copies = [
        HostCopy(str(index), {tensor: _SIZES[tensor] for tensor in tensors}, used)
        for index, (used, tensors) in enumerate(some)
    ]

    def freed(leaving: list[str]) -> int:
        stays = {
            tensor for host_copy in copies if host_copy.model not in leaving for tensor in host_copy.tensors
        }
        every = {tensor: size for host_copy in copies for tensor, size in host_copy.tensors.items()}
        return sum(size for tensor, size in every.items() if tensor not in stays)

    able = [host_copy.model for host_copy in copies if host_copy.used < before]

    chosen, lacking = choose_copies(copies, excess, before)

    assert set(chosen) <= set(able)
    assert len(set(chosen)) == len(chosen)
    assert lacking == max(0, excess - freed(chosen))
    assert not lacking or freed(chosen) == freed(able)
    for model in chosen:
        assert freed([other_model for other_model in chosen if other_model != model]) < min(
            freed(chosen), max(excess, 1)
        )


def warm(key: str, since: float, *executables: int) -> WarmModel:
    return WarmModel(key, key, since, inf, 0.0, frozenset(executables))


def chosen(models: list[WarmModel], most: int, *busy: int) -> list[str]:
    """Return the chosen models. `busy` has the executables of models that may not fall back."""
    users = Counter([*busy, *(executable for model in models for executable in model.executables)])
    return [model.key for model in choose_cold(models, users, most)]


def test_the_least_recently_used_fall_back_first() -> None:
    """The least recently used models fall back first, and no more than requested."""
    models = [warm("new", 3.0, 1), warm("old", 1.0, 2), warm("middle", 2.0, 3)]

    assert chosen(models, 1) == ["old"]
    assert chosen(models, 2) == ["old", "middle"]
    assert chosen([], 2) == []


def test_a_model_whose_executables_others_need_stays() -> None:
    """A model stays warm if busy models use its executables, because falling back would free almost nothing.

    When all models with these executables are idle, all fall back.
    """
    family = [warm("a", 1.0, 7), warm("b", 2.0, 7)]

    assert chosen([*family, warm("own", 3.0, 8)], 1, 7) == ["own"]
    assert chosen([*family, warm("own", 3.0, 8)], 2) == ["a", "b"]
    # If no choice frees an executable, a model falls back nevertheless.
    assert chosen(family, 1, 7) == ["a"]


some_models = st.lists(st.tuples(st.integers(0, 5), st.frozensets(st.integers(0, 4), max_size=3)), max_size=8)


@given(some=some_models, busy=st.lists(st.integers(0, 4), max_size=3), most=st.integers(1, 8))
def test_any_choice_frees_memory_if_it_can(
    some: list[tuple[int, frozenset[int]]], busy: list[int], most: int
) -> None:
    """The choice has at most `most` models, none twice, and is empty only if there is no idle model."""
    models = [warm(str(index), since, *executables) for index, (since, executables) in enumerate(some)]

    keys = chosen(models, most, *busy)

    assert len(set(keys)) == len(keys) <= most
    assert bool(keys) == bool(models)
    if most >= len(models):
        stay = {
            executable for model in models if model.key not in keys for executable in model.executables
        } | set(busy)
        able = {executable for model in models for executable in model.executables} - set(busy)
        assert not able & stay


# --- the store --------------------------------------------------------------------------------------------


def test_a_model_beyond_the_limit_is_opened_without_a_copy(tmp_path: Path) -> None:
    """If a model's copy would exceed the limit, the model is opened without a copy, and reads tensors from the file.

    It gets a copy later, when another copy was dropped.
    """
    store = HostStore(HostMemory(), limit=MemoryLimit(large(1).nbytes, 0))
    first = store.open(bundle_of(tmp_path, {"a": large(1)}, "first"), keep=True)
    second = store.open(bundle_of(tmp_path, {"a": large(2)}, "second"), keep=True)

    assert (first.kept, second.kept) == (True, False)
    assert (second.read(0) == 2).all()
    second.keep()
    assert store.counts.logical == large(1).nbytes
    first.drop()
    second.keep()
    assert (second.read(0) == 2).all()
    assert store.counts.physical == large(1).nbytes
    check_counts(store)


def test_a_copy_of_shared_tensors_needs_little_room(tmp_path: Path) -> None:
    """A copy needs room only for tensors that no other copy has."""
    store = HostStore(HostMemory(), limit=MemoryLimit(large(1).nbytes + 2 * small(1).nbytes, 0))
    store.open(bundle_of(tmp_path, {"a": large(1), "b": small(1)}, "first"), keep=True)
    second = store.open(bundle_of(tmp_path, {"a": large(1), "b": small(2)}, "second"), keep=True)

    assert second.missing_bytes == small(2).nbytes
    second.keep()

    assert second.kept
    check_counts(store)


def test_memory_that_others_take_counts_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of other processes is subtracted from the free memory before a copy is made.

    Otherwise the kernel might kill this process.
    """
    monkeypatch.setattr(host_weights, "spare_memory", lambda: 100 + large(1).nbytes)
    store = HostStore(HostMemory(), limit=MemoryLimit(GIB, 16 * 101))

    assert not store.open(bundle_of(tmp_path, {"a": large(1)}, "first"), keep=True).kept


def test_memory_for_weights_on_a_cpu_is_not_for_copies(
    start_runtime: StartRuntime, doublings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, weights get an eighth of a small host's memory. Copies may not use this memory, even if it is free."""
    limit = MemoryLimit(GIB, 16 * _BYTES)
    monkeypatch.setattr("rsrv.runtime.model_builder.memory_limit", lambda setting: limit)
    monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}"))
    engines = [make_engine(runtime, doublings[name], name=name) for name in "abc"]
    for engine in engines:
        answered(send_one(engine))

    assert read_status(os.getpid())["memory"]["budget_bytes"] == 2 * _BYTES
    host = runtime.loop._weights.mover.host  # type: ignore[union-attr]
    wait_until(lambda: host.promised == 0)
    command(os.getpid(), {"command": "evict"})
    wait_until(lambda: host.promised == 2 * _BYTES)
    monkeypatch.setattr(host_weights, "spare_memory", lambda: 5 * _BYTES)
    assert not host._reserve(2 * _BYTES)
    assert host._reserve(_BYTES)


def test_weights_that_are_being_read_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are being read count once, from the beginning of the read: neither twice nor too late."""
    arrays = {name: large(index) for index, name in enumerate("abc")}
    store = HostStore(HostMemory(), limit=MemoryLimit(GIB, 0))
    weights = store.open(bundle_of(tmp_path, arrays, "bundle"), keep=False)
    taken = list[int]()
    real = WeightsFile.read_into

    def read(file: WeightsFile, index: int, out: Bytes, *, digest: str | None = None) -> None:
        taken.append(store.taken)
        real(file, index, out, digest=digest)

    monkeypatch.setattr(WeightsFile, "read_into", read)
    weights.keep()
    store.open(bundle_of(tmp_path, {"d": large(4), "e": large(5)}, "more"), keep=True)

    assert taken == [3 * large(0).nbytes] * 3 + [5 * large(0).nbytes] * 2
    assert store.taken == 5 * large(0).nbytes


@pytest.mark.parametrize("room", [True, False])
def test_weights_that_are_read_ahead_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """A load does not read weights again that were read ahead. Until the load ends, they count as host memory.

    Without memory for them, the file is read ahead only into the kernel's cache.
    """
    read, real = list[int](), WeightsFile.read_into

    def noted(file: WeightsFile, index: int, out: Bytes, *, digest: str | None = None) -> None:
        read.append(index)
        real(file, index, out, digest=digest)

    size = large(0).nbytes
    store = HostStore(HostMemory(), limit=MemoryLimit(2 * size if room else size, 0))
    other = store.open(bundle_of(tmp_path, {"a": large(1)}, "other"), keep=True)
    weights = store.open(bundle_of(tmp_path, {"a": large(1), "b": large(2)}, "one"), keep=False)
    monkeypatch.setattr(WeightsFile, "read_into", noted)
    weights.read_ahead([0, 1], lambda: False)

    assert read == [1]
    assert store.taken == (2 * size if room else size)
    # The load also finds the tensors that another model had when they were read ahead.
    other.drop()
    assert [(weights.read(index) == index + 1).all() for index in (0, 1)] == [True, True]
    assert read == ([1] if room else [1, 1])
    weights.end_read_ahead()()
    assert (store.taken, weights.is_read_ahead) == (0, False)


def test_the_weights_of_two_models_are_kept_between_read_and_load(tmp_path: Path) -> None:
    """Weights of at most two models may be in memory between their read and their load.

    The limit exists because these weights take the memory of host copies.
    """
    store = HostStore(HostMemory(), limit=MemoryLimit(GIB, 0))
    several = [
        store.open(
            bundle_of(tmp_path, {"a": large(n)}, f"m{n}"),
            keep=False,
        )
        for n in range(4)
    ]
    for weights in several:
        weights.read_ahead([0], lambda: False)

    assert store.taken == 2 * large(0).nbytes
    several[0].end_read_ahead()()
    several[3].read_ahead([0], lambda: False)
    assert several[3].is_read_ahead
    for weights in several:
        weights.end_read_ahead()()
    assert (store.taken, store.ahead) == (0, 0)


def test_a_read_ahead_that_is_abandoned_or_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read ahead that is abandoned between two tensors, or that fails, frees what it has read."""
    store = HostStore(HostMemory(), limit=MemoryLimit(GIB, 0))
    weights = store.open(bundle_of(tmp_path, {"a": large(1), "b": large(2)}, "one"), keep=False)
    answers = iter([False, True])
    with pytest.raises(Abandoned):
        weights.read_ahead([0, 1], lambda: next(answers))
    assert (store.taken, weights.is_read_ahead) == (0, False)

    def fail(file: WeightsFile, *args: object) -> bool:
        raise BundleError("weights.safetensors: cannot be read")

    monkeypatch.setattr(WeightsFile, "_fill", fail)
    with pytest.raises(BundleError):
        weights.read_ahead([0, 1], lambda: False)
    assert (store.taken, weights.is_read_ahead) == (0, False)


def test_a_store_that_closes_during_a_read_ahead_ends_it(tmp_path: Path) -> None:
    """If the store closes between a read ahead and the load, the weights that were read are freed."""
    store = HostStore(HostMemory(), limit=MemoryLimit(GIB, 0))
    store.open(bundle_of(tmp_path, {"a": large(1)}, "other"), keep=True)
    weights = store.open(bundle_of(tmp_path, {"a": large(1), "b": large(2)}, "one"), keep=False)
    weights.read_ahead([0, 1], lambda: False)

    store.close()

    assert (store.counts.physical, weights.is_read_ahead) == (0, False)


# --- a runtime --------------------------------------------------------------------------------------------


class House:
    """A runtime whose models have one weight of 12 bytes each."""

    def __init__(self, start: StartRuntime, bundles: dict[str, Path], more: str) -> None:
        self.runtime: Runtime = start(load_settings(f"stub: {{in_place_ms: 0}}\nruntime: {{{more}}}"))
        self.bundles = dict(bundles)
        self.engines: dict[str, Engine] = {}

    def serve(self, *names: str) -> None:
        for name in names:
            self.engines[name] = make_engine(self.runtime, self.bundles[name], name=name)

    def ask(self, name: str) -> float:
        return answered(send_one(self.engines[name]))

    def kept(self) -> set[str]:
        return {model.name for model in self.runtime.loop._catalog.models() if model.host.kept}

    def status(self) -> dict[str, Any]:
        return read_status(os.getpid())

    def spread(self, *names: str) -> None:
        """Wait until these models, and no others, have copies."""
        wait_until(lambda: self.kept() == set(names))


@pytest.fixture
def house(start_runtime: StartRuntime, doublings: dict[str, Path], request: pytest.FixtureRequest) -> House:
    return House(start_runtime, doublings, request.param)


two_copies = pytest.mark.parametrize(
    "house", [f"host_memory_bytes: {2 * _BYTES}, weight_budget_bytes: {_BYTES}"], indirect=True
)


@two_copies
def test_a_model_that_is_loaded_takes_the_place_of_the_least_recently_used(house: House) -> None:
    """A loaded model gets a host copy in place of the least recently used one.

    All requests are answered, with a copy or without.
    """
    house.serve("a", "b")
    house.spread("a", "b")
    house.serve("c")
    house.spread("b", "c")

    for name, answer, copied in (("a", 1, "ca"), ("b", 2, "ab"), ("c", 3, "bc"), ("a", 1, "ca")):
        assert house.ask(name) == answer
        house.spread(*copied)
    status = house.status()
    assert (status["host"]["physical_bytes"], status["host_limit_bytes"]) == (2 * _BYTES, 2 * _BYTES)


@pytest.mark.parametrize("house", ["idle: {host: 1}"], indirect=True)
def test_an_idle_copy_leaves_and_comes_back_with_the_next_load(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of an idle model is dropped. The next load reads the file again."""
    monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
    house.serve("a")
    command(os.getpid(), {"command": "evict", "model": "a"})
    house.spread()
    assert house.status()["models"]["a"]["weights_state"] == "on disk"

    assert house.ask("a") == 1


@pytest.mark.parametrize("house", ["weight_budget_bytes: 12"], indirect=True)
def test_copies_leave_when_memory_is_scarce_and_come_back_later(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies are dropped while memory is scarce, and made again later. Requests are answered all the time."""
    monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
    house.serve("a", "b")
    house.spread("a", "b")

    for module in (weight_mover, host_weights):
        monkeypatch.setattr(module, "spare_memory", lambda: 0)
    house.spread()
    assert [house.ask(name) for name in "aba"] == [1, 2, 1]
    assert house.kept() == set()

    for module in (weight_mover, host_weights):
        monkeypatch.setattr(module, "spare_memory", lambda: 1 << 60)
    assert [house.ask(name) for name in "bab"] == [2, 1, 2]
    house.spread("a", "b")


@pytest.mark.parametrize("house", ["host_memory_bytes: 0, weight_budget_bytes: 12"], indirect=True)
@pytest.mark.parametrize("fault", ["removed", "cut", "overwritten"])
def test_a_file_that_changed_fails_its_own_requests_only(house: House, tmp_path: Path, fault: str) -> None:
    """Weights that changed on the disk cannot be loaded: their clients get the reason, and other models are served."""
    mine = tmp_path / "mine"
    shutil.copytree(house.bundles["a"], mine)
    house.bundles["a"] = mine
    house.serve("a", "b")
    assert house.ask("b") == 2
    weights = mine / "weights.safetensors"
    if fault == "cut":
        os.truncate(weights, weights.stat().st_size - 4)
    elif fault == "overwritten":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        os.utime(weights, ns=(1, 1))
    else:
        weights.unlink()

    for _ in range(2):
        if fault == "removed":
            # The file is still open, so its content exists until the model leaves.
            assert house.ask("a") == 1
        else:
            text = "could not be loaded: weights.safetensors: was written to since the model was loaded"
            assert refused(answer_of(send_one(house.engines["a"])), FakeError.INTERNAL, text)
        assert house.ask("b") == 2


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Yield a gate. While it is clear, every read of a weights file waits at it."""
    gate, real = Gate(), WeightsFile.read_into

    def read(file: WeightsFile, index: int, out: Bytes, *, digest: str | None = None) -> None:
        gate.enter()
        real(file, index, out, digest=digest)

    monkeypatch.setattr(WeightsFile, "read_into", read)
    yield gate
    gate.set()


three_models = pytest.mark.parametrize("house", [f"weight_budget_bytes: {3 * _BYTES}"], indirect=True)


def stall(house: House, disk: Gate) -> Any:
    """Send a request for `a`, and stall the disk while it reads the weights of `a`.

    Return the request. `b` has a host copy only.
    """
    house.serve("a", "b", "c")
    set_residency(house.runtime, "a", "unpinned")
    # Otherwise the read would find the old tensors, which are not freed yet.
    wait_until(lambda: house.status()["host"]["tensors"] == 2)
    for name in "ab":
        command(os.getpid(), {"command": "evict", "model": name})
    disk.clear()
    slow = send_one(house.engines["a"])
    disk.wait_until_held()
    return slow


@three_models
def test_a_disk_that_stalls_delays_no_load_from_host_memory(house: House, disk: Gate) -> None:
    """While the disk stalls, models with host copies are loaded and answered, and copies are dropped."""
    slow = stall(house, disk)

    assert (
        life("ready", house.status()["models"]["a"]["weights_state"]) == "warm, reading its weights from disk"
    )
    assert [house.ask(name) for name in "bcb"] == [2, 3, 2]
    set_residency(house.runtime, "c", "device")
    wait_until(lambda: house.status()["models"]["c"]["weights"] == "resident")
    disk.set()

    assert answered(slow) == 1


@three_models
def test_weights_that_were_read_for_a_load_leave_host_memory_with_it(house: House, disk: Gate) -> None:
    """The weights of an unpinned model take host memory only from their read to the end of their load."""
    slow = stall(house, disk)
    host = house.runtime.loop._weights.mover
    assert host is not None
    wait_until(lambda: host.host.taken == 3 * _BYTES)
    disk.set()

    assert answered(slow) == 1
    wait_until(lambda: host.host.taken == 2 * _BYTES)
    assert house.kept() == {"b", "c"}


@three_models
def test_a_model_that_leaves_while_its_weights_are_read_is_gone_after_that(house: House, disk: Gate) -> None:
    """If a model is unloaded while its weights are read, its requests end at once.

    Later reads wait until this read has ended.
    """
    slow = stall(house, disk)
    house.engines.pop("a").close()
    wait_until(lambda: house.status()["models"].get("a", {}).get("state") != "ready")
    assert house.ask("b") == 2
    disk.set()

    wait_until(lambda: "a" not in house.status()["models"])
    assert answer_of(slow).error is not None
    house.serve("a")
    assert house.ask("a") == 1


@three_models
def test_a_read_that_fails_fails_its_own_requests(
    house: House, disk: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a read fails, its client gets the reason, and the model is not loaded for a while. Others are served."""
    monkeypatch.setattr("rsrv.scheduler.weights._FIRST_BACKOFF_S", 60.0)
    slow = stall(house, disk)

    def fail(file: WeightsFile, *args: Any) -> bool:
        raise BundleError("weights.safetensors: cannot be read: Input/output error")

    monkeypatch.setattr(WeightsFile, "_fill", fail)
    disk.set()

    why = "could not be loaded: weights.safetensors: cannot be read: Input/output error"
    assert refused(answer_of(slow), FakeError.INTERNAL, why)
    assert house.status()["models"]["a"]["weights_state"] == "backoff"
    assert house.ask("b") == 2


@three_models
def test_weights_that_no_request_needs_any_more_do_not_stay_read(
    house: House, disk: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a request is cancelled while the weights for it are read, the next check of host memory frees these weights."""
    monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
    slow = stall(house, disk)
    slow.cancelled = True
    wait_until(lambda: house.status()["models"]["a"]["queued"] == 0)
    disk.set()

    mover = house.runtime.loop._weights.mover
    assert mover is not None
    wait_until(lambda: house.status()["models"]["a"]["weights_state"] == "on disk")
    wait_until(lambda: mover.host.taken == 2 * _BYTES)
    assert house.ask("a") == 1


@two_copies
def test_the_loop_does_not_read_the_kernels_figures(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop thread does not read the kernel's memory statistics.

    Reading them takes milliseconds, in which requests would wait.
    """
    threads = set[str]()

    def spare() -> int:
        threads.add(threading.current_thread().name)
        return 1 << 60

    for module in (weight_mover, host_weights):
        monkeypatch.setattr(module, "spare_memory", spare)
    monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
    house.serve("a", "b", "c")
    house.spread("b", "c")

    wait_until(lambda: threads == {"build", "host copies", "host memory"})
