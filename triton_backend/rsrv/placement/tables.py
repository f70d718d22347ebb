"""The routing table, made from the settings, the places of models and their measured costs."""

from collections.abc import Mapping

from rsrv.placement.contract import Routes, Table
from rsrv.placement.costs import Costs
from rsrv.placement.fleet import Fleet, FleetModel
from rsrv.placement.options import PlannerOptions

#: Fraction by which a charge must change before the table changes.
CHARGE_STEP = 0.1


def make_table(
    options: PlannerOptions, fleet: Fleet, placed: Mapping[str, tuple[str, ...]], costs: Costs, old: Table
) -> dict[str, Routes]:
    """Return the routes of all models. Unchanged routes are the objects of `old`."""
    basis = options.work_basis if options.mode != "round_robin" else "requests"
    charges = _charges(fleet, costs) if basis == "compute" else {}
    table = {}
    for name, model in fleet.models.items():
        before = old.get(name)
        # An alias is routed like the model that gets most of its requests, because they need that model's weights.
        like = fleet.models.get(model.follows, model)
        leader = model.follows or name
        here = tuple([worker for worker in placed.get(leader, ()) if worker in model.ready])
        if model.cold and all(worker in model.cold for worker in here):
            here = tuple([worker for worker in model.ready if worker not in model.cold])
        shared = len(here) > 1
        charge = charges.get(leader, 1.0)
        if before is not None and abs(charge - before.charge) <= CHARGE_STEP * before.charge:
            charge = before.charge
        routes = Routes(
            ready=model.ready,
            placed=here,
            quantum=_quantum(options, leader, like) if shared else 1,
            fill=options.of_model(leader, "fill"),
            charge=charge,
            per_item=basis != "requests",
            batch_input=like.batch_input if shared or basis != "requests" else None,
        )
        table[name] = before if before is not None and before == routes else routes
    return table


def _charges(fleet: Fleet, costs: Costs) -> dict[str, float]:
    """Return the device seconds per item of each model. A meta model has the sum of the charges of the models that it calls.

    A model without a measurement has the mean of the measured models.
    """
    known = {name: item_s for name in fleet.models if (item_s := costs.measured(name).item_s)}
    usual = sum(known.values()) / len(known) if known else 1.0
    return {
        name: sum(known.get(part, usual) for part in model.calls) if model.calls else known.get(name, usual)
        for name, model in fleet.models.items()
    }


def _quantum(options: PlannerOptions, name: str, model: FleetModel) -> int:
    factor: float = options.of_model(name, "fill_factor")
    return 1 if options.route == "spread" else max(1, round(factor * model.max_items))
