"""Requests that arrive while their model has no runtime: whether they wait, start the model, or are refused."""

from __future__ import annotations

import pytest

from rsrv.front import rules
from rsrv.front.events import (
    Connect,
    Dismissed,
    Hold,
    LoadAsked,
    ModelRejected,
    PlacementChanged,
    Proceed,
    Registered,
    RequestArrived,
    RequestCancelled,
    RunAsks,
    RuntimeLost,
    StartAsked,
    StartTimeoutKnown,
    StepAnnounced,
    TimePassed,
    Unloaded,
    Unreached,
    WentCold,
)
from rsrv.front.states import FrontError, ServingState
from rsrv.placement.device_choice import by_preference
from rsrv.wire.frames import StartProgress, Status
from tests.unit.front.driver import Driver, Request

HOME, SECOND, THIRD = by_preference("m", 3)


def ready(devices: int = 1) -> Driver:
    """Return a driver whose model is ready on all devices."""
    driver = Driver(devices=devices)
    driver.send(LoadAsked(0))
    driver.register(0)
    for device in range(1, devices):
        driver.register(device)
    return driver


def down() -> Driver:
    """Return a driver whose model has just lost its runtime."""
    driver = ready()
    driver.send(RuntimeLost(0))
    return driver


def cold(devices: int = 1, mask: int = 0) -> Driver:
    """Return a driver whose model has not started."""
    driver = Driver(devices=devices, mask=mask)
    driver.send(LoadAsked(0))
    driver.send(StartTimeoutKnown(60.0))
    driver.end_attempt(WentCold(0))
    return driver


def started(devices: int) -> Driver:
    """Return a driver whose model was cold until a request started it on its home. It is cold on the other devices."""
    driver = cold(devices)
    driver.arrive()
    driver.register(by_preference("m", devices)[0])
    for device in [*driver.attempts]:
        driver.end_attempt(WentCold(device))
    driver.answer()
    return driver


def waits(request: Request) -> bool:
    return request.status is None


# --- a runtime dies


def test_requests_wait_for_the_next_runtime_in_their_order() -> None:
    """No waiting request is refused before the next runtime serves, and that runtime gets each request once."""
    driver = down()
    requests = [driver.arrive() for _ in range(20)]

    driver.register()

    assert driver.submitted == requests


def test_the_next_runtime_has_the_model_ready_before_a_request_comes() -> None:
    """After a death, the front connects again at once, and tells the next runtime that the model was started before."""
    assert down().attempts == {0: Connect(0, started=True, asked=False)}


def test_attempts_become_rarer() -> None:
    """The pause between attempts doubles up to five seconds, or up to a minute while runtimes reject the model."""
    driver, pauses = down(), []
    ends: list[Unreached | ModelRejected] = [Unreached(0, "no Python")] * 9
    ends += [*[ModelRejected(0, "no device")] * 5, Unreached(0, "it ended", ended=True)]
    for end in ends:
        driver.end_attempt(end)
        pauses.append(driver.front.next_at - driver.now)
        driver.tick(after=pauses[-1])

    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 10, 20, 40, 60, 60, 5])


def test_a_request_waits_no_longer_than_it_may() -> None:
    """A request is refused at its limit, even if it has waited several times with pauses in between."""
    driver = down()
    request = driver.arrive()
    driver.tick(after=9.9)
    driver.register()
    assert driver.submitted.pop() is request
    driver.send(RuntimeLost(0))
    driver.send(RequestArrived(request))

    driver.tick(after=0.2)

    assert (request.status, request.text) == (Status.RUNTIME_DOWN, rules.DOWN)


def announce(
    driver: Driver,
    text: str = "",
    device: int = 0,
    *,
    after: float = 0.0,
    limit_s: float = 60.0,
    least_s: float = 0.0,
) -> None:
    """Announce a step of the model's start, as a device's runtime does."""
    driver.send(StepAnnounced(device, StartProgress(text, limit_s, least_s)), after=after)


def test_a_model_that_the_next_runtime_builds_is_waited_for_as_one_that_starts() -> None:
    """The first step of a start replaces the limit that holds after a death.

    If the runtime dies again, the limit after a death is used again.
    """
    driver = down()
    request = driver.arrive()
    announce(driver, "it waits for its turn", after=5.0)
    driver.tick(after=59.0)
    assert waits(request)

    driver.tick(after=2.0)

    assert request.status is Status.STARTING
    assert request.text.startswith(
        "the model is starting: it waits for its turn. This request has waited for 66.0 s"
    )
    driver.end_attempt(Unreached(0, "it ended", ended=True))
    late = driver.arrive()
    driver.tick(after=10.5)
    assert (late.status, late.text) == (Status.RUNTIME_DOWN, rules.DOWN)


def test_a_request_outlives_a_start_that_ends_in_a_death() -> None:
    """If the start of the model ends in a death, a waiting request still has the time that it could have waited for the start."""
    driver = down()
    request = driver.arrive()
    announce(driver, after=5.0)
    driver.tick(after=30.0)

    driver.end_attempt(Unreached(0, "it ended", ended=True))

    assert waits(request)
    driver.tick(after=0.1)
    driver.register()
    assert driver.submitted == [request]


def test_a_process_that_no_runtime_understands_is_replaced() -> None:
    """A process that its runtime cannot understand is replaced after five attempts.

    Without this, it would try to connect forever.
    """
    driver = down()
    for _ in range(5):
        assert not driver.given_up
        driver.end_attempt(Unreached(0, "version 9", misunderstood=True))
        driver.tick(after=5.0)

    assert driver.given_up == [
        "the model's process cannot reach its runtime, and is being restarted: version 9"
    ]


def test_a_process_without_descriptors_is_replaced_at_once() -> None:
    """A process without free descriptors is replaced at its first failure, because it cannot connect to any runtime."""
    driver = down()
    driver.end_attempt(Unreached(0, "[Errno 24] Too many open files", final=True))
    assert len(driver.given_up) == 1


@pytest.mark.parametrize(
    ("client", "text"),
    [("m: it hung", "m: it hung"), ("", rules.NOT_AGAIN)],
    ids=["for crashes", "for another reason"],
)
def test_a_model_that_the_next_runtime_rejects_is_not_waited_for(client: str, text: str) -> None:
    """After a rejection, waiting and new requests get the reason at once.

    New requests wait again when the next attempt begins.
    """
    driver = down()
    waiting = driver.arrive()
    driver.end_attempt(ModelRejected(0, "the log's reason", client, barred=bool(client)))
    assert [waiting.text, driver.arrive().text] == [text, text]

    driver.tick(after=0.1)

    assert waits(driver.arrive())


def test_requests_wait_while_one_device_may_come_back() -> None:
    """While one device rejects the model, requests wait for the other device.

    They are refused when both devices reject it.
    """
    driver = ready(2)
    driver.send(RuntimeLost(0))
    driver.send(RuntimeLost(1))
    driver.end_attempt(ModelRejected(0, "", "it has crashed", barred=True))
    request = driver.arrive()
    assert waits(request)

    driver.end_attempt(ModelRejected(1, "", "it has crashed", barred=True))

    assert request.text == "it has crashed"


# --- suspects


def submitted_after(driver: Driver) -> list[int]:
    """Let the runtime register again, and return the number of deaths of each submitted request."""
    driver.register()
    return [request.deaths for request in driver.submitted]


def test_suspects_are_executed_one_after_another() -> None:
    """Requests that were executing at a death are submitted one after another. All other requests are submitted at once."""
    driver = down()
    for deaths in (1, 1, 1, 0):
        driver.arrive(deaths=deaths)

    assert submitted_after(driver) == [1, 0]
    driver.answer(0)
    assert [request.deaths for request in driver.submitted] == [0, 1]
    driver.answer(1)
    assert [request.deaths for request in driver.submitted] == [0, 1]


def test_suspects_wait_for_their_turn_beyond_the_limit() -> None:
    """A suspect waits as long as the suspects before it execute, even beyond its limit.

    If the runtime dies again after the limit, the suspect is refused.
    """
    driver = down()
    _, _, last = (driver.arrive(deaths=1) for _ in range(3))
    driver.register()
    driver.tick(after=11.0)
    driver.answer()
    assert waits(last)

    driver.send(RuntimeLost(0))

    assert (last.status, last.text) == (Status.RUNTIME_DOWN, rules.DOWN)


def test_a_suspect_whose_next_runtime_dies_before_it_is_executed_goes_on() -> None:
    """A suspect that had not executed when its runtime died waits for the next runtime.

    Its number of deaths stays the same, and later suspects are still executed after it.
    """
    driver = down()
    for _ in range(2):
        driver.arrive(deaths=1)
    driver.register()
    first = driver.submitted.pop()
    driver.send(RuntimeLost(0))
    driver.send(RequestArrived(first))

    driver.register()

    assert len(driver.submitted) == 1
    driver.answer()
    assert len(driver.submitted) == 1


def test_requests_that_no_runtime_takes_keep_their_order() -> None:
    """If the runtime accepts no requests, they are submitted in the same order at the next tick, with the same suspect first."""
    driver = down()
    requests = [driver.arrive(deaths=deaths) for deaths in (1, 0, 1, 0)]
    driver.takes_none = True
    driver.register()
    assert not driver.submitted
    driver.takes_none = False

    driver.tick()

    assert driver.submitted == [requests[0], requests[1], requests[3]]


def test_a_request_ends_two_runtimes_at_most() -> None:
    """A request that has ended two runtimes fails with a code that forbids a retry, even if the queue is full.

    Other requests continue to wait.
    """
    driver = down()
    others = [driver.arrive(nbytes=0) for _ in range(rules.MAX_REQUESTS)]

    request = driver.arrive(deaths=rules.MAX_DEATHS)

    assert (request.status, request.text) == (Status.INTERNAL, rules.SUSPECT)
    assert all(map(waits, others))


# --- bounds


def test_waiting_requests_are_bounded() -> None:
    """The number of waiting requests and the bytes of their inputs have limits. Requests beyond a limit are refused."""
    driver = down()
    for _ in range(2):
        assert waits(driver.arrive(nbytes=rules.MAX_REQUEST_BYTES // 2))
    assert driver.arrive().text == rules.DOWN
    driver.register()
    driver.submitted.clear()
    driver.send(RuntimeLost(0))
    for _ in range(rules.MAX_REQUESTS):
        assert waits(driver.arrive(nbytes=0))

    assert driver.arrive(nbytes=0).text == rules.DOWN


def test_the_bytes_of_requests_that_no_runtime_took_count_on() -> None:
    """A request that no runtime accepted is queued again, and its bytes still fill the queue after the runtime's death."""
    driver = down()
    request = driver.arrive(nbytes=rules.MAX_REQUEST_BYTES)
    driver.takes_none = True
    driver.register()
    driver.send(RuntimeLost(0))

    assert driver.arrive(nbytes=1).text == rules.DOWN
    assert waits(request)


def test_cancelled_requests_take_no_room() -> None:
    """Cancelled requests free their room in the queue for other requests."""
    driver = down()
    for _ in range(2):
        driver.send(RequestCancelled(driver.arrive(nbytes=rules.MAX_REQUEST_BYTES)))

    assert waits(driver.arrive(nbytes=rules.MAX_REQUEST_BYTES))


def test_a_start_that_too_many_wait_for_is_the_reason_of_those_beyond() -> None:
    """If too many requests wait for a start, further ones are refused.

    The text does not say that a runtime restarts, because none does.
    """
    driver = cold()
    for _ in range(rules.MAX_REQUESTS):
        driver.arrive(nbytes=0)

    request = driver.arrive(nbytes=0)

    assert (request.status, request.text) == (Status.QUEUE_FULL, rules.CROWDED)


def test_a_cancelled_request_ends_at_once() -> None:
    """A cancelled request ends at once.

    The start that the request caused continues, and other requests continue to wait for it.
    """
    driver = cold()
    request, other = driver.arrive(), driver.arrive()

    driver.send(RequestCancelled(request))

    assert request.status is Status.CANCELLED
    assert waits(other)
    assert driver.attempts


def test_an_unload_ends_all_waiting_requests() -> None:
    """An unload ends each waiting request once, and a request that arrives later ends at once."""
    driver = down()
    waiting = driver.arrive()

    driver.send(Unloaded())

    assert [waiting.text, driver.arrive().text] == [rules.UNLOADED] * 2
    driver.end_attempt(Registered(0, 1, 10.0))
    assert driver.state() is ServingState.CLOSED


def test_a_sub_call_waits_for_a_start_and_not_for_the_next_runtime() -> None:
    """A sub-call waits for the start of a cold model.

    It does not wait after a death, because only its meta model can repeat the call.
    """
    assert waits(cold().arrive(is_sub_call=True))
    assert down().arrive(is_sub_call=True).text == rules.DOWN


# --- cold models


def test_the_first_request_starts_a_cold_model() -> None:
    """The first request starts a cold model. Later requests wait for the same start."""
    driver = cold()
    assert not driver.attempts
    requests = [driver.arrive() for _ in range(3)]
    assert driver.attempts == {0: Connect(0, started=False, asked=True)}

    driver.register()

    assert driver.submitted == requests


def test_a_start_that_advances_is_waited_for() -> None:
    """Each step of a start restarts the time limit of the waiting requests. The refusal names the latest step."""
    driver = cold()
    request = driver.arrive()
    for done in range(1, 4):
        announce(driver, f"{done} of its 12 modules are compiled", after=50.0)
    driver.tick(after=59.0)
    assert waits(request)

    driver.tick(after=2.0)

    assert request.status is Status.STARTING
    assert request.text.startswith(
        "the model is starting: 3 of its 12 modules are compiled. This request has waited for 211.0 s"
    )
    assert "at most 60 s without progress, and at most 600 s in all" in request.text


def test_a_shorter_limit_of_a_step_holds_for_waiting_requests() -> None:
    """An operator may shorten `runtime.start_timeout_s` while a model starts.

    The next step has the shorter limit, and the refusal names it.
    """
    for driver in (cold(), down()):
        request = driver.arrive()
        announce(driver)
        announce(driver, after=1.0, limit_s=5.0)
        driver.tick(after=4.9)
        assert waits(request)

        driver.tick(after=0.2)

        assert request.status is Status.STARTING
        assert "requests wait at most 5 s without progress" in request.text


def test_a_start_that_advances_for_ever_is_not_waited_for() -> None:
    """A request waits for at most ten times the limit of one step, even if the start makes progress all the time."""
    driver = cold()
    request = driver.arrive()
    for _ in range(13):
        announce(driver, "its weights are being loaded", after=46.0)
    assert waits(request)

    driver.tick(after=2.5)

    assert request.status is Status.STARTING


def test_a_request_whose_deadline_is_before_the_end_of_the_start_is_refused_at_once() -> None:
    """The runtime announces how long the start takes at least.

    Requests with an earlier deadline are refused at once, and the others wait.
    """
    driver = cold()
    patient, later, early = driver.arrive(), driver.arrive(deadline_s=107.0), driver.arrive(deadline_s=103.0)

    announce(driver, least_s=5.0)

    for request in (early, driver.arrive(deadline_s=104.0)):
        assert request.status is Status.DEADLINE
        assert request.text.startswith(
            "the model is starting, which takes 5.0 s more, and this request's deadline is"
        )
    driver.register()
    assert driver.submitted == [patient, later]


def test_a_deadline_that_passes_during_a_start_is_kept() -> None:
    """A request whose deadline passes during a start is refused at its deadline. The other requests continue to wait."""
    driver = cold()
    patient, hurried = driver.arrive(), driver.arrive(deadline_s=102.0)

    driver.tick(after=2.5)

    assert hurried.status is Status.DEADLINE
    assert waits(patient)


def test_a_failed_start_is_a_reason_and_a_pause() -> None:
    """After a failed start, requests get the reason at once until a pause is over.

    Then the next request starts the model again.
    """
    driver = cold()
    first = driver.arrive()
    driver.end_attempt(ModelRejected(0, "its bundle is gone"))
    assert [first.text, driver.arrive().text] == ["the model could not be started: its bundle is gone"] * 2
    assert driver.state() is ServingState.REJECTED
    driver.tick(after=1.01)
    assert (driver.state(), driver.attempts) == (ServingState.COLD, {})

    assert waits(driver.arrive())

    assert [*driver.attempts] == [0]


def test_a_model_that_fell_back_starts_again() -> None:
    """The runtime dismisses an idle model. The next request starts it again, and may wait as long as a start may take."""
    driver = ready()
    driver.send(Dismissed(0))
    assert driver.leaves == [0]
    driver.send(WentCold(0))
    driver.send(StartTimeoutKnown(60.0))

    request = driver.arrive()

    assert driver.attempts == {0: Connect(0, started=False, asked=True)}
    driver.tick(after=20.0)
    assert waits(request)


def test_a_request_that_waits_wakes_a_device_that_fell_asleep() -> None:
    """A request on a device that fell asleep starts the model again, and may wait as long as a start may take."""
    driver = ready()
    driver.send(StartTimeoutKnown(60.0))
    request = Request()
    driver.send(RuntimeLost(0, sleeps=True))
    assert driver.state() is ServingState.COLD

    driver.send(RequestArrived(request))

    assert driver.attempts == {0: Connect(0, started=False, asked=True)}
    assert request.retry_until == driver.now + 60.0


def test_the_demand_names_the_earliest_deadline_until_nothing_waits() -> None:
    """The front tells the runtime that requests wait, and the earliest of their deadlines.

    When no request waits, the demand is empty.
    """
    driver = cold()
    requests = [driver.arrive(deadline_s=deadline) for deadline in (0.0, 160.0, 130.0)]
    driver.tick()
    assert driver.demand == {"asked": True, "deadline_ns": 130_000_000_000}

    for request in requests:
        driver.send(RequestCancelled(request))
    driver.send(TimePassed())

    assert driver.demand == {}


# --- several devices


def test_the_devices_join_the_first_one_that_serves() -> None:
    """At first, only one device loads the model.

    The other devices connect when it serves, and so find the compiled modules.
    """
    driver = Driver(devices=3)
    driver.send(LoadAsked(0))
    assert [*driver.attempts] == [0]

    driver.register(0)

    assert sorted(driver.attempts) == [1, 2]
    assert driver.attempts[1] == Connect(1, started=False, asked=False)


@pytest.mark.parametrize("end", [ModelRejected(1, "no device"), Unreached(1, "a fault")])
def test_a_further_device_that_fails_is_tried_again(end: ModelRejected | Unreached) -> None:
    """While one device serves the model, a further device that fails is tried again.

    The pauses between attempts double up to a minute.
    """
    driver, pauses = Driver(devices=2), []
    driver.send(LoadAsked(0))
    driver.register(0)
    for _ in range(8):
        driver.end_attempt(end)
        pauses.append(driver.front.next_at - driver.now)
        driver.tick(after=pauses[-1])

    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60])


def test_a_cold_model_starts_on_its_home_alone() -> None:
    """A request starts a cold model on the model's home only.

    When it serves, the other devices connect without a demand, so they stay cold.
    """
    driver = cold(3)
    driver.arrive()
    assert [*driver.attempts] == [HOME]

    driver.register(HOME)

    assert not any(attempt.asked for attempt in driver.attempts.values())


def test_a_cold_model_starts_where_the_table_says_and_spreads_with_it() -> None:
    """A cold model starts on the device of the placement table.

    If a new table adds a device, the model is also started on this device.
    """
    driver = cold(3, mask=1 << THIRD)
    driver.arrive()
    assert [*driver.attempts] == [THIRD]
    driver.register(THIRD)
    for device in [*driver.attempts]:
        driver.end_attempt(WentCold(device))

    driver.send(PlacementChanged(1 << THIRD | 1 << SECOND))

    assert driver.attempts == {SECOND: Connect(SECOND, started=False, asked=True)}


def test_a_device_of_the_table_that_rejects_the_model_is_tried_again() -> None:
    """If a device of the table rejects the model, the front tries it again after a pause, without a new table."""
    driver = started(2)
    home, other = by_preference("m", 2)
    driver.send(PlacementChanged(1 << home | 1 << other))
    driver.end_attempt(ModelRejected(other, "no room"))

    driver.tick(after=1.01)

    assert driver.attempts == {other: Connect(other, started=False, asked=True)}


def test_a_model_whose_runtime_stays_down_starts_on_another_device() -> None:
    """If the runtime of a model stays down for three seconds, waiting requests start the model on one of the devices where it is cold."""
    driver = started(3)
    driver.send(RuntimeLost(HOME))
    driver.arrive()
    driver.tick(after=2.9)
    assert [*driver.attempts] == [HOME]

    driver.tick(after=0.2)

    assert [*driver.attempts] == [HOME, SECOND]
    driver.tick(after=5.0)
    assert driver.state(THIRD) is ServingState.COLD


def test_a_start_goes_on_elsewhere_if_the_home_has_no_runtime() -> None:
    """If the home's runtime ends during an attempt, the home is tried again, because the model may be the cause.

    If the home has no runtime, another device starts the model.
    """
    driver = cold(2)
    home, other = by_preference("m", 2)
    driver.arrive()
    driver.end_attempt(Unreached(home, "it ended", ended=True))
    driver.tick(after=0.06)
    assert [*driver.attempts] == [home]

    driver.end_attempt(Unreached(home, "the GPU is lost"))

    assert [*driver.attempts] == [other]


@pytest.mark.parametrize("barred", [False, True])
def test_a_model_that_its_home_rejects_starts_on_another_device(barred: bool) -> None:
    """If the home of a model rejects the model, another device starts it.

    If the home rejects the model because it has ended runtimes, no other device starts it, and requests get the reason.
    """
    driver = cold(2)
    home, other = by_preference("m", 2)
    request = driver.arrive()

    driver.end_attempt(ModelRejected(home, "the log's reason", "it has crashed", barred=barred))

    assert [*driver.attempts] == ([] if barred else [other])
    assert request.text == ("the model could not be started: the log's reason" if barred else "")


def test_a_further_device_that_rejects_the_model_for_crashes_is_the_last_one() -> None:
    """If a second device rejects the model because the model has crashed, no third device starts it.

    This holds even if the second device's runtime ends later.
    """
    driver = cold(3)
    driver.arrive()
    driver.end_attempt(ModelRejected(HOME, "no room"))
    driver.end_attempt(ModelRejected(SECOND, "it crashed", "it has crashed", barred=True))
    driver.tick(after=1.01)

    request = driver.arrive()
    assert [*driver.attempts] == [SECOND]
    driver.end_attempt(Unreached(SECOND, "it ended", ended=True))

    driver.tick(after=5.0)
    assert [*driver.attempts] == [SECOND]
    assert waits(request)


def test_a_sub_call_starts_a_cold_model_on_the_device_of_its_run() -> None:
    """A sub-call starts a cold model on the device of its run, because only that runtime knows the run.

    If the start is under way, nothing happens.
    """
    driver = started(2)
    _, other = by_preference("m", 2)

    for _ in range(2):
        driver.send(StartAsked(other))

    assert driver.attempts == {other: Connect(other, started=False, asked=True)}


# --- runs of meta models


def test_a_run_looks_for_another_runtime_until_its_limit() -> None:
    """A run that lost its runtime looks for another one until its limit.

    Only one run that may have ended the runtime proceeds at a time.
    """
    driver = down()
    run, suspect, other = Request(), Request(deaths=1), Request(deaths=1)
    for request in (run, suspect, other):
        driver.send(RunAsks(request))
    assert driver.runs == [Proceed(run), Proceed(suspect), Hold(other)]

    driver.send(RunAsks(run), after=10.5)

    assert run.status is Status.RUNTIME_DOWN


def test_a_run_starts_a_cold_model() -> None:
    """A run of a meta model starts a cold model.

    The run is not among the waiting requests, because it waits in its own thread.
    """
    driver = cold()
    driver.send(RunAsks(Request()))
    assert driver.attempts == {0: Connect(0, started=False, asked=True)}


def test_a_run_counts_as_demand_as_long_as_it_asks() -> None:
    """A run that waits for the next runtime makes the model's start as urgent as a waiting request does, until it asks no more."""
    driver = down()
    run = Request(deadline_s=driver.now + 30)
    driver.send(RunAsks(run))
    assert driver.demand == {"asked": True, "deadline_ns": round(1e9 * run.deadline_s)}

    driver.end_attempt(Unreached(0, "end of stream", ended=True))
    driver.tick(0.9)
    assert driver.attempts == {0: Connect(0, started=True, asked=True)}

    driver.tick(0.2)
    assert driver.demand == {}


def test_a_run_that_has_found_a_runtime_starts_no_further_one() -> None:
    """A run that waited does not count as demand any more when a runtime serves. A device that then sleeps is not woken."""
    driver = down()
    driver.send(RunAsks(Request()))
    driver.register()
    driver.send(RuntimeLost(0, sleeps=True), after=0.5)
    assert driver.attempts == {}


def test_an_event_that_a_state_does_not_allow_shows_the_history() -> None:
    """An event that the state of a device does not allow raises an error with the device's history.

    The caller of the front is at fault.
    """
    driver = down()
    with pytest.raises(
        FrontError, match=r"device 0: untried [+] connect, connecting [+] registered, ready [+] lost"
    ):
        driver.send(RuntimeLost(0))
