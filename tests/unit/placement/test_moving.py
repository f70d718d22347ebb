"""How models get where the packing wants them: weights first, then requests, then the old home is freed."""

from __future__ import annotations

from rsrv.placement.contract import Act, WeightAction, WeightsView
from rsrv.placement.moves import ASK_AGAIN_S, MOVE_LIMIT_S, MOVES_AT_ONCE
from tests.unit.placement.fleet import ROUND_S, Fleet, Model, Scene, Script, homes


def moving(fleet: Fleet | None = None) -> Scene:
    """Return a scene in which model a is at v, and an operator has it packed onto w."""
    scene = Scene(fleet or Fleet(["v", "w"], {"a": Model()}, load_s=3.0), Script(a=("v",)))
    scene.settle()
    scene.script.placed["a"] = ("w",)
    scene.planner.repack()
    return scene


def test_a_moved_model_is_warm_before_traffic_moves() -> None:
    """Weights first, then the table, and then the old home is freed."""
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
    """Prefetches are repeated, and after the limit the model stays at its home, where it is warm."""
    scene = moving()
    asked = 0
    for _ in range(round(MOVE_LIMIT_S / ROUND_S) + 2):
        plan = scene.plan(do=False)
        asked += len(plan.steps)
        assert plan.table["a"].placed == ("v",)

    assert 3 <= asked <= 10
    assert scene.status().models[0].moving_to == ()


def test_weights_that_do_not_come_to_a_first_home_are_asked_for_again() -> None:
    """Requests go there meanwhile, but none may come, so the first prefetch must not be the only one."""
    scene = Scene(Fleet(["v", "w"], {"a": Model()}, load_s=3.0), Script(a=("v",)))
    assert [scene.plan(do=False).steps for _ in range(round(ASK_AGAIN_S / ROUND_S))] == [
        (WeightAction(Act.PREFETCH, "v", "a"),),
        *[()] * (round(ASK_AGAIN_S / ROUND_S) - 1),
    ]
    assert scene.plan().steps == (WeightAction(Act.PREFETCH, "v", "a"),)
    scene.settle()
    assert scene.fleet.resident("v") == {"a"}


def test_moves_to_one_worker_are_few_at_a_time() -> None:
    """A worker that gets many models loads two at a time, the busiest first, and all of them are there in the end."""
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
    """A move to a full worker begins when another model has left it, and nothing is evicted before."""
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
    """Neither of two moves that need the other's room first makes its model cold: both are given up."""
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model()}, budget=15)
    scene = Scene(fleet, Script(a=("v",), b=("w",)))
    scene.settle()
    scene.script.placed.update(a=("w",), b=("v",))
    scene.planner.repack()
    for _ in range(round(MOVE_LIMIT_S / ROUND_S) + 2):
        assert homes(scene.plan().table) == {"a": ("v",), "b": ("w",)}
        assert (fleet.resident("v"), fleet.resident("w")) == ({"a"}, {"b"})

    assert [one.moving_to for one in scene.status().models] == [(), ()]


def test_a_copy_that_is_not_placed_makes_room() -> None:
    """A move evicts an idle copy of a model that is warm at its own home, and no other."""
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
    """Two moves that need room evict two copies in one plan, and none of them twice."""
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
    """Without its old home a model goes to the new one, cold, in the same plan."""
    scene = moving()
    scene.plan()
    scene.fleet.servers["v"].alive = False

    assert homes(scene.plan().table) == {"a": ("w",)}


def test_a_worker_with_the_weights_serves_in_between() -> None:
    """A worker with the model's weights serves after its home crashed, until the new home is warm."""
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
    """A second replica gets requests when it has the weights; the first one keeps them all until then."""
    scene = Scene(Fleet(["u", "v", "w"], {"a": Model()}, load_s=2.0), Script(a=("v",)))
    scene.settle()
    scene.planner.set_placement("a", replicas=2)
    scene.script.placed["a"] = ("u", "w")
    scene.fleet.copy("w", "a").weights = WeightsView.RESIDENT
    scene.planner.repack()

    assert homes(scene.plan().table) == {"a": ("v", "w")}
    assert homes(scene.settle(3.0).table) == {"a": ("u", "w")}


def test_the_old_home_keeps_the_weights_while_it_works() -> None:
    """Nothing is freed while requests wait or execute there, nor by the plan that changes the table."""
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
    """An old home to which another gateway's requests still go keeps its weights."""
    scene = moving()
    for _ in range(round(2 * MOVE_LIMIT_S / ROUND_S)):
        scene.fleet.copy("v", "a").requests += 1
        plan = scene.plan()

        assert Act.EVICT not in {step.act for step in plan.steps}


def test_a_model_that_comes_back_is_not_freed() -> None:
    """A home that is one again before it was freed keeps its weights."""
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
    """The busiest models have their weights fetched where more is placed than fits, and the others are not waited for."""
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
    """A model's work before its move does not count for its place; during the move, the target does."""
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
    """A worker that evicted a model at home reloads it with the next request, and gets no prefetch."""
    scene = Scene(Fleet(["v"], {"a": Model()}), Script())
    scene.settle()
    scene.fleet.copy("v", "a").weights = WeightsView.ABSENT

    assert scene.settle(20.0).steps == ()
    assert scene.fleet.resident("v") == set()


def test_a_model_that_was_warm_at_the_start_and_left_is_not_prefetched() -> None:
    """Weights that the planner found on the device, and that an idle limit then evicts, come back with the next request."""
    scene = Scene(Fleet(["v"], {"a": Model()}), Script())
    scene.fleet.copy("v", "a").weights = WeightsView.RESIDENT
    scene.settle()
    scene.fleet.copy("v", "a").weights = WeightsView.ABSENT

    assert all(scene.plan().steps == () for _ in range(40))


def test_a_planner_that_starts_prefetches_only_models_without_requests() -> None:
    """A model that has executed at its home and left before the start has not to arrive; a new model has."""
    scene = Scene(Fleet(["v"], {"a": Model(), "b": Model()}), Script())
    scene.fleet.copy("v", "a").requests = 7

    plans = [scene.plan() for _ in range(40)]
    assert {step for plan in plans for step in plan.steps} == {WeightAction(Act.PREFETCH, "v", "b")}


def test_traffic_does_not_wait_where_weights_are_swapped() -> None:
    """Requests move at once where weights are swapped, because prefetched weights might be evicted first."""
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
