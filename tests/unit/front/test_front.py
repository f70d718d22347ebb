"""What becomes of a request that arrives while its model has no runtime."""

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
    """Return a model that its runtimes serve."""
    driver = Driver(devices=devices)
    driver.send(LoadAsked(0))
    driver.register(0)
    for device in range(1, devices):
        driver.register(device)
    return driver


def down() -> Driver:
    """Return a model whose runtime has died a moment ago."""
    driver = ready()
    driver.send(RuntimeLost(0))
    return driver


def cold(devices: int = 1, mask: int = 0) -> Driver:
    """Return a model that has not started."""
    driver = Driver(devices=devices, mask=mask)
    driver.send(LoadAsked(0))
    driver.send(StartTimeoutKnown(60.0))
    driver.end_attempt(WentCold(0))
    return driver


def started(devices: int) -> Driver:
    """Return a cold model that a request has started on its home. It is cold on the other devices."""
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
    """The attempt begins at once, and says that the model was ready."""
    assert down().attempts == {0: Connect(0, started=True, asked=False)}


def test_attempts_become_rarer() -> None:
    """The pause doubles up to five seconds, or up to a minute while runtimes reject the model."""
    driver, pauses = down(), []
    ends: list[Unreached | ModelRejected] = [Unreached(0, "no Python")] * 9
    ends += [*[ModelRejected(0, "no device")] * 5, Unreached(0, "it ended", ended=True)]
    for end in ends:
        driver.end_attempt(end)
        pauses.append(driver.front.next_at - driver.now)
        driver.tick(after=pauses[-1])

    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 10, 20, 40, 60, 60, 5])


def test_a_request_waits_no_longer_than_it_may() -> None:
    """A request is refused after the limit, even if it has waited several times with pauses between."""
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
    """The device's runtime announces a step of the model's start."""
    driver.send(StepAnnounced(device, StartProgress(text, limit_s, least_s)), after=after)


def test_a_model_that_the_next_runtime_builds_is_waited_for_as_one_that_starts() -> None:
    """The limit after a death ends with the first step; if the runtime dies again, that limit holds again."""
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
    """The request waits for the next runtime for as long as it could have waited for the start."""
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
    """The next process may serve, or its load fails visibly. Without the replacement, this process would try forever."""
    driver = down()
    for _ in range(5):
        assert not driver.given_up
        driver.end_attempt(Unreached(0, "version 9", misunderstood=True))
        driver.tick(after=5.0)

    assert driver.given_up == [
        "the model's process cannot reach its runtime, and is being restarted: version 9"
    ]


def test_a_process_without_descriptors_is_replaced_at_once() -> None:
    """A process cannot connect to any runtime as long as its hooks hold all descriptors."""
    driver = down()
    driver.end_attempt(Unreached(0, "[Errno 24] Too many open files", final=True))
    assert len(driver.given_up) == 1


@pytest.mark.parametrize(
    ("client", "text"),
    [("m: it hung", "m: it hung"), ("", rules.NOT_AGAIN)],
    ids=["for crashes", "for another reason"],
)
def test_a_model_that_the_next_runtime_rejects_is_not_waited_for(client: str, text: str) -> None:
    """Requests get the reason at once, until the next attempt."""
    driver = down()
    waiting = driver.arrive()
    driver.end_attempt(ModelRejected(0, "the log's reason", client, barred=bool(client)))
    assert [waiting.text, driver.arrive().text] == [text, text]

    driver.tick(after=0.1)

    assert waits(driver.arrive())


def test_requests_wait_while_one_device_may_come_back() -> None:
    """A model that one device rejects waits for the other device, and is refused when both reject it."""
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
    """Bring the runtime back; return the deaths of the submitted requests."""
    driver.register()
    return [one.deaths for one in driver.submitted]


def test_suspects_are_executed_one_after_another() -> None:
    """A request that was executing at a death goes alone; a request that was not goes at once."""
    driver = down()
    for deaths in (1, 1, 1, 0):
        driver.arrive(deaths=deaths)

    assert submitted_after(driver) == [1, 0]
    driver.answer(0)
    assert [one.deaths for one in driver.submitted] == [0, 1]
    driver.answer(1)
    assert [one.deaths for one in driver.submitted] == [0, 1]


def test_suspects_wait_for_their_turn_beyond_the_limit() -> None:
    """Long executions of the suspects before it end no suspect; another outage does."""
    driver = down()
    _, _, last = (driver.arrive(deaths=1) for _ in range(3))
    driver.register()
    driver.tick(after=11.0)
    driver.answer()
    assert waits(last)

    driver.send(RuntimeLost(0))

    assert (last.status, last.text) == (Status.RUNTIME_DOWN, rules.DOWN)


def test_a_suspect_whose_next_runtime_dies_before_it_is_executed_goes_on() -> None:
    """The suspect waits again, is not a suspect of the second death, and delays no other suspect."""
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
    """The requests are tried again at the next tick, and the same suspect goes first."""
    driver = down()
    requests = [driver.arrive(deaths=deaths) for deaths in (1, 0, 1, 0)]
    driver.takes_none = True
    driver.register()
    assert not driver.submitted
    driver.takes_none = False

    driver.tick()

    assert driver.submitted == [requests[0], requests[1], requests[3]]


def test_a_request_ends_two_runtimes_at_most() -> None:
    """Only this request fails, even if no more requests may wait, because its client must not send it again."""
    driver = down()
    others = [driver.arrive(nbytes=0) for _ in range(rules.MAX_REQUESTS)]

    request = driver.arrive(deaths=rules.MAX_DEATHS)

    assert (request.status, request.text) == (Status.INTERNAL, rules.SUSPECT)
    assert all(map(waits, others))


# --- bounds


def test_waiting_requests_are_bounded() -> None:
    """Neither the number of waiting requests nor the bytes of their inputs exceed the limits."""
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
    """A request that comes back to the queue takes its room there again."""
    driver = down()
    request = driver.arrive(nbytes=rules.MAX_REQUEST_BYTES)
    driver.takes_none = True
    driver.register()
    driver.send(RuntimeLost(0))

    assert driver.arrive(nbytes=1).text == rules.DOWN
    assert waits(request)


def test_cancelled_requests_take_no_room() -> None:
    """Any number of requests may wait and be cancelled before others wait."""
    driver = down()
    for _ in range(2):
        driver.send(RequestCancelled(driver.arrive(nbytes=rules.MAX_REQUEST_BYTES)))

    assert waits(driver.arrive(nbytes=rules.MAX_REQUEST_BYTES))


def test_a_start_that_too_many_wait_for_is_the_reason_of_those_beyond() -> None:
    """No runtime restarts, so the refusal does not say that one does."""
    driver = cold()
    for _ in range(rules.MAX_REQUESTS):
        driver.arrive(nbytes=0)

    request = driver.arrive(nbytes=0)

    assert (request.status, request.text) == (Status.QUEUE_FULL, rules.CROWDED)


def test_a_cancelled_request_ends_at_once() -> None:
    """Other requests continue to wait, and the start that the cancelled request began continues."""
    driver = cold()
    request, other = driver.arrive(), driver.arrive()

    driver.send(RequestCancelled(request))

    assert request.status is Status.CANCELLED
    assert waits(other)
    assert driver.attempts


def test_an_unload_ends_all_waiting_requests() -> None:
    """Each waiting request ends once, and so does a request that arrives after the unload."""
    driver = down()
    waiting = driver.arrive()

    driver.send(Unloaded())

    assert [waiting.text, driver.arrive().text] == [rules.UNLOADED] * 2
    driver.end_attempt(Registered(0, 1, 10.0))
    assert driver.state() is ServingState.CLOSED


def test_a_sub_call_waits_for_a_start_and_not_for_the_next_runtime() -> None:
    """The runtime that starts the callee knows the run; after a death only its meta model can repeat the call."""
    assert waits(cold().arrive(is_sub_call=True))
    assert down().arrive(is_sub_call=True).text == rules.DOWN


# --- cold models


def test_the_first_request_starts_a_cold_model() -> None:
    """Requests that come meanwhile share its start, and wait for it."""
    driver = cold()
    assert not driver.attempts
    requests = [driver.arrive() for _ in range(3)]
    assert driver.attempts == {0: Connect(0, started=False, asked=True)}

    driver.register()

    assert driver.submitted == requests


def test_a_start_that_advances_is_waited_for() -> None:
    """Each step begins the limit anew; the answer says how far the start has come."""
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
    """An operator may shorten `runtime.start_timeout_s` while a model starts. The refusal names the limit that held."""
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
    """A request waits ten times as long as for one step at most."""
    driver = cold()
    request = driver.arrive()
    for _ in range(13):
        announce(driver, "its weights load", after=46.0)
    assert waits(request)

    driver.tick(after=2.5)

    assert request.status is Status.STARTING


def test_a_request_whose_deadline_is_before_the_end_of_the_start_is_refused_at_once() -> None:
    """The runtime knows how long the start takes at least; requests with later deadlines, and without one, wait."""
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
    """The request is refused, and others wait on."""
    driver = cold()
    patient, hurried = driver.arrive(), driver.arrive(deadline_s=102.0)

    driver.tick(after=2.5)

    assert hurried.status is Status.DEADLINE
    assert waits(patient)


def test_a_failed_start_is_a_reason_and_a_pause() -> None:
    """Until the pause is over, requests get the reason at once; the next request after it starts the model again."""
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
    """The runtime asks an idle model to leave. Requests that wait start it, and have the limits of a start."""
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
    """The limit of the request's wait becomes the limit of a start."""
    driver = ready()
    driver.send(StartTimeoutKnown(60.0))
    request = Request()
    driver.send(RuntimeLost(0, sleeps=True))
    assert driver.state() is ServingState.COLD

    driver.send(RequestArrived(request))

    assert driver.attempts == {0: Connect(0, started=False, asked=True)}
    assert request.retry_until == driver.now + 60.0


def test_the_demand_names_the_earliest_deadline_until_nothing_waits() -> None:
    """The runtime that starts the model knows that requests wait, and until when the first of them does."""
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
    """The first device is alone at first: the others then find the compiled modules."""
    driver = Driver(devices=3)
    driver.send(LoadAsked(0))
    assert [*driver.attempts] == [0]

    driver.register(0)

    assert sorted(driver.attempts) == [1, 2]
    assert driver.attempts[1] == Connect(1, started=False, asked=False)


@pytest.mark.parametrize("end", [ModelRejected(1, "no device"), Unreached(1, "a fault")])
def test_a_further_device_that_fails_is_tried_again(end: ModelRejected | Unreached) -> None:
    """The other devices serve the model meanwhile. The failed device's pauses double up to a minute."""
    driver, pauses = Driver(devices=2), []
    driver.send(LoadAsked(0))
    driver.register(0)
    for _ in range(8):
        driver.end_attempt(end)
        pauses.append(driver.front.next_at - driver.now)
        driver.tick(after=pauses[-1])

    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60])


def test_a_cold_model_starts_on_its_home_alone() -> None:
    """The other devices are asked when it is ready, and stay cold."""
    driver = cold(3)
    driver.arrive()
    assert [*driver.attempts] == [HOME]

    driver.register(HOME)

    assert not any(one.asked for one in driver.attempts.values())


def test_a_cold_model_starts_where_the_table_says_and_spreads_with_it() -> None:
    """A new table that names another device starts it there, too, while it serves."""
    driver = cold(3, mask=1 << THIRD)
    driver.arrive()
    assert [*driver.attempts] == [THIRD]
    driver.register(THIRD)
    for device in [*driver.attempts]:
        driver.end_attempt(WentCold(device))

    driver.send(PlacementChanged(1 << THIRD | 1 << SECOND))

    assert driver.attempts == {SECOND: Connect(SECOND, started=False, asked=True)}


def test_a_device_of_the_table_that_rejects_the_model_is_tried_again() -> None:
    """The same table starts the model there after the pause."""
    driver = started(2)
    home, other = by_preference("m", 2)
    driver.send(PlacementChanged(1 << home | 1 << other))
    driver.end_attempt(ModelRejected(other, "no room"))

    driver.tick(after=1.01)

    assert driver.attempts == {other: Connect(other, started=False, asked=True)}


def test_a_model_whose_runtime_stays_down_starts_on_another_device() -> None:
    """The next runtime gets a few seconds; then requests that wait start the model on one device where it is cold."""
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
    """An attempt that ends with its runtime is repeated on the same device, because the model may be the cause."""
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
    """A model that has ended runtimes starts on no other device: requests get the reason."""
    driver = cold(2)
    home, other = by_preference("m", 2)
    request = driver.arrive()

    driver.end_attempt(ModelRejected(home, "the log's reason", "it has crashed", barred=barred))

    assert [*driver.attempts] == ([] if barred else [other])
    assert request.text == ("the model could not be started: the log's reason" if barred else "")


def test_a_further_device_that_rejects_the_model_for_crashes_is_the_last_one() -> None:
    """A third device does not start the model, also if the second one's runtime ends then."""
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
    """Only the runtime there knows the run. A device that is not cold is left alone."""
    driver = started(2)
    _, other = by_preference("m", 2)

    for _ in range(2):
        driver.send(StartAsked(other))

    assert driver.attempts == {other: Connect(other, started=False, asked=True)}


# --- runs of meta models


def test_a_run_looks_for_another_runtime_until_its_limit() -> None:
    """A run keeps its thread, so it is not a waiting request. A run that may have ended the runtime goes alone."""
    driver = down()
    run, suspect, other = Request(), Request(deaths=1), Request(deaths=1)
    for request in (run, suspect, other):
        driver.send(RunAsks(request))
    assert driver.runs == [Proceed(run), Proceed(suspect), Hold(other)]

    driver.send(RunAsks(run), after=10.5)

    assert run.status is Status.RUNTIME_DOWN


def test_a_run_starts_a_cold_model() -> None:
    """The run's request has a thread, so it does not count as waiting."""
    driver = cold()
    driver.send(RunAsks(Request()))
    assert driver.attempts == {0: Connect(0, started=False, asked=True)}


def test_an_event_that_a_state_does_not_allow_shows_the_history() -> None:
    """Such an event is a fault of the front's owner."""
    driver = down()
    with pytest.raises(
        FrontError, match=r"device 0: untried [+] connect, connecting [+] registered, ready [+] lost"
    ):
        driver.send(RuntimeLost(0))
