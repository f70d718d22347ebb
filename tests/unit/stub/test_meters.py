"""Each measurement of a stub's threads is reported once."""

import threading
import time

from rsrv.histogram import SECONDS, Histogram
from rsrv.stub.metrics import Meters
from rsrv.wire.frames import Status

THREADS, EACH = 4, 500


def test_many_threads_lose_nothing_and_count_nothing_twice() -> None:
    """Measurements of many threads are each reported once, while another thread reports."""
    meters = Meters()
    started = threading.Barrier(THREADS + 1)

    def work() -> None:
        started.wait()
        for _ in range(EACH):
            meters.answered(Status.OK, time.perf_counter())
            meters.hook("m", "pre", 0.001)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    started.wait()
    reports = []
    while any(thread.is_alive() for thread in threads):
        meters.some.wait(0.01)
        reports.append(meters.take())
    reports.append(meters.take())

    requests, hooks = Histogram(SECONDS), Histogram(SECONDS)
    for report in reports:
        requests.add(Histogram.from_json(SECONDS, report["requests"]))
        for seconds in report["hooks"].values():
            hooks.add(Histogram.from_json(SECONDS, seconds["pre"]))
    assert sum(requests.counts) == sum(hooks.counts) == THREADS * EACH
    assert sum(report["responses"].get("ok", 0) for report in reports) == THREADS * EACH


def test_the_first_of_many_measurements_wakes_the_reporting_thread() -> None:
    """The first measurement after a report wakes the reporting thread."""
    meters = Meters()
    assert not meters.some.is_set()
    meters.answered(Status.DEADLINE, time.perf_counter())
    assert meters.some.is_set()

    assert meters.take()["responses"] == {"deadline": 1}
    assert not meters.some.is_set()
    assert meters.take() == {"requests": [0.0, 0], "responses": {}, "hooks": {}, "slow": []}


def test_a_report_has_the_requests_that_took_longest() -> None:
    """A report has the times of arrival and answer for the slowest submitted requests, up to a limit.

    Other requests are only counted.
    """
    meters, now = Meters(), time.perf_counter()
    for number in range(100):
        meters.answered(Status.OK, now - number, number)
    # This request failed in a hook, before its submission.
    meters.answered(Status.INTERNAL, now - 1000.0)

    slow = meters.take()["slow"]

    assert {number for number, _, _ in slow} == {*range(68, 100)}
    assert all(since == now - number and until >= now for number, since, until in slow)
