"""The planner: when it repacks models, which numbers it uses, and its table."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from rsrv.placement.contract import Act, ModelView, WeightAction, WeightsView, WorkerView
from rsrv.placement.options import ModelOptions
from rsrv.placement.planner import SETTLE_S, Planner
from rsrv.placement.routing import Router
from tests.unit.placement.fleet import ROUND_S, Fleet, Model, Scene, Script, homes, options


def devices(*names: str) -> Fleet:
    """Return a fleet of one server with these numbered devices and two models."""
    fleet = Fleet(names, {"a": Model(), "b": Model()})
    for number, server in enumerate(fleet.servers.values()):
        server.device = number
    return fleet


@pytest.mark.parametrize("mode", ["round_robin", "least_outstanding"])
def test_other_modes_have_a_table_only(mode: str) -> None:
    """In modes without packing, each model has all workers where it is ready, and there are no steps."""
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model()})
    fleet.servers["w"].ready.discard("b")

    plan = Planner(options(mode=mode)).plan(fleet.views(), 0.0)

    assert {name: routes.ready for name, routes in plan.table.items()} == {"a": ("v", "w"), "b": ("v",)}
    assert set(homes(plan.table).values()) == {()}
    assert plan.steps == ()


@pytest.mark.parametrize(
    ("mode", "basis", "charge", "per_item", "reads_rows"),
    [
        ("round_robin", "compute", 1.0, False, False),
        ("least_outstanding", "requests", 1.0, False, False),
        ("least_outstanding", "items", 1.0, True, True),
        ("least_outstanding", "compute", 0.5, True, True),
        ("lpt_packing", "requests", 1.0, False, False),
        ("lpt_packing", "compute", 0.5, True, True),
    ],
)
def test_what_a_request_charges(
    mode: str, basis: str, charge: float, per_item: bool, reads_rows: bool
) -> None:
    """The work basis decides what a request adds to the load. Bodies are read only if the rows matter."""
    fleet = Fleet(["v", "w"], {"a": Model()})
    views = fleet.views()
    model = views["v"].models["a"]
    views["v"] = replace(views["v"], models={"a": replace(model, item_s=0.5)})

    routes = Planner(options(mode=mode, work_basis=basis)).plan(views, 0.0).table["a"]

    assert (routes.charge, routes.per_item) == (charge, per_item)
    assert (routes.batch_input is not None) == reads_rows


@pytest.mark.parametrize("mode", ["round_robin", "lpt_packing"])
def test_requests_go_where_the_model_has_started(mode: str) -> None:
    """Requests for a model go to servers where it is warm. Servers where it is cold are only for failovers.

    A cold model has no figures.
    """
    fleet = Fleet(["v", "w", "x"], {"a": Model()})
    views = fleet.views()
    for cold in "vx":
        views[cold] = replace(views[cold], models={})

    table = Planner(options(mode=mode)).plan(views, 0.0).table
    assert (table["a"].placed, table["a"].ready) == (("w",), ("v", "w", "x"))

    views["w"] = replace(views["w"], models={})
    assert Planner(options(mode=mode)).plan(views, 0.0).table["a"].placed == ()


def test_costs_that_hardly_change_leave_the_table_alone() -> None:
    """The table is the same object until a charge has changed by a tenth.

    A model without a known cost has the mean charge of the models with a known cost.
    """
    fleet = Fleet(["v"], {"a": Model(), "b": Model()})
    planner = Planner(options(mode="least_outstanding"))
    views = fleet.views()["v"]

    def table(item_s: float) -> object:
        models = {**views.models, "a": replace(views.models["a"], item_s=item_s)}
        return planner.plan({"v": replace(views, models=models, instance=str(item_s))}, 0.0).table

    first = table(0.5)
    assert table(0.52) is first
    second = table(0.6)
    assert second is not first
    assert {routes.charge for routes in second.values()} == {0.6}  # type: ignore[attr-defined]


def test_models_of_workers_that_do_not_answer_are_known() -> None:
    """If no worker of a model answers, the model is in the table without workers."""
    fleet = Fleet(["v"], {"a": Model()})
    planner = Planner(options())
    planner.plan(fleet.views(), 0.0)
    fleet.servers["v"].alive = False

    assert planner.plan(fleet.views(), 1.0).table["a"].ready == ()
    assert planner.plan({}, 2.0).table == {}


@pytest.mark.parametrize("seed", range(5))
def test_what_has_not_changed_is_decided_as_before(seed: int) -> None:
    """A planner that only checks changed models makes the same plans as one that checks all models each time."""
    random = Random(seed)
    fleet = Fleet(
        "vw", {name: Model(10 * (1 + number)) for number, name in enumerate("abcdefgh")}, budget=300
    )
    fleet.servers["v"].calls = fleet.servers["w"].calls = {"meta": frozenset("ab")}
    keen, fresh = Planner(options(work_basis="requests")), Planner(options(work_basis="requests"))
    for number in range(60):
        fleet.now += 1.0
        name, worker = random.choice("abcdefgh"), random.choice("vw")
        copy = fleet.copy(worker, name)
        if random.random() < 0.6:
            copy.device_s += random.random()
            copy.requests += 1
        elif number > 9:
            copy.weights = random.choice([*WeightsView])
        if number % 13 == 12:
            fleet.servers[worker].alive = not fleet.servers[worker].alive
        views = fleet.views()
        fresh.change(fresh.options)
        plan = keen.plan(views, fleet.now)
        assert plan == fresh.plan(views, fleet.now)
        fleet.do(plan.steps)


def test_homes_from_the_start() -> None:
    """The first plan with all workers gives each model a home, and prefetches its weights once."""
    scene = Scene(Fleet(["v", "w"], {"a": Model(), "b": Model()}), Script(a=("v",), b=("w",)))

    plan = scene.plan()

    assert homes(plan.table) == {"a": ("v",), "b": ("w",)}
    assert set(plan.steps) == {WeightAction(Act.PREFETCH, "v", "a"), WeightAction(Act.PREFETCH, "w", "b")}
    assert scene.plan().steps == ()
    assert scene.status().repacks.last == "start"


def test_a_start_with_missing_workers_waits_a_moment() -> None:
    """If workers are missing at the start, models have no home for a moment, and requests go wherever the model is ready."""
    scene = Scene(Fleet(["u", "v", "w"], {"a": Model()}), Script(a=("v",)))
    scene.fleet.servers["u"].alive = False
    plan = scene.plan()
    assert homes(plan.table) == {"a": ()}
    assert any("not all workers" in warning for warning in scene.status().warnings)

    plan = scene.settle(SETTLE_S - ROUND_S)
    assert homes(plan.table) == {"a": ()}
    assert homes(scene.plan().table) == {"a": ("v",)}


def test_models_stay_where_their_weights_are() -> None:
    """At its start, a gateway leaves each model where it is resident, if that is only one worker."""
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model(), "c": Model()})
    for worker, model in (("w", "a"), ("v", "b"), ("w", "b")):
        fleet.copy(worker, model).weights = WeightsView.RESIDENT
    scene = Scene(fleet, Script(a=("v",), b=("v",), c=("v",)))

    plan = scene.plan()

    loads = scene.script.asked[0][0]
    both = frozenset("vw")
    assert {name: load.allowed for name, load in loads.items()} == {"a": frozenset("w"), "b": both, "c": both}
    assert homes(plan.table) == {"a": ("w",), "b": ("v",), "c": ("v",)}


def test_pinned_weights_take_their_part_of_the_budget() -> None:
    """Pinned models are resident on each device. The packing counts no bytes for them, and subtracts them from the budgets."""
    fleet = Fleet(["v", "w"], {"a": Model(bytes=7, pinned=True), "b": Model(bytes=5)}, budget=20)
    scene = Scene(fleet, Script())
    scene.plan()

    loads, workers, _ = scene.script.asked[0]
    assert {name: load.bytes for name, load in loads.items()} == {"a": 0, "b": 5}
    assert workers == {"v": 13, "w": 13}


def test_a_meta_model_and_what_it_calls_are_together() -> None:
    """Meta models and callees that calls connect are one load of the packing. The load moves when all its models are warm."""
    fleet = Fleet(["v", "w"], {name: Model(bytes=n + 1) for n, name in enumerate("abcd")}, load_s=1.0)
    for server in fleet.servers.values():
        server.ready |= {"m", "n"}
        server.calls = {"m": frozenset("ab"), "n": frozenset("bc")}
    scene = Scene(fleet, Script(a=("v",), d=("w",)))
    plan = scene.settle()
    assert {(load.name, load.bytes) for load in scene.script.asked[0][0].values()} == {("a", 6), ("d", 4)}
    assert homes(plan.table) == {**dict.fromkeys("abcmn", ("v",)), "d": ("w",)}

    scene.script.placed["a"] = ("w",)
    scene.planner.repack()
    scene.plan(do=False)
    for model in "ab":
        fleet.copy("w", model).weights = WeightsView.RESIDENT
    assert homes(scene.plan(do=False).table)["m"] == ("v",)
    fleet.copy("w", "c").weights = WeightsView.RESIDENT
    assert homes(scene.plan().table) == dict.fromkeys("abcdmn", ("w",))


def test_a_meta_model_whose_callees_are_apart_is_warned_of() -> None:
    """If no worker has all callees of a meta model, they are packed one by one, with a warning."""
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model()})
    fleet.servers["v"].ready = {"a", "m"}
    fleet.servers["w"].ready = {"b"}
    fleet.servers["v"].calls = {"m": frozenset("ab")}
    scene = Scene(fleet, Script())

    plan = scene.plan()

    assert homes(plan.table) == {"a": ("v",), "b": ("w",), "m": ("v",)}
    assert any(warning.startswith("no worker serves m together with") for warning in scene.status().warnings)


def test_a_meta_model_charges_what_it_calls() -> None:
    """The charge of a request to a meta model is the sum of its callees' costs."""
    fleet = Fleet(["v"], {"a": Model(), "b": Model()})
    fleet.servers["v"].ready |= {"m"}
    fleet.servers["v"].calls = {"m": frozenset("ab")}
    view = fleet.views()["v"]
    models = {name: replace(view.models[name], item_s=s) for name, s in (("a", 0.1), ("b", 0.3))}

    table = Planner(options()).plan({"v": replace(view, models=models)}, 0.0).table

    assert table["m"].charge == pytest.approx(0.4)


def test_an_alias_goes_where_the_model_is_that_gets_most_of_its_requests() -> None:
    """An alias has the home of the model that gets most of the alias's requests, if the worker there serves the alias."""
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model()})
    for server in fleet.servers.values():
        server.ready |= {"fraud"}
        server.aliases = {"fraud": "a"}
    scene = Scene(fleet, Script(a=("v",), b=("w",)))

    assert homes(scene.settle().table) == {"a": ("v",), "b": ("w",), "fraud": ("v",)}
    assert [model.reason for model in scene.status().models if model.name == "fraud"] == [
        "an alias, mainly of a"
    ]
    for server in fleet.servers.values():
        server.aliases = {"fraud": "b"}
    assert homes(scene.plan().table)["fraud"] == ("w",)
    fleet.servers["w"].ready -= {"fraud"}
    table = scene.plan().table
    assert (table["fraud"].ready, table["fraud"].placed) == (("v",), ())


def test_models_of_other_backends_are_not_packed() -> None:
    """A model without figures of the control service has no home. Its requests go to all workers where it is ready."""
    fleet = Fleet(["v", "w"], {"a": Model()})
    for server in fleet.servers.values():
        server.ready.add("onnx")
    plan = Scene(fleet, Script()).plan()

    assert (plan.table["onnx"].ready, plan.table["onnx"].placed) == (("v", "w"), ())


def test_consumed_device_seconds_trigger_a_repack() -> None:
    """The first repack comes after `first_rebalance_device_s`, and later ones after each further `rebalance_device_s`.

    After a repack by an operator, the count begins again.
    """
    fleet = Fleet(["v"], {"a": Model()})
    scene = Scene(fleet, Script(), first_rebalance_device_s=10, rebalance_device_s=30)
    at = []
    for n in range(400):
        fleet.copy("v", "a").device_s = n * ROUND_S
        if n == 200:
            scene.planner.repack()
        scene.plan()
        repacks = scene.status().repacks
        if repacks.last_at == fleet.now - ROUND_S and repacks.last != "start":
            at.append((repacks.last, n * ROUND_S))

    assert at == [
        ("work", 10.0),
        ("work", 40.0),
        ("work", 70.0),
        ("operator", 100.0),
        ("work", 130.0),
        ("work", 160.0),
        ("work", 190.0),
    ]
    assert scene.status().repacks.counts == {"start": 1, "work": 6, "operator": 1}
    assert scene.status().repacks.done == 1
    assert scene.status().repacks.threshold_device_s == 30


def test_a_model_is_where_it_executed_since_the_last_repack() -> None:
    """For a repack, a model's place is the first worker by name that did a tenth or more of its work since the last repack.

    If it has not executed, its place is its last target.
    """
    fleet = Fleet(["v", "w"], {"a": Model()})
    scene = Scene(fleet, Script(a=("w",)))
    scene.settle()
    before = []
    for v, w in ((1.0, 1.0), (0.0, 1.0), (0.01, 1.0), (1.0, 0.0), (0.0, 0.0)):
        for _ in range(10):
            fleet.copy("v", "a").device_s += v
            fleet.copy("w", "a").device_s += w
            scene.plan()
        scene.planner.repack()
        scene.plan()
        before.append(scene.script.asked[-1][2]["a"])

    assert before == [("v",), ("w",), ("w",), ("v",), ("w",)]


def test_a_worker_that_joins_is_used_when_it_has_settled() -> None:
    """When a worker joins, its models become ready one by one.

    All models are repacked once, a moment after the last of them is ready.
    """
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model(), "c": Model()})
    late = fleet.servers.pop("w")
    late.ready = set()
    scene = Scene(fleet, Script())
    scene.settle()
    fleet.servers["w"] = late
    for name in "abc":
        late.ready.add(name)
        scene.plan()
    joined = len(scene.script.asked)
    scene.script.placed["b"] = ("w",)
    plan = scene.settle(SETTLE_S + 3.0)

    assert joined == 1
    assert len(scene.script.asked) == 2
    assert scene.status().repacks.last == "membership"
    assert homes(plan.table)["b"] == ("w",)


def test_only_models_without_a_home_move_when_a_worker_dies() -> None:
    """If a worker dies, its models get another home at once, and no others move. A moment later, all models are repacked."""
    scene = Scene(Fleet(["u", "v", "w"], {"a": Model(), "b": Model()}), Script(a=("u",), b=("v",)))
    scene.settle()
    scene.script.placed.update(a=("w",), b=("w",))
    scene.fleet.servers["u"].alive = False

    plan = scene.plan()

    assert homes(plan.table) == {"a": ("w",), "b": ("v",)}
    assert scene.script.asked[-1][0]["b"].allowed == frozenset("v")
    assert scene.status().repacks.last == "homes"
    scene.settle()
    assert scene.status().repacks.last == "membership"


def test_a_worker_that_misses_a_probe_gets_its_models_back() -> None:
    """If a worker misses a probe, its models get other homes.

    When the worker is back, the models move back at once, and the other homes free the weights.
    """
    models = {name: Model(bytes=10) for name in "abcdefgh"}
    fleet = Fleet(["v", "w"], models, budget=50)
    scene = Scene(fleet, Script())
    scene.planner = Planner(options())
    before = homes(scene.settle(10.0).table)
    assert {len(fleet.resident(worker)) for worker in "vw"} == {4}
    fleet.servers["v"].alive = False
    assert set(homes(scene.plan().table).values()) == {("w",)}
    fleet.servers["v"].alive = True

    plan = scene.plan()
    assert homes(plan.table) == before
    assert not scene.status().workers[0].oversubscribed
    plan = scene.settle(10.0)
    assert homes(plan.table) == before
    assert fleet.resident("v") == {name for name, home in before.items() if home == ("v",)}
    assert not fleet.resident("v") & fleet.resident("w")


def test_a_worker_that_is_away_for_long_gets_no_models_back() -> None:
    """A worker that returns after a repack gets no models before the next repack."""
    scene = Scene(Fleet(["u", "v"], {"a": Model()}), Script(a=("u",)))
    scene.settle()
    scene.fleet.servers["u"].alive = False
    scene.settle()
    scene.script.placed["a"] = ("v",)
    scene.fleet.servers["u"].alive = True

    assert homes(scene.plan().table) == {"a": ("v",)}


def test_a_control_service_that_is_away_moves_nothing() -> None:
    """If a control service does not answer, its last view remains valid, and no model moves."""
    scene = Scene(Fleet(["v", "w"], {"a": Model()}), Script(a=("v",)))
    table = scene.settle().table
    scene.fleet.servers["v"].instance = None
    packed = len(scene.script.asked)

    plan = scene.settle()

    assert plan.table == table
    assert len(scene.script.asked) == packed
    assert any("control services of v" in warning for warning in scene.status().warnings)


def test_a_pin_holds_while_a_control_service_is_away() -> None:
    """If control services do not answer, the last views say which device each worker is, so a pinned model stays."""
    fleet = Fleet(["v/0", "v/1"], {"a": Model()})
    fleet.servers["v/1"].device = 1
    scene = Scene(fleet, Script(a=("v/1",)), models={"a": ModelOptions(devices=[1])})
    scene.settle()
    for server in fleet.servers.values():
        server.instance = None
    scene.planner.repack()
    scene.settle()

    *_, (loads, _, _) = scene.script.asked
    assert loads["a"].allowed == frozenset({"v/1"})


def test_workers_without_a_control_service_get_models_that_are_only_there() -> None:
    """Models are packed on workers with figures. A model that is ready only on other workers has no home."""
    fleet = Fleet(["v", "w"], {"a": Model(), "b": Model()})
    fleet.servers["v"].instance = None
    fleet.servers["v"].ready.add("c")
    fleet.servers["v"].ready.discard("b")
    scene = Scene(fleet, Script(a=("v",)))

    assert homes(scene.settle().table) == {"a": ("w",), "b": ("w",), "c": ()}


def test_replicas_and_quanta_follow_the_settings() -> None:
    """A model's own settings override the general ones.

    A new number of replicas waits for the next repack, a new fill does not.
    """
    fleet = Fleet(["u", "v", "w"], {"a": Model(max_items=8), "b": Model(max_items=0)})
    own = ModelOptions(replicas=2)
    scene = Scene(fleet, Script(a=("u", "v"), b=("u", "v", "w")), replicas="all", models={"a": own})
    plan = scene.settle()
    assert {name: load.replicas for name, load in scene.script.asked[0][0].items()} == {"a": 2, "b": 3}
    assert [(r.quantum, r.fill) for r in (plan.table["a"], plan.table["b"])] == [(8, "least"), (1, "least")]

    scene.planner.set_placement("a", replicas=1, fill="rr", fill_factor=1.5)
    plan = scene.plan()
    assert (plan.table["a"].quantum, plan.table["a"].fill) == (12, "rr")
    assert (scene.status().models[0].replicas, plan.table["a"].placed) == (1, ("u", "v"))
    assert scene.status().generation == 1
    scene.planner.change(options(route="spread"))
    assert scene.plan().table["a"].quantum == 1


def test_a_pinned_model_stays_on_its_devices() -> None:
    """A pinned model has its home on one of its devices. While none of them answers, it has another home."""
    scene = Scene(devices("u", "v", "w"), Script(a=("u",)), models={"a": {"devices": [1, 2]}})
    assert homes(scene.settle().table) == {"a": ("v",), "b": ("u",)}

    scene.fleet.servers["v"].alive = False
    assert homes(scene.plan().table)["a"] == ("w",)
    scene.fleet.servers["w"].alive = False
    assert homes(scene.plan().table)["a"] == ("u",)
    scene.fleet.servers["w"].alive = True
    assert homes(scene.settle(10.0).table)["a"] == ("w",)


def test_a_model_that_is_pinned_by_a_change_of_the_settings_moves() -> None:
    """If a change of the settings pins a model to another device, it moves."""
    scene = Scene(devices("u", "v"), Script(a=("u",)))
    assert homes(scene.settle().table)["a"] == ("u",)

    scene.planner.change(options(models={"a": {"devices": [1]}}))

    assert homes(scene.settle().table)["a"] == ("v",)


def test_a_pin_counts_for_all_models_that_are_placed_together() -> None:
    """A pin of one callee places the whole meta model.

    If the pins of two callees have no device in common, the callees are placed one by one.
    """

    def scene(models: dict[str, object]) -> Scene:
        fleet = devices("u", "v")
        for server in fleet.servers.values():
            server.ready |= {"m"}
            server.calls = {"m": frozenset("ab")}
        return Scene(fleet, Script(a=("u",)), models=models)

    assert homes(scene({"b": {"devices": [1]}}).settle().table) == dict.fromkeys("abm", ("v",))

    apart = scene({"a": {"devices": [0]}, "b": {"devices": [1]}})
    homes_apart = homes(apart.settle().table)
    assert (homes_apart["a"], homes_apart["b"]) == (("u",), ("v",))
    assert not apart.status().warnings


def test_pins_do_not_part_a_meta_model_from_its_callees_by_servers() -> None:
    """With several servers, models that call each other stay together whatever their pins are, because a run cannot leave its server."""
    fleet = Fleet(["u", "v"], {name: Model() for name in "abm"})
    for server in fleet.servers.values():
        server.calls = {"m": frozenset("ab")}
    apart = Scene(fleet, Script(a=("u",)), models={"a": {"devices": [0]}, "b": {"devices": [1]}})

    assert len({*homes(apart.settle().table).values()}) == 1
    assert any("of a, b have no device in common" in warning for warning in apart.status().warnings)


def test_a_server_that_places_models_itself_follows_their_pins() -> None:
    """If a server has several devices, it follows the pins itself, so the gateway gives no warning about them."""
    fleet = Fleet(["u", "v"], {name: Model() for name in "abm"})
    for server in fleet.servers.values():
        server.calls, server.devices = {"m": frozenset("ab")}, 2
    scene = Scene(fleet, Script(a=("u",)), models={"a": {"devices": [0]}, "b": {"devices": [1]}})

    assert len({*homes(scene.settle().table).values()}) == 1
    assert not scene.status().warnings


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"models": {"a": {"devices": [1, 5]}}}, "models.a.devices names 5, but the devices are 0 to 1"),
        ({"models": {"a": {"replicas": 3}}}, "models.a.replicas is 3, but a can be on 2 devices"),
        ({"replicas": 4}, "placement.replicas is 4, but a can be on 2 devices"),
        ({"models": {"c": {"replicas": 1}}}, "no worker serves c, which the key `models` names"),
    ],
)
def test_wishes_that_cannot_be_fulfilled_are_warned_of(changes: dict[str, object], warning: str) -> None:
    """If a setting asks for more than the devices have, a warning names it, and the models are served."""
    scene = Scene(devices("u", "v"), Script(), **changes)

    assert all(home for home in homes(scene.settle().table).values())
    assert any(line.startswith(warning) for line in scene.status().warnings), scene.status().warnings


def test_a_model_larger_than_every_device_is_warned_of() -> None:
    """If a model is larger than each device, a warning has the model's name and bytes, and the bytes of the largest device."""
    fleet = Fleet(["u", "v"], {"a": Model(bytes=3000), "b": Model()}, budget=2000)
    scene = Scene(fleet, Script())
    scene.settle()

    assert any(
        warning.startswith("a needs 3 kB of one device, but no device has more than 2 kB for weights")
        for warning in scene.status().warnings
    )


@pytest.mark.parametrize("mode", ["least_outstanding", "lpt_packing"])
def test_the_largest_figures_that_are_believed(mode: str) -> None:
    """The largest numbers that are accepted cause no overflow."""
    planner, router = Planner(options(mode=mode)), Router(mode)  # type: ignore[arg-type]
    most = 2**64 - 1
    for number in range(4):
        model_view = ModelView(
            most,
            WeightsView.RESIDENT,
            False,
            1e9,
            most,
            most,
            number,
            number,
            1e9 * number / 4,
            most,
            ("x", 0),
        )
        view = WorkerView(True, frozenset("m"), "1", most, 1e9, {"m": model_view}, measurement=number)
        plan = planner.plan({"v": view, "w": view}, 2.5 * number)
        router.update(plan.table)
        planner.repack()

    assert plan.table["m"].ready == ("v", "w")


def test_the_mode_stays() -> None:
    """A running gateway does not change its mode."""
    planner = Planner(options())
    planner.change(options(mode="round_robin", hysteresis=0.5))

    assert (planner.options.mode, planner.options.hysteresis) == ("lpt_packing", 0.5)


@pytest.mark.parametrize("mode", ["least_outstanding", "lpt_packing"])
def test_a_server_that_is_named_twice_is_warned_of(mode: str) -> None:
    """If two workers are the same runtime, a warning names them, because their device would get twice its share."""
    fleet = Fleet(["u", "v", "w"], {"a": Model()})
    fleet.servers["v"].instance = "w"

    planner = Planner(options(mode=mode))
    planner.plan(fleet.views(), 0.0)
    status = planner.status()

    assert status is not None
    assert [warning.partition(" are one server")[0] for warning in status.warnings] == ["v, w"]


def test_nothing_is_served() -> None:
    """If there are no members, no answers or no models, the table is empty."""
    planner = Planner(options())

    assert planner.plan({}, 0.0).table == {}
    assert planner.plan({"v": WorkerView(alive=False)}, 100.0).table == {}
    assert planner.plan({"v": WorkerView(alive=True, instance="i")}, 200.0).table == {}
    assert planner.plan({"v": WorkerView(alive=True)}, 300.0).table == {}
    status = planner.status()
    assert status is not None
    assert status.repacks.counts == {}
