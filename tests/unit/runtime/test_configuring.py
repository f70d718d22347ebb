"""The scheduler's settings change while the runtime serves, or stay what they are and say why."""

import os
from pathlib import Path
from typing import Any

import pytest

from rsrv.settings import SchedulerSection
from tests.fakes import FakeRequest
from tests.runtime_commands import Refused, command, configure
from tests.unit.runtime.conftest import Runtime
from tests.unit.runtime.engines import make_engine, ramp
from tests.unit.runtime.metas import ask


def test_what_is_changed_holds_from_then_on(runtime: Runtime, doubling: Path) -> None:
    """The answer has the whole section; settings that are not named stay through later changes."""
    engine = make_engine(runtime, doubling)  # The device is up.
    before = configure(os.getpid(), {})
    assert before == {**SchedulerSection().model_dump(), "depth": 1}

    first = configure(os.getpid(), {"depth": 3, "discipline": "edf"})
    changes = {"meta_concurrency": 3, "eviction": "cost"}
    second = configure(os.getpid(), changes)

    assert first == {**before, "depth": 3, "discipline": "edf"}
    assert second == {**first, **changes}
    assert configure(os.getpid(), {"depth": None})["depth"] == 1
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}))
    assert answer.error is None
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dept": 3}, "scheduler.dept: unknown key; did you mean 'depth'?"),
        ({"cost_ema_alpha": 0.5}, "scheduler.cost_ema_alpha: unknown key"),
        ({"depth": "many"}, "scheduler.depth: must be a valid integer"),
        ({"depth": 2, "meta_concurrency": 0}, "scheduler.meta_concurrency: "),
        ({"meta_concurrency": float("nan")}, "scheduler.meta_concurrency: "),
        ({"discipline": "lifo"}, "scheduler.discipline: "),
        ({"eviction": "random"}, "scheduler.eviction: "),
        ({"depth": [0] * 10_000}, "scheduler.depth: "),
        ({f"depth{i}": 0 for i in range(6_000)}, "scheduler.depth0: unknown key"),
        ({"max_queue_depth": 3}, "scheduler.max_queue_depth: cannot be changed while the runtime runs"),
    ],
)
def test_what_rsrv_yaml_would_not_take_is_refused(
    runtime: Runtime, changes: dict[str, Any], message: str
) -> None:
    """A wrong setting is refused with the message of rsrv.yaml, and no setting changes."""
    before = configure(os.getpid(), {})

    with pytest.raises(Refused) as caught:
        configure(os.getpid(), changes)

    assert message in str(caught.value)
    assert configure(os.getpid(), {}) == before


def test_settings_of_the_file_that_was_read_again_hold(runtime: Runtime, doubling: Path) -> None:
    """A model's weight and limit reach the scheduler; a section that goes leaves the defaults, and others stay."""
    engine = make_engine(runtime, doubling)
    changes = {
        "scheduler": {"eviction": "cost"},
        "runtime": {"idle": {"device": 600, "host": 3600, "server": 7200}, "host_memory_bytes": 5000},
        "models": {"doubling": {"weight": 3, "residency": "device"}, "later": {"start": "lazy"}},
    }

    command(os.getpid(), {"command": "settings", **changes})

    policy = runtime.loop._catalog.policy
    assert configure(os.getpid(), {})["eviction"] == "cost"
    assert (policy.settings.for_model("doubling").weight, policy.residency("doubling")) == (3, "device")
    assert (policy.settings.for_model("later").start, policy.settings.runtime.idle.host) == ("lazy", 3600)
    (key,) = runtime.loop._catalog.compiled(None)
    assert runtime.loop._scheduler._models[key].program.idle_seconds == 600
    mover = runtime.loop._weights.mover
    assert mover is not None
    assert mover.host.limit is not None
    assert (runtime.loop._catalog.policy.settings.runtime.idle.server, mover.host.limit.copies) == (
        7200,
        5000,
    )
    command(os.getpid(), {"command": "settings", "models": {"doubling": {}}})
    assert (policy.settings.for_model("doubling").weight, policy.residency("doubling")) == (1, "system")
    assert policy.settings.for_model("later").start == "lazy"
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {"doubling": {"weight": 0}}}, "models.doubling.weight: "),
        ({"models": {"doubling": 3}}, "models.doubling: must be a mapping"),
        ({"runtime": {"idle": {"disk": 3}}}, "runtime.idle.disk: unknown key"),
        ({"scheduler": []}, "scheduler: must be a mapping"),
    ],
)
def test_wrong_settings_of_the_file_are_refused(
    runtime: Runtime, changes: dict[str, Any], message: str
) -> None:
    """A wrong value is refused, and no setting changes."""
    before = runtime.loop._catalog.policy.settings

    with pytest.raises(Refused) as caught:
        command(os.getpid(), {"command": "settings", **changes})

    assert message in str(caught.value)
    assert runtime.loop._catalog.policy.settings is before
