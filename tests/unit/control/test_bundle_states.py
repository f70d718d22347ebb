"""`BundleStates`: the states of bundles, and the times at which they are loaded, unloaded and retried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.control.bundle_states import (
    LOAD_PATIENCE_S,
    RETRY_MAX_S,
    TRANSITIONS,
    BundleEvent,
    BundleState,
    BundleStates,
    IllegalTransition,
)

E, S = BundleEvent, BundleState


def test_a_change_during_a_load_is_due_when_the_load_has_ended() -> None:
    """A bundle that changes during its load is due when the load ends.

    Until then, the change does not affect the next time to act.
    """
    states = BundleStates()
    states.changed({"a", "b"}, 0)
    assert states.due(0) == {"a", "b"}
    assert states.due(0) == set()
    states.apply("a", E.LOAD, 0)
    states.changed({"a", "b"}, 1)
    assert states.due(1) == {"b"}
    assert states.next_time(1) is None
    states.apply("a", E.LOADED, 2)
    assert states.next_time(2) == 1
    assert states.due(2) == {"a"}
    assert states.next_time(2) is None


def test_a_comparison_that_was_put_off_does_not_delay_a_change() -> None:
    """A postponed comparison does not delay a change, which is due at its own time."""
    states = BundleStates()
    states.changed({"a"}, 1)
    states.check("a", 60)
    assert states.due(1) == {"a"}
    states.check("a", 60)
    assert states.next_time(1) == 60
    assert not states.due(59)
    assert states.due(60) == {"a"}


@pytest.mark.parametrize("works", [True, False])
def test_a_model_to_unload_is_reloaded_and_unloaded_all_the_same(works: bool) -> None:
    """If a model waits for its unload and its stub dies, the model is reloaded first.

    The model is unloaded even if the reload fails.
    """
    states = BundleStates()
    states.apply("slow", E.LOAD, 0)
    states.orphan("a", (), 0)
    states.apply("a", E.STUB_DIED, 1)
    states.apply("slow", E.LOADED, 2)
    assert states.unloadable(2) == []
    if works:
        states.apply("a", E.LOADED, 3)
    else:
        states.fail("a", "why", 3, wall=0)
    assert states.unloadable(3) == ["a"]
    states.apply("a", E.UNLOAD, 3)
    assert states.unloading == {"a"}
    states.apply("a", E.UNLOADED, 4)
    assert states.unloadable(4) == []
    assert not states.failures


def test_failures_are_retried_ever_more_seldom() -> None:
    """Retries follow after 10, 20, 40 seconds and so on up to a maximum. A failure keeps the time of its first attempt."""
    states, now, pauses = BundleStates(), 0.0, []
    for _ in range(9):
        states.conclude("a", E.LOAD, now)
        failure = states.fail("a", "why", now, wall=7 + now)
        at = states.next_time(now)
        assert at is not None
        assert not states.due(at - 0.1)
        assert states.due(at) == {"a"}
        pauses.append(at - now)
        now = at
    assert pauses[:4] == [10, 20, 40, 80]
    assert pauses[-1] == RETRY_MAX_S
    assert (failure.since, failure.tries) == (7, 9)


def test_another_bundle_starts_the_count_again() -> None:
    """A changed bundle is tried at once. If it fails, its failures are counted from one again."""
    states = BundleStates()
    for _ in range(5):
        states.fail("a", "why", 0, wall=1)
    states.changed({"a"}, 0)
    assert states.due(0) == {"a"}
    assert states.failures["a"].text == "why"
    failure = states.fail("a", "another reason", 0, wall=2)
    assert (failure.since, failure.tries) == (2, 1)
    states.conclude("a", E.MATCHED, 0)
    assert not states.failures
    assert states.next_time(0) is None


def test_broken_bundles_wait_for_another_bundle() -> None:
    """A broken bundle is reported when it breaks and when its reason changes. It is not retried until the bundle changes."""
    states = BundleStates()
    assert set(states.set_broken({"a": "why", "b": "why"}, 0, wall=1)) == {"a", "b"}
    assert states.set_broken({"a": "why", "b": "also"}, 0, wall=2).keys() == {"b"}
    assert states.failures["a"].since == 1
    assert states.next_time(0) is None
    assert states.set_broken({}, 0, wall=3) == {}
    assert not states.failures


def test_a_broken_bundle_stays_so_while_the_stub_of_its_old_version_is_replaced() -> None:
    """The failure of a broken bundle stays while the stub of its old version is replaced, even if the replacement fails."""
    states = BundleStates()
    states.set_broken({"a": "no manifest"}, 0, wall=1)
    for _ in range(2):
        states.apply("a", E.STUB_DIED, 1)
        assert states.set_broken({"a": "no manifest"}, 1, wall=2) == {}
        states.fail("a", "no memory", 2, wall=3)
        assert (states.state("a"), states.failures["a"].text) == (S.BROKEN, "no manifest")
    states.apply("a", E.STUB_DIED, 3)
    states.set_broken({}, 3, wall=4)
    states.apply("a", E.LOADED, 4)
    assert (states.state("a"), states.failures) == (S.SERVED, {})


def test_a_failed_reload_is_told_from_a_failed_load() -> None:
    """A failed reload after a stub's death and a failed load of a bundle are different states."""
    states = BundleStates()
    states.apply("a", E.STUB_DIED, 0)
    states.fail("a", "why", 1, wall=1)
    assert states.state("a") is S.RELOAD_FAILED
    states.conclude("a", E.LOAD, 2)
    states.fail("a", "why", 3, wall=3)
    assert states.state("a") is S.FAILED


def test_an_unload_waits_for_the_loads_that_began_before() -> None:
    """An unload waits for loads that began before it, for at most ten minutes. It does not wait for later loads."""
    states = BundleStates()
    states.apply("new", E.LOAD, 0)
    states.orphan("old", (), 0)
    states.apply("later", E.LOAD, 1)
    assert states.unloadable(1) == []
    states.apply("new", E.LOADED, 1)
    assert states.unloadable(1) == ["old"]
    states.apply("later", E.LOADED, 1)
    states.apply("hangs", E.LOAD, 2)
    states.orphan("gone", ("meta",), 2)
    assert states.carriers("gone") == ("meta",)
    assert states.unloadable(3) == ["old"]
    assert states.next_time(3) == 2 + LOAD_PATIENCE_S
    assert states.unloadable(2 + LOAD_PATIENCE_S) == ["old", "gone"]


def test_a_bundle_that_is_back_is_not_unloaded() -> None:
    """A bundle that returns is not unloaded. A bundle that vanishes during its load is checked again after the load."""
    states = BundleStates()
    for name in ("a", "b", "c", "d"):
        states.orphan(name, (), 0)
    states.changed({"a"}, 0)
    states.retain("b", 0)
    states.conclude("c", E.LOAD, 0)
    assert states.unloadable(0) == ["d"]
    states.orphan("c", (), 1)
    states.apply("c", E.LOADED, 2)
    assert states.due(2) == {"a", "c"}


def test_an_illegal_transition_tells_the_history() -> None:
    """An illegal transition raises an error with the state, the event and the history."""
    states = BundleStates()
    states.apply("a", E.LOAD, 1.5)
    states.apply("a", E.LOADED, 2.5)
    with pytest.raises(IllegalTransition, match="a: no event 'unloaded' in the state served") as caught:
        states.apply("a", E.UNLOADED, 3)
    assert "1.5 s: unchecked -> loading (load); 2.5 s: loading -> served (loaded)" in str(caught.value)


BUSY = {S.LOADING, S.UNLOADING, S.RELOADING, S.RELOADING_BROKEN, S.RELOADING_UNWANTED}
NAMES = st.sampled_from("abc")


@given(
    st.lists(
        st.tuples(NAMES, st.sampled_from([*E, "changed", "later", "orphan", "broken", "match", "due"])),
        max_size=60,
    )
)
def test_no_sequence_of_events_leaves_a_bundle_stuck(steps: list[tuple[str, str]]) -> None:
    """After any events, each failure, change or pending unload has a time for its next step, and no operation stays open."""
    states, broken = BundleStates(), dict[str, str]()
    for now, (name, step) in enumerate(steps):
        before = states.state(name)
        match step:
            case "changed":
                states.changed({name}, now)
            case "later":
                states.check(name, now + 5)
            case "orphan":
                states.orphan(name, (), now)
            case "broken":
                broken = {} if name in broken else broken | {name: "why"}
                states.set_broken(broken, now, wall=0)
            case "due":
                states.due(now)
            case "match" if before not in BUSY:
                assert states.conclude(name, E.MATCHED, now) is S.SERVED
            case E.FAIL:
                states.fail(name, "why", now, wall=0)
            case BundleEvent() if (before, step) in TRANSITIONS:
                assert states.apply(name, step, now) is TRANSITIONS[before, step]
            case BundleEvent():
                with pytest.raises(IllegalTransition):
                    states.apply(name, step, now)
        assert states.busy == {bundle for bundle in "abc" if states.state(bundle) in BUSY}
        assert set(states.unloadable(now)) <= {
            bundle for bundle in "abc" if states.state(bundle) is S.UNLOAD_PENDING
        }
    for name in states.busy:
        event = E.UNLOADED if states.state(name) is S.UNLOADING else E.LOADED
        states.apply(name, event, 100)
    assert not states.busy
    for name in states.due(10_000):
        assert name not in states.due(10_000)
    pending = {name for name in "abc" if states.state(name) is S.UNLOAD_PENDING}
    assert set(states.unloadable(10_000)) == pending
