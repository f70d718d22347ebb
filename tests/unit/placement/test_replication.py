"""Automatic replicas: a hot model gets more devices within seconds, keeps them for a while, and displaces no other model."""

from __future__ import annotations

import pytest

from rsrv.placement.contract import WeightsView
from rsrv.placement.replication import COOL_S
from tests.unit.placement.fleet import ROUND_S, Fleet, Model, homes
from tests.unit.placement.test_fleet_over_time import Gateway, play


def hot(rate: float = 150.0, **changes: object) -> tuple[Fleet, Gateway]:
    """Return a fleet of two devices and its gateway, after their start.

    One model needs more than one device, and one is quiet.
    """
    models = {"hot": Model(rate=0.0), "quiet": Model(rate=1.0)}
    fleet = Fleet(["0", "1"], models, load_s=0.5)
    gateway = Gateway(fleet, replicas="auto", **changes)
    play(fleet, [gateway], 5.0)
    fleet.models["hot"].rate = rate
    return fleet, gateway


def test_a_hot_model_has_both_devices_within_two_seconds() -> None:
    """If a model's demand exceeds one device, it gets the second one within two seconds, even if both were idle before."""
    fleet, gateway = hot()
    play(fleet, [gateway], 2.0)
    gateway.plan()

    assert homes(gateway.table)["hot"] == ("0", "1")
    assert len(homes(gateway.table)["quiet"]) == 1


def test_a_server_with_several_devices_does_the_work_of_several() -> None:
    """A model that needs more than one device stays on its server, which has eight devices."""
    fleet, gateway = hot()
    for server in fleet.servers.values():
        server.devices = 8
    play(fleet, [gateway], 2.0)
    gateway.plan()

    assert len(homes(gateway.table)["hot"]) == 1


def test_demand_that_varies_moves_nothing() -> None:
    """If a model is hot for one second in every ten, it keeps its replicas."""
    fleet, gateway = hot()
    play(fleet, [gateway], 5.0)
    gateway.changes.clear()
    for _ in range(30):
        fleet.models["hot"].rate = 5.0
        play(fleet, [gateway], 9.0)
        fleet.models["hot"].rate = 120.0
        play(fleet, [gateway], 1.0)

    assert homes(gateway.table)["hot"] == ("0", "1")
    assert gateway.changes["hot"] == 0


def test_replicas_that_are_not_needed_go_after_a_while() -> None:
    """After a model has been quiet for a minute, it has one device, and the other one frees its weights."""
    fleet, gateway = hot()
    play(fleet, [gateway], 5.0)
    fleet.models["hot"].rate = 5.0
    play(fleet, [gateway], COOL_S)
    assert homes(gateway.table)["hot"] == ("0", "1")
    play(fleet, [gateway], 10.0)

    home = homes(gateway.table)["hot"]
    assert len(home) == 1
    assert {worker for worker in fleet.servers if "hot" in fleet.resident(worker)} == set(home)


def test_a_replica_displaces_no_model() -> None:
    """If there is no room for a second copy of its weights, a hot model stays on its device."""
    models = {"hot": Model(bytes=10), "big": Model(bytes=15, rate=1.0)}
    fleet = Fleet(["0", "1"], models, budget=20, load_s=0.5)
    gateway = Gateway(fleet, replicas="auto")
    play(fleet, [gateway], 5.0)
    fleet.models["hot"].rate = 150.0
    fleet.misses.clear()
    play(fleet, [gateway], 60.0)

    assert len(homes(gateway.table)["hot"]) == 1
    assert fleet.misses == []


def test_two_hot_models_keep_a_device_each() -> None:
    """If each of two models needs a whole device, neither gets the other one's device."""
    fleet = Fleet(["0", "1"], {"a": Model(), "b": Model()}, load_s=0.5)
    gateway = Gateway(fleet, replicas="auto")
    play(fleet, [gateway], 5.0)
    for model in fleet.models.values():
        model.rate = 110.0
    play(fleet, [gateway], 30.0)

    assert sorted(homes(gateway.table).values()) == [("0",), ("1",)]


def test_more_replicas_are_kept_when_all_models_are_packed_again() -> None:
    """A repack keeps the replicas of a hot model, and gives them up only if they do not fit."""
    fleet, gateway = hot()
    play(fleet, [gateway], 5.0)
    gateway.planner.repack()
    play(fleet, [gateway], 3.0)
    assert homes(gateway.table)["hot"] == ("0", "1")

    for server in fleet.servers.values():
        server.budget = 12
    gateway.planner.repack()
    play(fleet, [gateway], 2.0)
    assert sorted(homes(gateway.table).values()) == [("0",), ("1",)]


@pytest.mark.parametrize("devices", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 8))])
def test_replicas_stay_within_the_devices(devices: int) -> None:
    """A model with more demand than all devices can serve gets one replica on each device.

    It gets requests only where it is warm.
    """
    fleet = Fleet([str(n) for n in range(devices)], {"hot": Model(rate=10_000.0)}, load_s=0.5)
    gateway = Gateway(fleet, replicas="auto")
    for _ in range(round(20.0 / ROUND_S)):
        gateway.plan()
        fleet.run([gateway.router])
        if len(home := homes(gateway.table)["hot"]) > 1:
            assert all(fleet.copy(worker, "hot").weights is WeightsView.RESIDENT for worker in home)

    assert len(homes(gateway.table)["hot"]) == devices
