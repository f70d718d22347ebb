"""The choice of a worker for each request, and the numbers of outstanding requests."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.placement.contract import Routes
from rsrv.placement.routing import Choice, Router
from rsrv.settings_fleet import GatewayMode

MODES: tuple[GatewayMode, ...] = ("round_robin", "least_outstanding", "lpt_packing")
WORKERS = ("w0", "w1", "w2", "w3")
MODELS = ("a", "b", "c")


def packed(*placed: str, quantum: int = 1, **rest: object) -> Router:
    router = Router("lpt_packing")
    router.update({"a": Routes(ready=WORKERS, placed=placed, quantum=quantum, **rest)})  # type: ignore[arg-type]
    return router


def chosen(router: Router, model: str = "a", items: int = 1) -> Choice:
    choice = router.select(model, items)
    assert choice is not None
    return choice


@pytest.mark.parametrize("mode", MODES)
def test_a_model_without_workers_has_no_choice(mode: GatewayMode) -> None:
    """An unknown model, or one that is ready nowhere, has no worker. Its requests are not counted."""
    router = Router(mode)
    router.update({"nowhere": Routes(ready=())})

    assert router.select("unknown") is None
    assert router.select("nowhere") is None
    assert router.measured("unknown") is None
    assert router.outstanding() == {}


def test_round_robin_has_a_cursor_for_each_model() -> None:
    """Each model's requests go to all of its workers in turn, independent of other models."""
    router = Router("round_robin")
    router.update({"a": Routes(ready=WORKERS), "b": Routes(ready=WORKERS[:2])})

    got = [chosen(router, model).worker for model in "aababaabb"]

    assert [w for w, model in zip(got, "aababaabb", strict=True) if model == "a"] == [
        "w0",
        "w1",
        "w2",
        "w3",
        "w0",
    ]
    assert [w for w, model in zip(got, "aababaabb", strict=True) if model == "b"] == ["w1", "w0", "w1", "w0"]


def test_the_first_requests_of_many_models_go_to_all_workers() -> None:
    """The first requests of many models are spread over the workers."""
    router = Router("round_robin")
    router.update({f"m{n}": Routes(ready=WORKERS) for n in range(8)})

    assert sorted(chosen(router, f"m{n}").worker for n in range(8)) == sorted(2 * WORKERS)


@given(st.integers(1, 7), st.lists(st.sampled_from(MODELS), max_size=200))
def test_round_robin_is_fair(workers: int, models: list[str]) -> None:
    """With round robin, the numbers of a model's requests at two workers never differ by more than one."""
    router = Router("round_robin")
    names = tuple(f"w{n}" for n in range(workers))
    router.update({model: Routes(ready=names) for model in MODELS})
    had: dict[str, Counter[str]] = {model: Counter(dict.fromkeys(names, 0)) for model in MODELS}

    for model in models:
        had[model][chosen(router, model).worker] += 1

        assert max(had[model].values()) - min(had[model].values()) <= 1


def test_least_outstanding_weighs_all_models_together() -> None:
    """With least outstanding, a worker with one expensive request is as busy as one with five cheap requests."""
    router = Router("least_outstanding")
    both = WORKERS[:2]
    router.update({"a": Routes(ready=both, charge=0.1), "b": Routes(ready=both, charge=0.02)})

    dear = chosen(router, "a")
    cheap = [chosen(router, "b").worker for _ in range(5)]

    assert dear.worker == "w0"
    assert cheap == ["w1"] * 5
    assert {chosen(router, "b").worker for _ in range(2)} == set(both)


def test_idle_workers_take_turns() -> None:
    """If no request is outstanding, the workers take turns."""
    router = Router("least_outstanding")
    router.update({"a": Routes(ready=WORKERS)})
    had = []
    for _ in range(8):
        choice = chosen(router)
        had.append(choice.worker)
        router.release(choice)

    assert had == [*WORKERS, *WORKERS]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("placed", [True, False])
def test_a_worker_that_is_named_twice_gets_twice_as_much(mode: GatewayMode, idle: bool, placed: bool) -> None:
    """If a server is listed twice among three entries, it gets two thirds of the requests, one by one or concurrently."""
    named = ("w0", "w1", "w1")
    router = Router(mode)
    router.update({"a": Routes(ready=named, placed=named if placed else ())})
    had: Counter[str] = Counter()
    for _ in range(300):
        choice = chosen(router)
        had[choice.worker] += 1
        if idle:
            router.release(choice)

    assert abs(had["w1"] - 200) <= 1
    assert {*chosen(router).others} < {"w0", "w1"}


def test_items_or_requests_count() -> None:
    """A request adds its number of items, or 1, to the load, multiplied by the charge of its routes."""
    for per_item, load in ((True, 16.0), (False, 2.0)):
        router = Router("least_outstanding")
        router.update({"a": Routes(ready=("w0",), charge=2.0, per_item=per_item)})
        chosen(router, items=8)

        assert router.loads() == {"w0": load}


@pytest.mark.parametrize("fill", ["least", "rr"])
@given(data=st.data())
def test_a_run_is_a_whole_quantum(fill: str, data: st.DataObject) -> None:
    """Concurrent requests of one item go to one replica until it has a whole quantum, and then to the next one."""
    quantum = data.draw(st.integers(1, 9))
    placed = WORKERS[: data.draw(st.integers(2, 4))]
    router = packed(*placed, quantum=quantum, fill=fill)

    got = [chosen(router).worker for _ in range(3 * quantum * len(placed))]

    runs = [got[n : n + quantum] for n in range(0, len(got), quantum)]
    assert all(len(set(run)) == 1 for run in runs)
    assert all(count == 3 for count in Counter(run[0] for run in runs).values())


def test_a_request_that_does_not_fit_opens_the_next_run() -> None:
    """Requests are not divided: in a quantum of eight, a run has two requests of three items."""
    router = packed("w0", "w1", quantum=8)

    assert [chosen(router, items=3).worker for _ in range(4)] == ["w0", "w0", "w1", "w1"]
    assert chosen(router, items=20).worker == "w0"


def test_a_run_ends_when_nothing_is_under_way() -> None:
    """A run at a replica ends when no request is outstanding, so single requests go to all replicas in turn."""
    router = packed("w0", "w1", "w2", quantum=32)
    had = []
    for _ in range(6):
        choice = chosen(router)
        had.append(choice.worker)
        router.release(choice)

    assert had == ["w0", "w1", "w2"] * 2


def test_a_run_ends_where_the_model_has_gone() -> None:
    """If a new table does not have the replica of a run, the next request goes to another replica."""
    router = packed("w0", "w1", quantum=8)
    assert chosen(router).worker == "w0"
    router.update({"a": Routes(ready=WORKERS, placed=("w1", "w2"), quantum=8)})

    assert chosen(router).worker in ("w1", "w2")


def test_a_replica_that_is_stuck_gets_one_quantum() -> None:
    """A replica that does not answer gets one quantum, while others have fewer outstanding quanta."""
    router = packed("w0", "w1", quantum=4)
    stuck = 0
    for _ in range(100):
        choice = chosen(router)
        if choice.worker == "w0":
            stuck += 1
        else:
            router.release(choice)

    assert stuck == 4


def test_fill_least_opens_where_the_load_is_least() -> None:
    """With the fill `least`, the load of other models decides between equal replicas. With `rr`, the turn decides."""
    for fill, expected in (("least", "w1"), ("rr", "w0")):
        router = Router("lpt_packing")
        routes = Routes(ready=WORKERS, placed=("w0", "w1"), quantum=4, fill=fill)  # type: ignore[arg-type]
        router.update({"a": routes, "b": Routes(ready=WORKERS, placed=("w0",))})
        chosen(router, "b")

        assert chosen(router).worker == expected


def test_spread_goes_where_the_fewest_items_are() -> None:
    """With a quantum of 1, each request goes to the replica with the fewest items of its model."""
    router = packed("w0", "w1", quantum=1)

    assert [chosen(router, items=n).worker for n in (5, 1, 1, 1)] == ["w0", "w1", "w1", "w1"]


def test_failover_order() -> None:
    """A failover goes to the other replicas, the least busy first, and then to other workers where the model is ready."""
    router = Router("lpt_packing")
    router.update(
        {
            "a": Routes(ready=WORKERS, placed=("w0", "w1", "w2"), quantum=1),
            "b": Routes(ready=WORKERS, placed=("w1",), charge=5.0),
        }
    )
    chosen(router, "b")

    choice = chosen(router)

    assert choice.worker == "w0"
    assert choice.others == ("w2", "w1", "w3")


def test_failover_moves_what_is_counted() -> None:
    """After a failover, a request is counted at its new worker only. The list of other workers does not change."""
    router = Router("least_outstanding")
    router.update({"a": Routes(ready=("w0", "w1", "w2"), charge=3.0)})
    choice = chosen(router)
    others = choice.others

    router.move(choice, others[0])
    assert choice.worker == others[0]
    assert router.outstanding() == {("a", others[0]): 1}
    assert router.loads() == {"w0": 0.0, "w1": 3.0, "w2": 0.0}
    assert choice.others == others

    router.release(choice)
    router.release(choice)
    router.move(choice, "w2")
    assert router.outstanding() == {}
    assert set(router.loads().values()) == {0.0}


def test_a_worker_that_leaves_and_returns_has_kept_its_load() -> None:
    """Requests in progress at a worker that leaves the table are still in its load when it returns."""
    router = Router("least_outstanding")
    both = {"a": Routes(ready=("w0", "w1"))}
    router.update(both)
    choice = chosen(router)
    router.update({"a": Routes(ready=("w1",))})
    router.update({})
    assert router.outstanding() == {("a", "w0"): 1}
    router.update(both)

    assert (choice.worker, chosen(router).worker) == ("w0", "w1")
    router.release(choice)
    assert router.outstanding() == {("a", "w1"): 1}


def test_what_is_gone_is_forgotten() -> None:
    """Nothing is kept of models and workers that have left the table, after their requests have ended."""
    router = Router("lpt_packing")
    for n in range(50):
        name = f"w{n}"
        router.update({f"m{n}": Routes(ready=(name,), placed=(name,))})
        router.release(chosen(router, f"m{n}"))
    router.update({})

    assert (router.loads(), router.outstanding(), router._models) == ({}, {}, {})


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Routes]:
    table = {}
    for model in draw(st.sets(st.sampled_from(MODELS))):
        ready = sorted(draw(st.sets(st.sampled_from(WORKERS))))
        placed = sorted(draw(st.sets(st.sampled_from(ready)))) if ready else []
        table[model] = Routes(
            ready=tuple(ready),
            placed=tuple(placed),
            quantum=draw(st.integers(1, 4)),
            fill=draw(st.sampled_from(["least", "rr"])),
            charge=draw(st.floats(0, 1e3)),
            per_item=draw(st.booleans()),
        )
    return table


@given(st.sampled_from(MODES), st.lists(tables(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_every_counter_is_zero_at_the_end(
    mode: GatewayMode, updates: list[dict[str, Routes]], random: Random
) -> None:
    """After any choices, moves, repeated releases and updates, the count is the number of requests that were not released.

    When all requests are released, the count is 0.
    """
    router = Router(mode)
    under_way: list[Choice] = []
    released: list[Choice] = []
    for table in updates:
        router.update(table)
        for _ in range(random.randrange(20)):
            choice = router.select(random.choice(MODELS), random.choice([-1, 0, 1, 2, 3, 100]))
            if choice is None:
                continue
            routes = table[choice._model.name]
            assert choice.worker in (routes.placed or routes.ready)
            assert {choice.worker, *choice.others} == set(routes.ready)
            if random.random() < 0.3 and choice.others:
                router.move(choice, random.choice(choice.others))
            under_way.append(choice)
        random.shuffle(under_way)
        for _ in range(random.randrange(len(under_way) + 1)):
            released.append(under_way.pop())
            router.release(released[-1])
        if released:
            router.release(random.choice(released))

        assert router.outstanding() == Counter((c._model.name, c.worker) for c in under_way)
        assert all(load >= 0 for load in router.loads().values())

    for choice in under_way:
        router.release(choice)
    assert router.outstanding() == {}
    assert set(router.loads().values()) <= {0.0}
    assert all(share.items == 0 for model in router._models.values() for share in model.shares.values())
    router.update({})
    assert (router._models, router._loads) == ({}, {})
