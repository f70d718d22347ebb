"""The scheduler's settings change while the runtime serves. A wrong change is refused with a reason."""

import os
from pathlib import Path
from typing import Any

import pytest

from rsrv.scheduler.events import Pause
from rsrv.settings import SchedulerSection
from tests.fakes import FakeRequest
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime
from tests.unit.runtime.engines import make_engine, ramp
from tests.unit.runtime.metas import ask
from tests.unit.runtime.watchers import Operator, configure


def test_what_is_changed_holds_from_then_on(runtime: Runtime, doubling: Path) -> None:
    """A change of settings is answered with the whole section. Later changes keep the settings that they do not name."""
    engine = make_engine(runtime, doubling)  # This waits until the device is up.
    before = configure(runtime, {})
    assert before == {**SchedulerSection().model_dump(), "depth": 1}

    first = configure(runtime, {"depth": 3, "discipline": "edf"})
    changes = {"meta_concurrency": 3, "max_queue_depth": 5}
    second = configure(runtime, changes)

    assert first == {**before, "depth": 3, "discipline": "edf"}
    assert second == {**first, **changes}
    assert configure(runtime, {"depth": None})["depth"] == 1
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}))
    assert answer.error is None


def test_settings_of_the_file_that_was_read_again_hold(runtime: Runtime, doubling: Path) -> None:
    """Settings of a file that was read again take effect.

    A model whose section is removed gets the defaults; other sections stay.
    """
    make_engine(runtime, doubling)
    document: dict[str, Any] = {
        "scheduler": {"meta_concurrency": 3},
        "runtime": {"idle": {"device": 600, "host": 3600, "server": 7200}, "host_memory_bytes": 5000},
        "paused": None,
        "models": {
            "doubling": {"settings": {"weight": 3, "residency": "device"}},
            "later": {"settings": {"start": "lazy"}},
        },
    }

    with Operator(runtime) as operator:
        assert operator.follow(document) == {}

    policy = runtime.loop._catalog.policy
    assert configure(runtime, {})["meta_concurrency"] == 3
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
    with Operator(runtime) as operator:
        assert operator.follow({"models": {"doubling": None}}) == {}
    assert (policy.settings.for_model("doubling").weight, policy.residency("doubling")) == (1, "system")
    assert policy.settings.for_model("later").start == "lazy"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {"doubling": {"settings": {"weight": 0}}}}, "models.doubling.weight: "),
        ({"models": {"doubling": {"settings": {"weight": 10**400}}}}, "models.doubling.weight: "),
        ({"models": {"doubling": {"settings": 3}}}, "doubling.settings: must be a mapping"),
        ({"models": {"doubling": 3}}, "doubling: must be a mapping"),
        ({"models": []}, "models: must be a mapping"),
        ({"models": {"doubling": {"pause": "hold"}}}, "doubling: unknown key 'pause'"),
        ({"models": {"doubling": {"paused": "stop"}}}, "'drain', 'hold', 'reject' or null (found 'stop')"),
        ({"models": {"doubling": {"prefetched": 1}}}, "prefetched must be true or false"),
        ({"models": {"doubling": {"asked": True}}}, "asked a whole number"),
        ({"paused": ["hold"]}, "paused: must be"),
        ({"runtime": {"idle": {"disk": 3}}}, "runtime.idle.disk: unknown key"),
        ({"scheduler": []}, "scheduler: must be a mapping"),
        ({"scheduler": {"dept": 3}}, "scheduler.dept: unknown key; did you mean 'depth'?"),
        ({"scheduler": {"depth": "many"}}, "scheduler.depth: must be a valid integer"),
        ({"scheduler": {"depth": 2, "meta_concurrency": float("nan")}}, "scheduler.meta_concurrency: "),
        ({"scheduler": {f"depth{i}": 0 for i in range(6_000)}}, "scheduler.depth0: unknown key"),
        ({"model": {}}, "the changes: unknown key 'model'"),
    ],
)
def test_a_wrong_document_keeps_the_last_good_one(
    runtime: Runtime, changes: dict[str, Any], message: str
) -> None:
    """A document with a wrong value is refused and changes nothing. The next correct document takes effect."""
    policy = runtime.loop._catalog.policy
    with Operator(runtime) as operator:
        operator.want("other", weight=2)
        before = policy.settings, policy.document

        answer = operator.follow(changes)

        assert (message in answer["error"], answer["code"]) == (True, "INVALID_ARGUMENT")
        assert len(answer["error"]) <= 4000
        assert (policy.settings, policy.document) == before
        assert operator.want("other", weight=3) == {}


def test_an_older_document_is_not_followed(runtime: Runtime) -> None:
    """A document of an older revision or of a former control process changes nothing.

    The answer has the revision that the runtime follows.
    """
    policy = runtime.loop._catalog.policy
    whole = {**policy.document, "paused": "hold"}

    def follow(instance: str, revision: int, since: int | None, document: dict[str, Any]) -> dict[str, Any]:
        return operator.do("follow", instance=instance, revision=revision, since=since, document=document)

    with Operator(runtime) as operator:
        assert read_status(os.getpid())["follows"] == {"instance": "", "revision": 0}
        assert follow("first", 7, None, whole) == {"instance": "first", "revision": 7}
        assert follow("first", 6, None, {**whole, "paused": None}) == {"instance": "first", "revision": 7}
        assert follow("first", 9, 8, {"paused": None}) == {"instance": "first", "revision": 7}
        assert follow("second", 2, 1, {"paused": None}) == {"instance": "first", "revision": 7}
        assert policy.paused("any") is Pause.HOLD
        assert follow("second", 1, None, {**whole, "paused": "drain"}) == {
            "instance": "second",
            "revision": 1,
        }
        assert follow("first", 8, None, whole) == {"instance": "second", "revision": 1}
        assert follow("second", 3, 1, {"scheduler": {}}) == {"instance": "second", "revision": 3}
    assert policy.paused("any") is Pause.DRAIN
    assert read_status(os.getpid())["follows"] == {"instance": "second", "revision": 3}
