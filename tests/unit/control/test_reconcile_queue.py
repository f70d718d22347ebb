"""Who is loaded and unloaded when."""

from __future__ import annotations

from rsrv.control.reconcile_queue import LONGEST_PAUSE, PATIENCE, ReconcileQueue
from rsrv.control.stub_health import StubHealth


def test_what_is_under_way_is_not_begun_again() -> None:
    """It is due again when it has ended."""
    rounds = ReconcileQueue()
    rounds.changed({"a", "b"})
    assert rounds.due(0) == {"a", "b"}
    assert rounds.due(0) == set()
    rounds.begin("a", 0)
    rounds.changed({"a", "b"})
    assert rounds.due(1) == {"b"}
    rounds.done("a")
    assert rounds.due(1) == {"a"}


def test_what_could_not_be_looked_at_is_looked_at_later() -> None:
    """Not before what is under way has ended, and nobody wakes up for it until then."""
    rounds = ReconcileQueue()
    rounds.begin("a", 0)
    rounds.later("a", 5)
    assert rounds.next_time() is None
    assert not rounds.due(6)
    rounds.done("a")
    assert rounds.next_time() == 5
    assert rounds.due(6) == {"a"}
    assert rounds.next_time() is None


def test_who_leaves_is_mended_and_leaves_all_the_same() -> None:
    """After what it waits for; whether the mending works or not."""
    for works in (True, False):
        rounds = ReconcileQueue()
        rounds.begin("slow", 0)
        rounds.leave("a")
        rounds.begin("a", 1, mends=True)
        rounds.done("slow")
        assert rounds.leavers(2) == []
        if works:
            rounds.done("a")
        else:
            rounds.failed("a", "why", 3, wall=0)
        assert rounds.leavers(3) == ["a"]
        rounds.begin("a", 3)
        rounds.done("a")
        assert rounds.leavers(4) == []


def test_failures_are_tried_again_ever_more_seldom() -> None:
    """After 10, 20, 40 seconds, and at last every ten minutes; since when it fails stays."""
    rounds, now, pauses = ReconcileQueue(), 0.0, []
    for _ in range(9):
        rounds.begin("a", now)
        failure = rounds.failed("a", "why", now, wall=7 + now)
        at = rounds.next_time()
        assert at is not None
        assert not rounds.due(at - 0.1)
        assert rounds.due(at) == {"a"}
        pauses.append(at - now)
        now = at
    assert pauses[:4] == [10, 20, 40, 80]
    assert pauses[-1] == LONGEST_PAUSE
    assert (failure.since, failure.tries) == (7, 9)


def test_another_bundle_starts_the_count_anew() -> None:
    """It is tried at once, and its failure is the first."""
    rounds = ReconcileQueue()
    for _ in range(5):
        rounds.failed("a", "why", 0, wall=1)
    rounds.changed({"a"})
    assert rounds.due(0) == {"a"}
    assert rounds.failures["a"].text == "why"
    failure = rounds.failed("a", "another reason", 0, wall=2)
    assert (failure.since, failure.tries) == (2, 1)
    rounds.done("a")
    assert not rounds.failures


def test_broken_bundles_wait_for_another_bundle() -> None:
    """They are reported when they break, and when they do for another reason."""
    rounds = ReconcileQueue()
    assert set(rounds.broken({"a": "why", "b": "why"}, wall=1)) == {"a", "b"}
    assert rounds.broken({"a": "why", "b": "also"}, wall=2).keys() == {"b"}
    assert rounds.failures["a"].since == 1
    assert rounds.next_time() is None
    assert rounds.broken({}, wall=3) == {}
    assert not rounds.failures


def test_who_leaves_waits_for_those_that_load() -> None:
    """Only for those that began before, and not for ever."""
    rounds = ReconcileQueue()
    rounds.begin("new", 0)
    rounds.leave("old")
    rounds.begin("later", 1)
    assert rounds.leavers(1) == []
    rounds.done("new")
    assert rounds.leavers(1) == ["old"]
    rounds.done("later")
    rounds.begin("hangs", 2)
    rounds.leave("gone")
    assert rounds.leavers(3) == ["old"]
    assert rounds.next_time() == 2 + PATIENCE
    assert rounds.leavers(2 + PATIENCE) == ["old", "gone"]


def test_who_came_back_does_not_leave() -> None:
    """Wanted again, or told to stay, or being loaded."""
    rounds = ReconcileQueue()
    for name in ("a", "b", "c", "d"):
        rounds.leave(name)
    rounds.changed({"a"})
    rounds.stay("b")
    rounds.begin("c", 0)
    assert rounds.leavers(0) == ["d"]


# --- stubs ----------------------------------------------------------------------------------------------------------


def test_a_stub_is_dead_when_two_looks_agree() -> None:
    """Half a second apart; one that was only late is not."""
    mending = StubHealth()
    assert not mending.look({"a", "b"}, {"a"}, 0.0, 20.0)
    assert mending.suspicious
    assert not mending.look({"a", "b"}, {"b"}, 0.0, 20.4)
    assert mending.look({"a", "b"}, {"b"}, 0.0, 20.9) == {"a"}


def test_what_triton_does_not_call_ready_is_not_dead() -> None:
    """It was unloaded, or is being loaded."""
    mending = StubHealth()
    assert not mending.look(set(), set(), 0.0, 20.0)
    assert not mending.look(set(), set(), 0.0, 30.0)
    assert not mending.suspicious


def test_stubs_have_time_to_find_a_new_runtime() -> None:
    """Ten seconds after it came up; when it does not come, fifteen, for then nobody is there to start it."""
    mending = StubHealth()
    assert not mending.look({"a"}, set(), 100.0, 101.0)
    assert not mending.look({"a"}, set(), 100.0, 109.9)
    assert mending.look({"a"}, set(), 100.0, 110.0) == {"a"}
    assert not mending.look({"a"}, set(), None, 120.0)
    assert not mending.look({"a"}, set(), None, 134.9)
    assert mending.look({"a"}, set(), None, 135.0) == {"a"}
    assert not mending.look({"a"}, set(), 136.0, 137.0)
    assert not mending.look({"a"}, set(), None, 150.0)


def test_what_was_seen_to_has_time_to_start() -> None:
    """Then it may be found dead again."""
    mending = StubHealth()
    mending.pardon("a", 30.0)
    assert not mending.look({"a"}, set(), 0.0, 20.0)
    assert not mending.look({"a"}, set(), 0.0, 29.0)
    assert not mending.look({"a"}, set(), 0.0, 30.0)
    assert mending.look({"a"}, set(), 0.0, 30.5) == {"a"}
