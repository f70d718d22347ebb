"""The models' use of the devices, derived from the workers' counters."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.placement.contract import ModelView, WeightsView, WorkerView
from rsrv.placement.costs import Costs

STEP = 2.0


def model_view(
    device_s: float, requests: int = 0, items: int = 0, *, queued: int = 0, item_s: float | None = None
) -> ModelView:
    return ModelView(
        bytes=1,
        weights=WeightsView.RESIDENT,
        device_seconds=device_s,
        requests=requests,
        items=items,
        queued=queued,
        item_s=item_s,
    )


measurements = count()


def worker(instance: str = "i", /, **models: ModelView) -> WorkerView:
    return WorkerView(
        alive=True,
        ready=frozenset(models),
        instance=instance,
        models=models,
        measurement=next(measurements),
    )


def test_steady_work_is_known_after_one_sample() -> None:
    """From the second view on, a model's utilisation is known, here half of a device, with its rate and the cost of an item."""
    costs = Costs(300.0)
    for n in range(4):
        costs.observe({"w": worker(m=model_view(n * 1.0, n * 10, n * 100))}, n * STEP)
        if n:
            assert costs.measured("m").utilisation == pytest.approx(0.5)
            assert costs.measured("m").requests_s == pytest.approx(5.0)
            assert costs.measured("m").item_s == pytest.approx(0.01)


def test_workers_add_up() -> None:
    """A model's utilisation is the sum over all workers."""
    costs = Costs(300.0)
    for n in range(3):
        costs.observe({"v": worker(m=model_view(n * 1.0)), "w": worker(m=model_view(n * 2.0))}, n * STEP)

    assert costs.measured("m").utilisation == pytest.approx(1.5)


def test_a_worker_that_joins_brings_no_past() -> None:
    """The counters in a worker's first view have no effect on the costs, because they include earlier work."""
    costs = Costs(300.0)
    costs.observe({"v": worker(m=model_view(0.0))}, 0.0)

    assert costs.observe({"v": worker(m=model_view(1.0)), "w": worker(m=model_view(1e6, 10**9))}, STEP) == 1.0
    assert (
        costs.observe({"v": worker(m=model_view(2.0)), "w": worker(m=model_view(1e6 + 1, 10**9))}, 2 * STEP)
        == 2.0
    )
    assert costs.measured("m").utilisation < 1.1


@pytest.mark.parametrize("lost", [WorkerView(alive=False), WorkerView(alive=True)])
def test_a_worker_that_misses_a_probe_brings_what_happened_meanwhile(lost: WorkerView) -> None:
    """After a missed probe, the work since the last known counters is counted."""
    costs = Costs(300.0)
    costs.observe({"w": worker(m=model_view(100.0))}, 0.0)
    costs.observe({"w": worker(m=model_view(101.0))}, STEP)
    assert costs.observe({"w": lost}, 2 * STEP) == 0.0

    assert costs.observe({"w": worker(m=model_view(103.0))}, 3 * STEP) == pytest.approx(2.0)
    assert costs.measured("m").utilisation == pytest.approx(0.5)


def test_another_instance_starts_again() -> None:
    """Counters of a new runtime are not compared with those of the one before, even if they are higher."""
    costs = Costs(300.0)
    costs.observe({"w": worker("i", m=model_view(1.0))}, 0.0)

    assert costs.observe({"w": worker("j", m=model_view(50.0))}, STEP) == 0.0
    assert costs.observe({"w": worker("j", m=model_view(51.0))}, 2 * STEP) == 1.0


def test_a_reloaded_model_does_not_disturb_the_others() -> None:
    """If a model's counters fell because it was reloaded, the model is left out once. The other models are not affected."""
    costs = Costs(300.0)
    costs.observe({"w": worker(a=model_view(10.0, 10), b=model_view(10.0))}, 0.0)

    assert costs.observe({"w": worker(a=model_view(11.0, 3), b=model_view(11.0))}, STEP) == 1.0
    assert costs.observe({"w": worker(a=model_view(12.0, 4), b=model_view(12.0))}, 2 * STEP) == 2.0
    assert costs.measured("a").utilisation == pytest.approx(0.5)


def test_views_that_say_nothing_new_do_not_count() -> None:
    """A view that was seen before changes nothing, and neither does a view very soon after another one."""
    costs = Costs(300.0)
    costs.observe({"w": worker(m=model_view(0.0))}, 0.0)
    view = worker(m=model_view(1.0))
    costs.observe({"w": view}, STEP)
    before = costs.measured("m")

    assert costs.observe({"w": view}, 2 * STEP) == 0.0
    assert costs.measured("m") == before
    costs.observe({"w": worker(m=model_view(2.0))}, 3 * STEP)
    assert costs.observe({"w": worker(m=model_view(9.0))}, 3 * STEP + 0.1) == 0.0


def test_long_executions_are_no_peaks() -> None:
    """An execution of 1.8 s appears in every tenth view, and views are 0.2 s apart. The utilisation is 0.9, without a peak."""
    costs = Costs(20.0)
    for n in range(300):
        costs.observe({"w": worker(m=model_view(n // 10 * 1.8))}, n * 0.2)

    assert costs.measured("m").utilisation == pytest.approx(0.9, rel=0.01)


def test_a_queue_shows_what_a_full_device_hides() -> None:
    """Two models share a device equally. The one with waiting requests has a higher utilisation, because it needs more."""
    costs = Costs(300.0)
    for n in range(4):
        queue = model_view(n * 1.0, n * 10, n * 10, queued=20)
        costs.observe({"w": worker(a=queue, b=model_view(n * 1.0, n * 10, n * 10))}, n * STEP)

    assert costs.measured("a").utilisation == pytest.approx(0.5 + 20 * 0.1)
    assert costs.measured("b").utilisation == pytest.approx(0.5)


def test_half_is_forgotten_after_the_halflife() -> None:
    """After as many device seconds as the half-life, the average is half way between its old and its new value."""
    costs = Costs(10.0)
    used = {"a": 0.0, "b": 0.0}
    clock = 0.0

    def run(seconds: float, model: str) -> None:
        nonlocal clock
        for _ in range(round(seconds / STEP)):
            clock += STEP
            used[model] += STEP
            costs.observe({"w": worker("i", **{name: model_view(s) for name, s in used.items()})}, clock)

    costs.observe({"w": worker(a=model_view(0.0), b=model_view(0.0))}, clock)
    run(200.0, "a")
    assert costs.measured("a").utilisation == pytest.approx(1.0)
    run(10.0, "b")

    assert costs.measured("a").utilisation == pytest.approx(0.5, rel=0.01)
    assert costs.measured("b").utilisation == pytest.approx(0.5, rel=0.01)


def test_a_night_without_requests_changes_nothing() -> None:
    """Averages change by device seconds, so a time without requests does not change them."""
    costs = Costs(10.0)
    for n in range(20):
        costs.observe({"w": worker(m=model_view(n * 1.0, n))}, n * STEP)
    before = costs.measured("m")
    for n in range(20, 2000):
        costs.observe({"w": worker(m=model_view(19.0, 19))}, n * STEP)

    assert costs.measured("m") == before


def test_what_the_workers_expect_stands_in() -> None:
    """Until a model has executed, its cost is the mean of the workers' estimates, or None without an estimate."""
    costs = Costs(300.0)
    costs.observe(
        {"v": worker(m=model_view(0, item_s=0.1), n=model_view(0)), "w": worker(m=model_view(0, item_s=0.3))},
        0.0,
    )

    assert costs.measured("m").item_s == pytest.approx(0.2)
    assert costs.measured("n").item_s is None
    assert costs.measured("stranger").item_s is None


def test_departed_workers_and_models_are_forgotten() -> None:
    """Nothing is kept of workers and models that have left."""
    costs = Costs(300.0)
    for n in range(3):
        costs.observe({"v": worker(m=model_view(n)), "w": worker(n=model_view(n))}, n * STEP)
    assert costs.where == {"m": {"v": 2.0}, "n": {"w": 2.0}}

    costs.observe({"w": worker(n=model_view(3))}, 3 * STEP)
    assert costs.measured("m").utilisation == 0.0
    assert set(costs.where) == {"n"}
    costs.observe({}, 4 * STEP)
    assert (costs.where, costs._averages, costs._views, costs._samples) == ({}, {}, {}, {})


@given(st.integers(0, 2**32))
def test_utilisation_never_exceeds_the_devices(seed: int) -> None:
    """For random restarts and absences, a model's utilisation stays within the number of devices."""
    random = Random(seed)
    costs = Costs(5.0)
    workers = ["u", "v", "w"]
    state = {name: ("0", model_view(random.uniform(0, 1e6), 10**6, 10**7)) for name in workers}
    consumed = 0.0
    for n in range(1, 40):
        views = {}
        for name in workers:
            instance, model = state[name]
            if random.random() < 0.1:
                instance, model = str(n), model_view(random.uniform(0, 3.0))
            busy = random.uniform(0, STEP)
            model = replace(model, device_seconds=model.device_seconds + busy, requests=model.requests + 1)
            state[name] = (instance, model)
            if random.random() < 0.8:
                views[name] = worker(instance, m=model) if random.random() < 0.8 else WorkerView(alive=False)
        consumed += costs.observe(views, n * STEP)

        assert 0.0 <= costs.measured("m").utilisation <= 3.0
    assert consumed <= 3 * 40 * STEP
