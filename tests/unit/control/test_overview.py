"""The figures of the live page, which are computed from the runtime's figures."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.control.overview import Overview, describe, device_picture, states_of_models
from rsrv.control.records import RuntimeRecords
from rsrv.control.v1 import control_pb2 as pb
from rsrv.histogram import SECONDS, Histogram
from tests.unit.control.peers import entry, records, trimmed

DEVICE: dict[str, Any] = {
    "memory": {
        "name": "cpu",
        "budget_bytes": 5000,
        "pinned_bytes": 100,
        "logical_bytes": 900,
        "physical_bytes": 800,
        "held_bytes": 800,
    },
    "host": {"logical_bytes": 2000, "physical_bytes": 1500, "tensors": 3},
    "scratch_bytes": 7,
}


def histogram(*values: float) -> pb.Histogram:
    made = Histogram(SECONDS)
    for value in values:
        made.observe(value)
    return trimmed(made)


def model(request: pb.Histogram, name: str = "a", **differs: Any) -> pb.ModelRecord:
    """Return the record of a model."""
    common: dict[str, Any] = {
        "queued": 1,
        "executing": 2,
        "device_bytes": 1000,
        "answered": 3,
        "errors": 4,
        "device_seconds": 0.5,
        "loads": 2,
        "load": pb.Histogram(sum=0.6),
        "tokens": {"answer": 40},
        "misses": 1,
    }
    return pb.ModelRecord(name=name, request=request, **{**common, **differs})


def figures(*models: pb.ModelRecord, **device: Any) -> dict[int, RuntimeRecords]:
    """Return the records of device 0."""
    return {0: records(*models, **DEVICE, **device)}


def test_a_model_and_a_meta_model_are_shown_with_their_figures() -> None:
    """Models and meta models have rows with figures. Rows of loading or broken models have no figures."""
    meta = model(histogram(0.02), "m", meta=True, executing=4, loads=0)
    by_device = figures(model(histogram(0.002)), meta)
    entries = {
        "a@1": entry("a"),
        "m@1": entry("m", kind="meta", weights=None, residency=None),
        "n@1": entry("n", state="loading", weights="absent"),
    }

    rows = Overview().take(by_device, entries, {"a": "manifest.yaml: not YAML"}, {"a": [0]}, 10.0)

    assert device_picture(by_device[0]) == {
        "name": "cpu", "limit": None, "budget": 5000, "pinned": 100, "logical": 900, "physical": 800, "held": 800,
        "host": 1500, "device_s": 0.5,
    }  # fmt: skip
    a, m, n = rows.values()
    assert a["weights"] == "resident, in an older version"
    assert (a["name"], a["residency"], a["bytes"]) == ("a", "system", 1000)
    assert (a["queued"], a["executing"], a["requests"], a["errors"]) == (1, 2, 3, 4)
    assert (a["on"], m["on"]) == ([0], [])
    assert (a["loads"], a["load_s"], a["error"]) == (2, pytest.approx(0.3), "manifest.yaml: not YAML")
    assert 0.001 < a["p99_s"] <= 0.0025
    assert (m["kind"], m["executing"], m["bytes"], m["loads"], m["load_s"]) == ("meta", 4, None, 0, None)
    assert (n["state"], n["queued"], n["p99_s"], n["error"]) == ("loading", 0, None, None)


def test_a_model_shows_what_its_start_waits_for() -> None:
    """While a stub imports model.py, the model is shown as starting, although its weights are on the device."""
    overview, entries = Overview(), {"a@1": entry("a"), "n@1": entry("n", state="loading", weights="absent")}
    by_device = figures(model(histogram()), starting={"a": "importing model.py", "n": "compiling"})

    rows = overview.take(by_device, entries, {}, {}, 0.0)
    assert (rows["a"]["weights"], rows["n"]["weights"]) == (
        "starting, importing model.py",
        "starting, compiling",
    )
    assert overview.take(figures(model(histogram())), entries, {}, {}, 1.0)["a"]["weights"] == "resident"


def test_a_model_that_no_runtime_has_is_shown_as_failed() -> None:
    """A model whose bundle cannot be loaded has a row with the reason. A cold model or an alias has no such row."""
    why = {"b": "model.py: No module named 'cv2'", "c": "no manifest", "aliases.d": "no model"}

    rows = Overview().take(figures(), {"a@1": entry("a")}, why, {}, 0.0, cold={"c"})

    assert {name: row["weights"] for name, row in rows.items()} == {"a": "resident", "b": "failed"}
    assert (rows["b"]["state"], rows["b"]["error"], rows["b"]["requests"]) == ("failed", why["b"], 0)


def test_metrics_and_live_page_have_the_same_words() -> None:
    """The metrics count models by the same words that the live page shows. They also count cold models."""
    entries = {"a@1": entry("a"), "n@1": entry("n", state="loading", weights="absent")}
    why = {"a": "no manifest", "b": "no manifest"}
    for asleep in (False, True):
        rows = Overview().take({}, entries, why, {}, 0.0, cold={"c"}, asleep=asleep)
        words = {name: row["weights"] for name, row in rows.items()}

        states = states_of_models(entries.values(), why, {"c"}, {}, aliases=(), asleep=asleep)

        assert states == {**words, "c": "asleep" if asleep else "cold"}
        assert words["a"] == ("asleep" if asleep else "resident, in an older version")


def test_figures_of_several_devices_are_added() -> None:
    """A model's counters are sums over the devices, and its 99th percentile is over the requests of all devices."""
    first, second = figures(model(histogram(*[0.002] * 90)))[0], figures(model(histogram(*[1.5] * 10)))[0]

    a = Overview().take({0: first, 1: second}, {"a@1": entry("a")}, {}, {}, 0.0)["a"]

    assert (a["queued"], a["executing"], a["requests"], a["errors"], a["bytes"]) == (2, 4, 6, 8, 1000)
    assert (a["device_s"], a["loads"], a["load_s"], a["tokens"]) == (1.0, 4, pytest.approx(0.3), 80)
    assert a["p99_s"] > 1


@given(
    st.lists(st.sampled_from(["ready", "loading", "failed", "leaving"]), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_of_several_versions_what_is_served_is_shown(states: list[str], random: Any) -> None:
    """Of several versions, the ready one is shown. If there is none, a loading, a failed or a leaving one is shown, in this order."""
    entries = [(f"a@{number}", entry("a", state=state)) for number, state in enumerate(states)]
    random.shuffle(entries)

    row = Overview().take(figures(), dict(entries), {}, {}, 0.0)["a"]

    assert row["state"] == min(states, key=["ready", "loading", "failed", "leaving"].index)


def test_the_99th_percentile_is_of_the_last_ten_seconds() -> None:
    """The 99th percentile covers the requests of the last ten seconds, and is absent without any."""
    overview, entries = Overview(), {"a@1": entry("a")}
    slow, fast = [1.5] * 50, [0.002] * 50

    def p99(request: pb.Histogram, now: float) -> Any:
        return overview.take(figures(model(request)), entries, {}, {}, now)["a"]["p99_s"]

    assert p99(histogram(*slow), 0.0) > 1
    assert p99(histogram(*slow), 5.0) is None
    assert p99(histogram(*slow, *fast), 9.0) < 0.01
    assert p99(histogram(*slow, *fast), 25.0) is None


def test_a_clock_that_is_set_back_begins_the_window_again() -> None:
    """After the clock is set back, requests from before drop out of the percentile after the usual window."""
    overview, entries = Overview(), {"a@1": entry("a")}
    samples = [(1000.0, (0.002,)), (1001.0, (0.002,) * 2), (1002.0, (2.0,)), (10.0, ()), (30.0, (0.002,))]
    seen: tuple[float, ...] = ()
    for now, new in samples:
        seen += new
        rows = overview.take(figures(model(histogram(*seen))), entries, {}, {}, now)
    assert rows["a"]["p99_s"] < 0.01


def test_counters_that_restart_are_taken_as_they_are() -> None:
    """After a restart of the runtime, its lower counters are taken as they are."""
    overview, entries = Overview(), {"a@1": entry("a")}
    overview.take(figures(model(histogram(*[1.5] * 9))), entries, {}, {}, 0.0)

    rows = overview.take(figures(model(histogram(0.002))), entries, {}, {}, 1.0)

    assert rows["a"]["p99_s"] < 0.01


def test_only_models_that_changed_are_made_again() -> None:
    """The row of an idle model is the same object after an update. The work of the others is the difference between the updates."""
    overview, entries = Overview(), {"a@1": entry("a"), "b@1": entry("b")}
    idle = model(histogram(), "b")

    def update(now: float, *values: float, requests: int) -> dict[str, Any]:
        busy: dict[str, Any] = {"answered": requests, "device_seconds": 0.1 * requests}
        return overview.take(figures(model(histogram(*values), **busy), idle), entries, {}, {}, now)

    first = update(0.0, 0.002, requests=3)
    assert overview.work.requests == 0
    second = update(1.0, 0.002, 0.02, 0.02, requests=5)
    assert overview.work.requests == 2
    assert overview.work.device_s == pytest.approx(0.2)
    assert 0.01 < (overview.work.request.quantile(0.5) or 0) <= 0.025
    assert second["a"] is not first["a"]
    assert second["b"] is first["b"]
    update(2.0, 0.002, requests=1)
    assert overview.work.requests == 1  # a new runtime counts from 0


@given(st.lists(st.lists(st.floats(0.0, 50.0), max_size=5), min_size=1, max_size=30))
def test_a_percentile_lies_where_the_window_has_values(samples: list[list[float]]) -> None:
    """For any requests, the percentile exists if the window has some, and is at most the bucket bound of the largest value."""
    overview, total, came = Overview(), Histogram(SECONDS), []
    for second, values in enumerate(samples):
        for value in values:
            total.observe(value)
        came.append(values)
        rows = overview.take(figures(model(trimmed(total))), {"a@1": entry("a")}, {}, {}, float(second))
        p99 = rows["a"]["p99_s"]
        window = [value for each in (came[1:] if second <= 10 else came[second - 9 :]) for value in each]
        if second == 0:
            window = came[0]
        assert (p99 is None) == (not window)
        if p99 is not None:
            assert p99 <= min(bound for bound in SECONDS if bound >= max(window))


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (None, entry("a"), "a: version 0123456789ab is resident"),
        (None, entry("a", state="loading", weights="absent"), "a: version 0123456789ab is starting"),
        (entry("a"), entry("a", state="leaving"), "a: version 0123456789ab is leaving; version 2 serves"),
        (entry("a"), None, "a: version 0123456789ab was removed; version 2 serves"),
        (entry("a", digest=""), None, "a: a version was removed; version 2 serves"),
        (None, None, None),
        (entry("a"), entry("a", stubs=[1, 2]), None),
        (entry("a"), entry("a", weights="absent"), "a: warm"),
        (entry("a"), entry("a", residency="device"), "a: residency device"),
        (entry("a"), entry("a", paused="hold"), "a: paused (hold)"),
        (entry("a", paused="hold"), entry("a"), "a: not paused"),
        (
            entry("a", state="loading"),
            entry("a", state="failed", error="no room", weights="absent"),
            "a: version 0123456789ab has failed: no room",
        ),
    ],
)
def test_each_change_that_people_look_for_is_a_line(before: Any, after: Any, line: str | None) -> None:
    """Changes that matter to people become a line. Internal changes do not."""
    assert describe(before, after, "version 2 serves") == line
