"""Settings of the scheduler from rsrv.yaml and from commands."""

import pytest

from rsrv.runtime.policy import Policy, scheduler_settings
from rsrv.scheduler.events import Pause, Program
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.settings import SettingsError, load_settings


def test_the_defaults_are_the_schedulers_own() -> None:
    """The defaults in rsrv.yaml's settings equal the scheduler's defaults. They are defined in two modules."""
    assert scheduler_settings(load_settings()) == SchedulerSettings()


@pytest.mark.parametrize(
    ("text", "asynchronous", "depth"),
    [("", False, 1), ("", True, 2), ("scheduler: {depth: 1}", True, 1), ("scheduler: {depth: 3}", False, 3)],
)
def test_the_depth_follows_the_device_unless_it_is_set(text: str, asynchronous: bool, depth: int) -> None:
    """Without a setting, the depth is 2 for an asynchronous device, and 1 for other devices.

    An asynchronous device needs a second execution to stay busy.
    """
    assert scheduler_settings(load_settings(text), asynchronous=asynchronous).depth == depth


def test_settings_of_a_model_reach_each_of_its_versions() -> None:
    """A model's settings in rsrv.yaml, and later changes, apply to each version of the model and to no other model."""
    policy = Policy(load_settings("models: {m: {weight: 2, residency: device}}"))
    program = Program("m@1", {(0, 1): 1.0}, True, 1)
    assert policy.program(program, "m").pinned

    settings = {"residency": "unpinned", "max_delay_us": 500, "max_queue_depth": 7, "weight": 2}
    policy.change({"models": {"m": {"settings": settings, "paused": "hold"}}})

    changed = policy.program(program, "m")
    assert (changed.pinned, changed.weight, changed.max_delay) == (False, 2.0, 0.0005)
    assert (changed.max_queue_depth, changed.paused) == (7, Pause.HOLD)
    assert (policy.queue_depth("m"), policy.queue_depth("n")) == (7, 1024)
    assert policy.residency("n") == "system"
    assert policy.paused("n") is None


def test_a_change_that_one_model_refuses_changes_no_model() -> None:
    """If a change is wrong for one model, it changes no model."""
    policy = Policy(load_settings())

    with pytest.raises(SettingsError, match=r"models\.a\.weight"):
        policy.change({"paused": "hold", "models": {"b": {}, "a": {"settings": {"weight": 0}}}})

    assert (policy.settings, policy.paused("b")) == (load_settings(), None)


def test_a_model_may_go_on_while_all_others_are_paused() -> None:
    """A pause of one model has precedence over the pause of all models. One model can also be excepted from that pause."""
    policy = Policy(load_settings())

    policy.change({"paused": "drain", "models": {"a": {"paused": None}, "b": {"paused": "hold"}}})

    assert [policy.paused(name) for name in "abc"] == [None, Pause.HOLD, Pause.DRAIN]
