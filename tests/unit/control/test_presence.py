"""`Presence`: which models serve, are cold or are expected to return, and which stubs are dead.

It is computed from the events of runtimes and from polls of the stubs' processes.
"""

from typing import Any

from rsrv.control.presence import Presence, StubPoll
from tests.unit.control.peers import entry


def up(*models: str, devices: int = 1) -> Presence:
    """Return the presence of a server whose first runtime has these models. All models are ready."""
    presence = Presence(devices)
    first = presence.devices[0]
    first.begin({f"{name}@1": entry(name) for name in models}, 0.0)
    first.come_up()
    return presence


def change(presence: Presence, name: str, device: int = 0, **differs: Any) -> None:
    presence.devices[device].follow(f"{name}@1", entry(name, **differs), 0.0)


def dead(presence: Presence, names: set[str], now: float) -> frozenset[str]:
    return presence.see(StubPoll(without_process=names), now)[1]


# --- models that serve ----------------------------------------------------------------------------------------


def test_a_model_serves_with_any_ready_version() -> None:
    """A model serves if any version is ready, even without its stub, and even if a new version loads or fails."""
    presence = up("a")
    presence.devices[0].follow("a@2", entry("a", state="loading"), 0.0)
    presence.devices[0].follow("a@2", entry("a", state="failed", error="why", stubs=[]), 0.0)
    presence.devices[0].follow("a@1", entry("a", stubs=[]), 0.0)
    assert presence.serving == {"a"}
    presence.devices[0].follow("a@1", None, 0.0)
    assert (presence.serving, presence.lost) == (set(), {"a"})


def test_the_stub_of_any_version_counts() -> None:
    """A model is attached if any of its versions has a stub. A failed model without a stub is not attached."""
    presence = up()
    presence.devices[0].begin(
        {
            "a@1": entry("a", stubs=[1], state="leaving"),
            "a@2": entry("a", stubs=[2]),
            "b@1": entry("b", stubs=[], state="failed", error="why"),
        },
        0.0,
    )
    assert presence.attached == {"a"}


def test_a_model_that_falls_back_as_the_link_begins_is_leaving_and_cold() -> None:
    """If the first snapshot of a link has a version whose stubs were asked to leave, the version is leaving and the model is cold."""
    presence, fallen = up(), entry("a", state="cold", stubs=[])
    presence.devices[0].begin({"a@1": fallen}, 0.0)
    assert (fallen["state"], presence.cold) == ("leaving", {"a"})


def test_a_cold_model_serves_while_it_starts_and_not_after_a_failure() -> None:
    """A cold model serves while it starts. After a failed start, it does not serve, nor does a model that was not cold."""
    presence = up()
    presence.see(StubPoll(unconnected={"a"}), 0.0)
    assert (presence.cold, presence.serving) == ({"a"}, {"a"})
    change(presence, "a", state="loading")
    change(presence, "b", state="loading")
    presence.see(StubPoll(), 20.0)
    assert (presence.cold, presence.serving) == (set(), {"a"})
    change(presence, "a", state="failed", error="why", stubs=[])
    change(presence, "a", state="loading")
    assert not presence.serving


def test_a_model_that_falls_back_and_starts_at_once_serves() -> None:
    """A model that falls to cold and starts at once serves all the time, although no poll has found it cold."""
    presence = up("a")
    change(presence, "a", state="cold", stubs=[])
    change(presence, "a", state="loading")
    assert (presence.serving, presence.lost) == ({"a"}, set())


def test_a_runtime_that_is_out_of_sight_for_a_moment_loses_no_model() -> None:
    """A model that Triton reloads during an outage of the runtime serves once the runtime is back."""
    presence = up("a")
    presence.devices[0].go_down()
    assert not presence.serving
    presence.devices[0].come_up()
    assert (presence.serving, presence.lost) == ({"a"}, set())


def test_a_lost_model_is_remembered_until_triton_has_loaded_it() -> None:
    """A model that lost its stub is lost until Triton has loaded it, although the new stub is ready earlier."""
    presence = up("a", "b")
    for name in "ab":
        presence.devices[0].follow(f"{name}@1", None, 0.0)
    change(presence, "a")
    presence.forget_lost(busy={"a"})
    assert presence.lost == {"a", "b"}
    presence.forget_lost(busy=())
    assert presence.lost == {"b"}


def test_a_cold_model_whose_process_ends_is_lost() -> None:
    """If a poll finds no process of a cold model, the model serves only after Triton has loaded it again."""
    presence = up()
    presence.see(StubPoll(unconnected={"a"}), 0.0)
    presence.see(StubPoll(), 1.0)
    assert (presence.serving, presence.lost) == (set(), {"a"})


def test_a_dismissed_model_whose_stub_is_not_seen_again_is_a_change() -> None:
    """A poll that finds no process of a dismissed model reports a change, because the model is not cold any more."""
    presence = up("a")
    change(presence, "a", state="cold", stubs=[])
    presence.devices[0].follow("a@1", None, 0.0)
    assert presence.cold == {"a"}

    assert presence.see(StubPoll(), 1000.0)[0]
    assert presence.cold == set()
    assert not presence.see(StubPoll(), 1001.0)[0]


def test_a_model_whose_stub_has_not_returned_yet_is_not_cold() -> None:
    """After a runtime's end, a model does not serve, and is not cold, until its living stub has connected to the next runtime."""
    presence = up("a")
    device = presence.devices[0]
    device.go_down()
    device.begin({}, 1.0)
    device.come_up()

    presence.see(StubPoll(unconnected={"a"}), 2.0)

    assert (presence.cold, presence.serving, presence.returning) == (set(), set(), {"a"})
    change(presence, "a")
    assert (presence.serving, presence.returning) == ({"a"}, set())


def test_a_model_of_another_device_serves_when_one_runtime_ends() -> None:
    """A model that only the ended runtime had is expected to return. A model that another runtime builds is not cold."""
    presence = up("a", "b", devices=2)
    second = presence.devices[1]
    second.begin({"a@1": entry("a")}, 0.0)
    second.come_up()
    presence.devices[0].go_down()
    assert (presence.serving, presence.attached, presence.returning) == ({"a"}, {"a"}, {"a", "b"})
    change(presence, "b", device=1, state="loading", stubs=[])
    presence.see(StubPoll(unconnected={"b"}, gone={"b"}), 1.0)
    assert (presence.cold, presence.serving) == (set(), {"a"})


def test_models_serve_while_all_devices_sleep() -> None:
    """While all devices sleep, stubs wait without a connection, so models serve. A model without its own stub also serves."""
    presence = up("a")
    change(presence, "inner", stubs=[])
    device = presence.devices[0]
    device.go_down()
    device.fall_asleep(1000.0, 0.0)
    assert (presence.asleep, presence.serving, presence.cold) == (True, {"a", "inner"}, {"a"})
    device.begin({"a@1": entry("a", state="loading")}, 1.0)
    device.come_up()
    assert (presence.asleep, presence.serving) == (False, {"a"})


# --- dead stubs ----------------------------------------------------------------------------------------------------------


def test_a_stub_is_dead_when_two_polls_agree() -> None:
    """A stub is dead if two polls half a second apart find no process. A stub that has not started yet is not dead."""
    presence = up()
    assert not dead(presence, {"b"}, 20.0)
    assert presence.suspicious
    assert not dead(presence, {"a"}, 20.4)
    assert dead(presence, {"a"}, 20.9) == {"a"}


def test_a_model_that_triton_does_not_call_ready_has_no_dead_stub() -> None:
    """A model that Triton does not report as ready has no dead stub."""
    presence = up()
    assert not dead(presence, set(), 20.0)
    assert not dead(presence, set(), 30.0)
    assert not presence.suspicious


def test_a_replaced_stub_has_time_to_start() -> None:
    """A replaced stub has some time to start. After that, it can be found dead."""
    presence = up()
    presence.expect_start("a", 30.0)
    assert not dead(presence, {"a"}, 20.0)
    assert not dead(presence, {"a"}, 29.0)
    assert not dead(presence, {"a"}, 30.0)
    assert dead(presence, {"a"}, 30.5) == {"a"}
