"""Models are placed on devices, and requests are sent to servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rsrv.placement.contract import Act, ModelView, Routes, WeightAction, WeightsView, WorkerView
from rsrv.placement.devices import ServerDevice, as_one, devices_of, routes_to_servers, taken_over
from tests.unit.control.virtual import run
from tests.unit.gateway.worlds import World

MODELS = ("m", "n")


def device(number: int, *, alive: bool = True, **models: float) -> WorkerView:
    """Return the view of a device with room for one model. `models` has the seconds that each resident model has executed."""
    views = {
        name: ModelView(
            100,
            WeightsView.RESIDENT if name in models else WeightsView.ABSENT,
            item_s=0.01,
            device_seconds=models.get(name, 0.0),
        )
        for name in MODELS
    }
    return WorkerView(
        alive, frozenset(MODELS), f"runtime {number}", budget_bytes=100, models=views, device=number
    )


def test_a_server_is_named_once_for_all_its_devices() -> None:
    """The proxy sends requests to a server, and the server chooses one of its devices."""
    places = devices_of({"one": (device(0),), "two": (device(0), device(1))})
    assert places == {
        "one": ServerDevice("one", None),
        "two/0": ServerDevice("two", 0),
        "two/1": ServerDevice("two", 1),
    }
    table = {"m": Routes(("one", "two/0", "two/1"), ("two/0", "two/1"), quantum=3), "n": Routes(())}
    assert routes_to_servers(table, places) == {
        "m": Routes(("one", "two", "two"), ("two",), quantum=3),
        "n": Routes(()),
    }
    alone = {"m": Routes(("one",), ("one",))}
    assert routes_to_servers(alone, devices_of({"one": (device(0),)})) is alone


def test_a_server_counts_by_its_replicas_and_devices() -> None:
    """A server with two of three replicas gets two thirds of the requests.

    If all servers have equally many replicas, the table names each server once.
    """
    places = devices_of({"one": (device(0),), "two": (device(0), device(1))})
    table = {"m": Routes(("one", "two/0", "two/1"), ("one", "two/0", "two/1"))}
    assert routes_to_servers(table, places)["m"].placed == ("one", "two", "two")
    itself = replace(device(0), devices=2)
    places = devices_of({"one": (itself,), "two": (device(0), device(1))})
    table = {"m": Routes(("one", "two/0", "two/1"), ("one", "two/1"))}
    assert routes_to_servers(table, places)["m"] == Routes(("one", "two"), ("one", "one", "two"))


def test_a_server_without_its_control_service_keeps_its_size() -> None:
    """Servers that place models themselves get requests in proportion to their number of devices.

    This holds even while a server does not report this number.
    """
    eight = replace(device(0), devices=8)
    silent = (WorkerView(True, eight.ready),)
    places = devices_of({"one": (eight,), "two": taken_over((eight,), silent)})
    assert routes_to_servers({"m": Routes(("one", "two"))}, places)["m"].ready == ("one", "two")


@given(st.data())
def test_what_has_not_changed_is_not_summed_again(drawn: st.DataObject) -> None:
    """A server's view that is updated step by step equals a new sum of its devices. An unchanged server keeps the same object."""
    names = st.dictionaries(st.sampled_from("abcd"), st.floats(0, 9), max_size=4)
    views = [device(number) for number in range(3)]
    last: tuple[tuple[WorkerView, ...], WorkerView] | None = None
    for _ in range(5):
        number = drawn.draw(st.integers(0, 2))
        changed = {
            name: ModelView(1, WeightsView.ABSENT, queued=int(n)) for name, n in drawn.draw(names).items()
        }
        views[number] = replace(views[number], alive=drawn.draw(st.booleans()), models=changed)
        now = tuple(views)
        merged = as_one(now, last)
        assert merged == as_one(now)
        last = now, merged
        if sum(view.alive for view in views) > 0:
            assert as_one(tuple(views), last).models is merged.models


def test_models_are_packed_onto_the_devices_of_all_servers() -> None:
    """Two models that each fill a device are placed on one server with two devices. A step names the device."""

    async def main() -> None:
        world = World({"mode": "lpt_packing"}, a=(device(0, m=1.0), device(1, n=1.0)))
        async with world.running():
            status = await world.gateway.status()
            assert status is not None
            assert {model.name: model.placed for model in status.models} == {
                "m": ("a:8001/0",),
                "n": ("a:8001/1",),
            }
            table = world.gateway.table
            assert {name: routes.placed for name, routes in table.items()} == {
                "m": ("a:8001",),
                "n": ("a:8001",),
            }
            await asyncio.sleep(0.1)
            assert world.placements == [("a:8001", {"m": (0,), "n": (1,)})]
            world.planner.steps = (WeightAction(Act.PREFETCH, "a:8001/1", "m"),)
            await world.gateway.round()
            await asyncio.sleep(0.1)
            assert world.acts == ["a:8001/1 prefetch m"]

    run(main())


def test_a_device_that_is_lost_leaves_its_models_to_another_server() -> None:
    """If a device loses its runtime, its models move to another server. The server's other device keeps its models."""

    async def main() -> None:
        world = World({"mode": "lpt_packing"}, a=(device(0, m=1.0), device(1, n=1.0)), b=(device(0),))
        async with world.running():
            assert world.gateway.table["n"].placed == ("a:8001",)
            world.ready["a"] = (device(0, m=1.0), device(1, alive=False))
            await world.gateway.refresh(sure=True)
            placed = {name: routes.placed for name, routes in world.gateway.table.items()}
            assert placed == {"m": ("a:8001",), "n": ("b:8001",)}
            assert world.gateway.ready

    run(main())
