"""How models move to where the packing places them: weights first, then requests, and then the old home frees its weights."""

from __future__ import annotations

from rsrv.placement.contract import Act, WeightAction, WeightsView
from rsrv.placement.moves import ASK_AGAIN_S, MOVE_LIMIT_S, MOVES_AT_ONCE
from tests.unit.placement.fleet import ROUND_S, Fleet, Model, Scene, Script, homes


def moving(fleet: Fleet | None = None) -> Scene:
    """Return a scene in which model `a` is at `v`, and a repack by an operator moves it to `w`."""
    scene = Scene(fleet or Fleet(["v", "w"], {"a": Model()}, load_s=3.0), Script(a=("v",)))
    scene.settle()
    scene.script.placed["a"] = ("w",)
    scene.planner.repack()
    return scene


def test_a_moved_model_is_warm_before_traffic_moves() -> None:
    """A model moves in this order: its weights are prefetched, the table changes, and the old home evicts the weights."""
    scene = moving()
    seen = []
    for _ in range(12):
        plan = scene.plan()
        seen.append((plan.table["a"].placed, scene.fleet.copy("w", "a").weights, plan.steps))
        if plan.table["a"].placed == ("v",):
            assert scene.status().models[0].moving_to == ("w",)

    assert [steps for _, _, steps in seen if steps] == [
        (WeightAction(Act.PREFETCH, "w", "a"),),
        (WeightAction(Act.EVICT, "v", "a"),),
    ]
    assert all(weights is WeightsView.RESIDENT for placed, weights, _ in seen if placed == ("w",))
    assert [placed for placed, _, _ in seen] == [("v",)] * 6 + [("w",)] * 6
    assert scene.fleet.resident("v") == set()


def test_weights_that_do_not_come_are_asked_for_again_and_then_given_up() -> None:
    """If prefetched weights do not come, the prefetch is repeated.

    After a limit, the move is given up, and the model stays.
    """
    scene = moving()
    steps = 0
    for _ in range(round(MOVE_LIMIT_S / ROUND_S) + 2):
        plan = scene.plan(do=False)
        steps += len(plan.steps)
        assert plan.table["a"].placed == ("v",)

    assert 3 <= steps <= 10
    assert scene.status().models[0].moving_to == ()


def test_weights_that_do_not_come_to_a_first_home_are_asked_for_again() -> None:
    """If the weights of a model do not arrive at its first home, the prefetch is repeated.

    There may be no requests that would load them.
    """
    scene = Scene(Fleet(["v", "w"], {"a": Model()}, load_s=3.0), Script(a=("v",)))
    assert [scene.plan(do=False).steps for _ in range(round(ASK_AGAIN_S / ROUND_S))] == [
        (WeightAction(Act.PREFETCH, "v", "a"),),
        *[()] * (round(ASK_AGAIN_S / ROUND_S) - 1),
    ]
    assert scene.plan().steps == (WeightAction(Act.PREFETCH, "v", "a"),)
    scene.settle()
    assert scene.fleet.resident("v") == {"a"}


def test_moves_to_one_worker_are_few_at_a_time() -> None:
    """If many models move to a worker, it loads two at a time, the busiest first, until all have moved."""
    models = {name: Model() for name in "abcdef"}
    scene = Scene(Fleet(["v", "w"], models, load_s=2.0), Script(**dict.fromkeys("abcdef", ("v",))))
    scene.settle()
    for n in range(8):
        scene.fleet.copy("v", "e").device_s = 0.1 * n
        scene.plan()
    scene.script.placed.update(dict.fromkeys("abcdef", ("w",)))
    scene.planner.repack()
    first = scene.plan()
    assert [step.model for step in first.steps] == ["e", "a"]

    for _ in range(40):
        loading = [n for n in models if scene.fleet.copy("w", n).weights is WeightsView.LOADING]
        assert len(loading) <= MOVES_AT_ONCE
        plan = scene.plan()
    assert set(homes(plan.table).values()) == {("w",)}


def test_a_move_waits_for_room() -> None:
    """A move to a full worker waits until another model has left it."""
    fleet = Fleet(["u", "v", "w"], {"a": Model(), "b": Model()}, budget=15)
    scene = Scene(fleet, Script(a=("v",), b=("w",)))
    scene.settle()
    scene.script.placed.update(a=("w",), b=("u",))
    scene.planner.repack()
    seen = []
    for _ in range(20):
        plan = scene.plan()
        seen.append((homes(plan.table)["b"], fleet.copy("w", "a").weights is WeightsView.ABSENT))

    assert homes(plan.table) == {"a": ("w",), "b": ("u",)}
    assert {absent for home, absent in seen if home == ("w",)} == {True}


def test_two_full_workers_do_not_exchange_models() -> None:
    """Two full workers cannot exchange models without making one cold, so both moves are given up."""
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model()}, budget=15)
    scene = Scene(fleet, Script(a=("v",), b=("w",)))
    scene.settle()
    scene.script.placed.update(a=("w",), b=("v",))
    scene.planner.repack()
    for _ in range(round(MOVE_LIMIT_S / ROUND_S) + 2):
        assert homes(scene.plan().table) == {"a": ("v",), "b": ("w",)}
        assert (fleet.resident("v"), fleet.resident("w")) == ({"a"}, {"b"})

    assert [model.moving_to for model in scene.status().models] == [(), ()]


def test_a_copy_that_is_not_placed_makes_room() -> None:
    """A move to a full worker evicts an idle copy of a model that has its home elsewhere, and no other weights."""
    fleet = Fleet(["u", "v", "w"], {"a": Model(), "b": Model(), "c": Model()}, budget=20)
    scene = Scene(fleet, Script(a=("v",), b=("u",), c=("w",)))
    scene.settle()
    fleet.copy("w", "b").weights = WeightsView.RESIDENT
    scene.script.placed["a"] = ("w",)
    scene.planner.repack()

    assert scene.plan().steps == (WeightAction(Act.EVICT, "w", "b"),)
    assert homes(scene.settle().table) == {"a": ("w",), "b": ("u",), "c": ("w",)}
    assert fleet.resident("w") == {"a", "c"}


def test_copies_that_are_not_placed_make_room_for_several_models() -> None:
    """If two moves need room, one plan evicts several copies, and none twice."""
    models = {name: Model() for name in "abcd"}
    fleet = Fleet(["v", "w"], models, budget=40)
    scene = Scene(fleet, Script(**dict.fromkeys("abcd", ("v",))))
    scene.settle()
    fleet.servers["w"].budget = 20
    for name in "cd":
        fleet.copy("w", name).weights = WeightsView.RESIDENT
    scene.script.placed.update(a=("w",), b=("w",))
    scene.planner.repack()

    evicted = [step.model for step in scene.plan(do=False).steps if step.act is Act.EVICT]
    assert sorted(evicted) == sorted({*evicted}) != []


def test_a_move_away_from_a_dead_worker_waits_for_nothing() -> None:
    """If its old home is dead, a model moves in the same plan, without waiting for its weights."""
    scene = moving()
    scene.plan()
    scene.fleet.servers["v"].alive = False

    assert homes(scene.plan().table) == {"a": ("w",)}


def test_a_worker_with_the_weights_serves_in_between() -> None:
    """If a model's home crashes during a move, another worker with the weights serves until the new home has them."""
    fleet = Fleet(["u", "v", "w"], {"a": Model()}, load_s=3.0)
    scene = Scene(fleet, Script(a=("v",)))
    scene.settle()
    fleet.copy("u", "a").weights = WeightsView.RESIDENT
    scene.script.placed["a"] = ("w",)
    fleet.servers["v"].alive = False

    assert homes(scene.plan().table) == {"a": ("u",)}
    assert homes(scene.settle(4.0).table) == {"a": ("w",)}
    scene.settle(2.0)
    assert fleet.resident("u") == set()


def test_replicas_are_added_when_they_are_warm() -> None:
    """A new replica gets requests only when it has the weights."""
    scene = Scene(Fleet(["u", "v", "w"], {"a": Model()}, load_s=2.0), Script(a=("v",)))
    scene.settle()
    scene.planner.set_placement("a", replicas=2)
    scene.script.placed["a"] = ("u", "w")
    scene.fleet.copy("w", "a").weights = WeightsView.RESIDENT
    scene.planner.repack()

    assert homes(scene.plan().table) == {"a": ("v", "w")}
    assert homes(scene.settle(3.0).table) == {"a": ("u", "w")}


def test_the_old_home_keeps_the_weights_while_it_works() -> None:
    """The old home does not evict the weights while requests wait or execute there, and not in the plan that changes the table."""
    scene = moving()
    copy = scene.fleet.copy("v", "a")
    copy.weights = WeightsView.LOADING
    copy.until, copy.queued = 1e9, 3
    for _ in range(40):
        plan = scene.plan()
        assert Act.EVICT not in {step.act for step in plan.steps}

    assert homes(plan.table) == {"a": ("w",)}
    copy.queued = 0
    assert scene.plan().steps == (WeightAction(Act.EVICT, "v", "a"),)


def test_an_old_home_that_others_use_is_left_to_them() -> None:
    """If another gateway still sends requests to the old home, its weights are not evicted."""
    scene = moving()
    for _ in range(round(2 * MOVE_LIMIT_S / ROUND_S)):
        scene.fleet.copy("v", "a").requests += 1
        plan = scene.plan()

        assert Act.EVICT not in {step.act for step in plan.steps}


def test_a_model_that_comes_back_is_not_freed() -> None:
    """If a model moves back before its old home has evicted the weights, they stay."""
    scene = moving()
    busy = scene.fleet.copy("v", "a")
    busy.queued = 0.6
    for _ in range(8):
        plan = scene.plan()
    assert homes(plan.table) == {"a": ("w",)}
    scene.script.placed["a"] = ("v",)
    scene.planner.repack()
    assert homes(scene.plan().table) == {"a": ("v",)}
    busy.queued = 0

    assert [step for _ in range(10) for step in scene.plan().steps] == [WeightAction(Act.EVICT, "w", "a")]


def test_what_cannot_stay_is_not_fetched() -> None:
    """If a worker's models do not fit into its memory together, only the busiest of them are prefetched.

    A move does not wait for weights that are not prefetched.
    """
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model()}, budget=15)
    scene = Scene(fleet, Script(a=("v",), b=("w",)))
    scene.settle()
    for n in range(8):
        fleet.copy("v", "a").device_s = 0.1 * n
        scene.plan()
    scene.script.placed.update(a=("w",))
    scene.planner.repack()
    plan = scene.plan(do=False)
    assert WeightAction(Act.PREFETCH, "w", "a") in plan.steps
    scene.script.placed.update(a=("v",), b=("v",))
    scene.planner.repack()
    plan = scene.plan(do=False)

    assert homes(plan.table) == {"a": ("v",), "b": ("v",)}
    assert plan.steps == ()
    assert [worker.oversubscribed for worker in scene.status().workers] == [True, False]
    assert any("v cannot hold" in warning for warning in scene.status().warnings)


def test_what_was_done_at_the_old_home_does_not_count() -> None:
    """A repack regards the new home of a moved model as its place, and the target of a move that is in progress.

    Executions at the old home do not count.
    """
    scene = moving()
    before = []
    for n in range(20):
        placed = homes(scene.plan().table)["a"]
        scene.fleet.copy(placed[0], "a").device_s += 0.5
        if n in (2, 19):
            scene.planner.repack()
            scene.plan()
            before.append((placed, scene.script.asked[-1][2]["a"]))

    assert before == [(("v",), ("w",)), (("w",), ("w",))]


def test_weights_evicted_at_their_home_are_not_prefetched_again() -> None:
    """If a worker evicts a model at its home, there is no prefetch. The next request loads it."""
    scene = Scene(Fleet(["v"], {"a": Model()}), Script())
    scene.settle()
    scene.fleet.copy("v", "a").weights = WeightsView.ABSENT

    assert scene.settle(20.0).steps == ()
    assert scene.fleet.resident("v") == set()


def test_a_model_that_was_warm_at_the_start_and_left_is_not_prefetched() -> None:
    """Weights that were resident at the planner's start are not prefetched after an idle limit has evicted them."""
    scene = Scene(Fleet(["v"], {"a": Model()}), Script())
    scene.fleet.copy("v", "a").weights = WeightsView.RESIDENT
    scene.settle()
    scene.fleet.copy("v", "a").weights = WeightsView.ABSENT

    assert all(scene.plan().steps == () for _ in range(40))


def test_a_planner_that_starts_prefetches_only_models_without_requests() -> None:
    """At its start, a planner prefetches a model that has executed nothing, and not one that was used and then evicted."""
    scene = Scene(Fleet(["v"], {"a": Model(), "b": Model()}), Script())
    scene.fleet.copy("v", "a").requests = 7

    plans = [scene.plan() for _ in range(40)]
    assert {step for plan in plans for step in plan.steps} == {WeightAction(Act.PREFETCH, "v", "b")}


def test_traffic_does_not_wait_where_weights_are_swapped() -> None:
    """If a worker's models do not fit into its memory together, a model moves there without waiting for its weights.

    The weights might be evicted before requests for the model arrive.
    """
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model()}, budget=15)
    scene = Scene(fleet, Script(a=("v",), b=("w",)))
    scene.settle()
    for n in range(8):
        fleet.copy("v", "a").device_s = 0.1 * n
        scene.plan()
    scene.script.placed.update(a=("w",))
    scene.planner.repack()
    plan = scene.plan(do=False)

    assert WeightAction(Act.PREFETCH, "w", "a") in plan.steps
    assert homes(plan.table) == {"a": ("w",), "b": ("w",)}
