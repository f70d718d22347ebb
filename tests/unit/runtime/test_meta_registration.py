"""Meta models are loaded and unloaded with their callees, in any order."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.stub.connection import Rejected
from rsrv.wire.calls import Call, Entrance, Spot, Where, pack_entrances
from tests.builders import broken_bundle, write_meta
from tests.fakes import FakeRequest
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime
from tests.unit.runtime.metas import ask, meta_engine, rows
from tests.waiting import PATIENCE_S, wait_until

CHAIN = """
    def run(inputs, call):
        return {"y": call("b", {"x": call("a", inputs)["y"]})["y"]}
"""


def register(runtime: Runtime, meta: Path, calls: Mapping[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = runtime.connect().register(
        {
            "model": meta.name,
            "bundle": str(meta),
            "calls": {k: v if v is None else str(v) for k, v in calls.items()},
        }
    )
    return body


def models() -> dict[str, Any]:
    entries: dict[str, Any] = read_status(os.getpid())["models"]
    return entries


@pytest.mark.parametrize("bad", ["a", "b", "ab"])
def test_a_meta_model_with_a_broken_callee_is_refused_and_others_keep_theirs(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, bad: str
) -> None:
    """If a callee is broken, all stubs of its meta model get the reason.

    The other callees are unloaded, unless another meta model calls them.
    """
    both = write_meta(tmp_path / "both", CHAIN, ["a", "b"])
    other = write_meta(tmp_path / "other", CHAIN, ["b", "c"])
    calls = {n: broken_bundle(tmp_path / n, doublings[n]) if n in bad else doublings[n] for n in "ab"}
    with meta_engine(runtime, other, {n: doublings[n] for n in "bc"}):
        reasons: list[str] = []

        def try_it() -> None:
            with pytest.raises(Rejected) as caught:
                register(runtime, both, calls)
            reasons.append(str(caught.value))

        threads = [threading.Thread(target=try_it) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(reasons) == 3
        # If both are broken, either may fail first.
        named = [f"model '{name}', which it calls" for name in bad]
        assert all(any(name in reason for name in named) for reason in reasons), reasons
        wait_until(lambda: models().keys() == {"b", "c"})
        assert read_status(os.getpid())["metas"].keys() == {"other"}
    wait_until(lambda: not models())


def test_a_stub_that_leaves_while_its_callees_are_built_leaves_nothing(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """If a stub leaves while its callees are built, the callees are dropped, except a callee that another stub needs."""
    meta = write_meta(tmp_path / "meta", CHAIN, ["a", "b"])
    other = write_meta(tmp_path / "other", CHAIN, ["b"])
    runtime.device.compiles.clear()
    calls = {name: str(doublings[name]) for name in "ab"}
    greeted = runtime.request_model(model="meta", bundle=str(meta), calls=calls)
    runtime.device.compiles.wait_until_held()
    assert read_status(os.getpid())["metas"]["meta"]["models"] == ["a", "b"]
    waiting = threading.Thread(target=register, args=[runtime, other, {"b": doublings["b"]}])
    waiting.start()

    greeted.sock.close()
    wait_until(lambda: not read_status(os.getpid())["metas"])
    runtime.device.compiles.set()

    waiting.join(PATIENCE_S)
    wait_until(lambda: models().keys() == {"b"})
    runtime.users.close()
    wait_until(lambda: not models())


def test_a_meta_model_that_comes_back_while_its_callees_leave_is_served(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """A meta model registers again while its callees drain. They are built again, and the meta model is served."""
    meta = write_meta(tmp_path / "meta", CHAIN, ["a", "b"])
    calls = {name: doublings[name] for name in "ab"}
    runtime.device.seconds = 0.01  # The device's thread executes.
    lane = runtime.connect()
    lane.register({"model": "meta", "bundle": str(meta), "calls": {n: str(p) for n, p in calls.items()}})
    memory = lane.array((1, 3), np.dtype(np.float32))
    place = lane.locate(memory)
    assert place is not None
    spot = Spot(Where.MEMORY, *place)
    runtime.device.gate.clear()
    lane.submit([Entrance(0, 7, 0, 0)], pack_entrances)
    lane.call([Call(1, 7, 0, 0, 1, [spot], [spot])], [])
    runtime.device.gate.wait_until_held()
    lane.close()
    wait_until(lambda: not read_status(os.getpid())["metas"])

    coming = threading.Thread(target=register, args=[runtime, meta, calls])
    coming.start()
    coming.join(0.2)
    assert coming.is_alive()
    runtime.device.gate.set()
    coming.join(PATIENCE_S)

    assert not coming.is_alive()
    with meta_engine(runtime, meta, calls) as engine:
        (answer,) = ask(engine, FakeRequest({"x": rows(1, 5)}))
        np.testing.assert_array_equal(answer.arrays["y"], rows(1, 24))


@pytest.mark.parametrize(
    "calls", [{"a": None, "b": None}, {"a": "", "b": "\0"}, {"a": "/nowhere"}, {"c": "/"}, {}]
)
def test_callees_that_make_no_sense_are_refused_with_a_reason(
    runtime: Runtime, tmp_path: Path, calls: dict[str, Any]
) -> None:
    """Invalid callees are rejected with a reason."""
    meta = write_meta(tmp_path / "meta", CHAIN, ["a", "b"])
    with pytest.raises(Rejected):
        register(runtime, meta, calls)
