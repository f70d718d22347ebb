"""Load of each model on the devices, from the counters that the workers report.

The load of a model comes from the difference between two views of the same worker. If a worker did not answer for a while, the
difference covers that time. If counters have restarted (another instance, or a smaller value), one difference is skipped. The
two views have an interval of at least SAMPLE_S. Device seconds are added at the end of an execution, so the differences over
shorter intervals would vary too much.

A model's *utilisation* is its demand in device seconds per second:

    x = sum over its workers of (device seconds consumed / seconds between the views
                                 + requests waiting * device seconds per request / WAITING_S)

The second term adds the demand that the first term misses: a saturated worker cannot consume more device seconds,
however many requests wait. Samples are weighted by consumed device seconds, not by time, so that a night without
requests does not erase the measurements of the day. After the whole fleet consumed dt:

    a = 1 - 2^(-dt/h);   w <- (1 - a) w + a;   s <- (1 - a) s + a x;   utilisation = s / w

While there are few samples, w is less than 1, and s / w is the weighted mean of the samples so far.

A model's *demand* is x, computed from two views with an interval of at least DEMAND_S, and not averaged. So it rises within a
second after a model has become hot. In the demand, the first term of each worker is limited to one device second per second.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from rsrv.placement.contract import Immutable, WorkerView

SAMPLE_S = 2.0
DEMAND_S = 0.9
#: Number of seconds in which the waiting requests should be executed.
WAITING_S = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured demand of one model."""

    #: Device seconds per second, summed over all workers.
    utilisation: float = 0.0
    #: Requests per second, summed over all workers. The average is weighted by consumed device seconds.
    requests_s: float = 0.0
    #: Device seconds of one item, or None if the model was never executed.
    item_s: float | None = None


class _Average:
    """Averages of one model. `items`, `requests` and `device_s` decay, so only their ratios have a meaning."""

    __slots__ = ("device_s", "items", "rate", "requests", "utilisation", "weight")

    def __init__(self) -> None:
        self.weight = self.utilisation = self.rate = 0.0
        self.items = self.requests = self.device_s = 0.0


@dataclass(frozen=True, slots=True)
class _Sample(Immutable):
    """Demand of one model at one worker between its last two views."""

    utilisation: float
    rate: float
    waiting: int


_IDLE = _Sample(0.0, 0.0, 0)


class Costs:
    """Averages of all models. `halflife`, in device seconds, may be set at any time."""

    def __init__(self, halflife: float) -> None:
        self.halflife = halflife
        #: Device seconds by model and worker. The planner removes entries.
        self.where: dict[str, dict[str, float]] = {}
        self._averages: dict[str, _Average] = {}
        self._assumed: dict[str, Measured] = {}
        #: Last view of each worker with counters, and its time.
        self._views: dict[str, tuple[WorkerView, float]] = {}
        self._samples: dict[str, dict[str, _Sample]] = {}
        #: View and time of the last measurement of the demand, by worker. The next measurement uses the changes since this view.
        self._seen: dict[str, tuple[WorkerView, float]] = {}
        #: Demand by worker and model. Models without demand are left out.
        self._demand: dict[str, dict[str, float]] = {}
        #: Demand by model, summed over all workers.
        self._hot: defaultdict[str, float] = defaultdict(float)
        #: Device seconds per item that the workers expect, by model. They are used before the first measurement.
        self._expected: dict[str, float] = {}

    def observe(self, views: Mapping[str, WorkerView], now: float) -> float:
        """Handle all workers' current views. Return the device seconds consumed since the previous views.

        A view is skipped if the worker's last view is less than SAMPLE_S old or has the same measurement. A worker that is not
        in `views` is forgotten.
        """
        known = len(self._views)
        self._views = {worker: seen for worker, seen in self._views.items() if worker in views}
        fresh = len(self._views) < known
        self._samples = {w: s for w, s in self._samples.items() if w in views and views[w].alive}
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in views}
        self._demand = {w: d for w, d in self._demand.items() if w in views and views[w].alive}
        consumed = 0.0
        for worker, view in views.items():
            if not view.alive or view.instance is None:
                continue
            self._measure_demand(worker, view, now)
            before = self._views.get(worker)
            if before is None or before[0].instance != view.instance:
                self._samples.pop(worker, None)
            elif before[0].measurement == view.measurement or now - before[1] < SAMPLE_S:
                continue
            else:
                consumed += self._compare(worker, before[0], view, now - before[1])
            self._views[worker] = (view, now)
            fresh = True
        self._hot = defaultdict(float)
        for models in self._demand.values():
            for name, demand in models.items():
                self._hot[name] += demand
        if fresh:
            self._expect()
            self._fold(consumed)
        return consumed

    def assume(self, utilisation: Mapping[str, float]) -> None:
        """Use these utilisations, by model, in place of measured ones."""
        self._assumed = {model: Measured(value) for model, value in utilisation.items()}

    def measured(self, model: str) -> Measured:
        if model in self._assumed:
            return self._assumed[model]
        average = self._averages.get(model)
        if average is None or not average.weight:
            return Measured(item_s=self._expected.get(model))
        return Measured(
            average.utilisation / average.weight,
            average.rate / average.weight,
            average.device_s / average.items
            if average.items and average.device_s
            else self._expected.get(model),
        )

    def demand(self, model: str) -> float:
        """Return the current demand of a model in device seconds per second, summed over all workers."""
        return self._hot.get(model, 0.0)

    def pressure(self, worker: str) -> float:
        """Return the current demand of all models at a worker, in device seconds per second."""
        return sum(self._demand.get(worker, {}).values())

    def busy(self, worker: str) -> float:
        """Return the device seconds per second that a worker spent between its last two views."""
        return sum(sample.utilisation for sample in self._samples.get(worker, {}).values())

    def _measure_demand(self, worker: str, view: WorkerView, now: float) -> None:
        """Measure the demand at a worker if its view is new and the last measurement of the demand is old enough."""
        before, since = self._seen.setdefault(worker, (view, now))
        if before.instance != view.instance:
            self._seen[worker] = view, now
        elif before.measurement != view.measurement and now - since >= DEMAND_S:
            self._seen[worker] = view, now
            demand = {}
            for name, model in view.models.items():
                old = before.models.get(name)
                if old is model and not model.queued:
                    continue
                used = 0.0 if old is None else model.device_seconds - old.device_seconds
                if used > 0.0 or model.queued:
                    waiting = model.queued * self._request_s(name) / WAITING_S if model.queued else 0.0
                    demand[name] = min(max(used, 0.0) / (now - since), 1.0) + waiting
            self._demand[worker] = demand

    def _compare(self, worker: str, before: WorkerView, view: WorkerView, seconds: float) -> float:
        """Compute the samples of all models of a worker from two views. Return the consumed device seconds."""
        samples: dict[str, _Sample] = {}
        consumed = 0.0
        for name, model in view.models.items():
            old = before.models.get(name)
            if old is None:
                continue
            if old is model and not model.queued:
                samples[name] = _IDLE
                continue
            device_s = model.device_seconds - old.device_seconds
            requests, items = model.requests - old.requests, model.items - old.items
            if device_s < 0.0 or requests < 0 or items < 0:
                continue
            samples[name] = _Sample(device_s / seconds, requests / seconds, model.queued)
            if device_s > 0.0 or requests or items:
                average = self._averages.setdefault(name, _Average())
                average.device_s += device_s
                average.requests += requests
                average.items += items
                places = self.where.setdefault(name, {})
                places[worker] = places.get(worker, 0.0) + device_s
                consumed += device_s
        self._samples[worker] = samples
        return consumed

    def _expect(self) -> None:
        known: set[str] = set()
        total: dict[str, float] = {}
        count: dict[str, int] = {}
        for view, _ in self._views.values():
            known.update(view.models)
            for name, model in view.models.items():
                if model.item_s is not None:
                    total[name] = total.get(name, 0.0) + model.item_s
                    count[name] = count.get(name, 0) + 1
        self._expected = {name: cost / count[name] for name, cost in total.items()}
        self._averages = {name: average for name, average in self._averages.items() if name in known}
        self.where = {name: places for name, places in self.where.items() if name in known}

    def _fold(self, consumed: float) -> None:
        if consumed <= 0.0:
            return
        keep = 2.0 ** (-consumed / self.halflife)
        for name, (utilisation, rate) in self._together().items():
            average = self._averages.setdefault(name, _Average())
            average.weight += (1.0 - keep) * (1.0 - average.weight)
            average.utilisation += (1.0 - keep) * (utilisation - average.utilisation)
            average.rate += (1.0 - keep) * (rate - average.rate)
            if rate > 0.0 or utilisation > 0.0:
                average.items *= keep
                average.requests *= keep
                average.device_s *= keep

    def _together(self) -> dict[str, tuple[float, float]]:
        """Return the current utilisation and the requests per second of each model, summed over all workers."""
        together: dict[str, tuple[float, float]] = {}
        for samples in self._samples.values():
            for name, sample in samples.items():
                utilisation, rate = together.get(name, (0.0, 0.0))
                waiting = sample.waiting * self._request_s(name) / WAITING_S if sample.waiting else 0.0
                together[name] = (utilisation + sample.utilisation + waiting, rate + sample.rate)
        return together

    def _request_s(self, model: str) -> float:
        """Return the measured device seconds of a request. Before the first request, return the expected seconds of an item."""
        average = self._averages.get(model)
        if average is not None and average.requests and average.device_s:
            return average.device_s / average.requests
        return self._expected.get(model, 0.0)
