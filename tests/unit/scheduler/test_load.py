"""The load, which is read often, agrees with the whole snapshot."""

from rsrv.scheduler.events import (
    ExecutionFinished,
    ModelAdded,
    Outcome,
    Program,
    Request,
    RequestsArrived,
)
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.settings import SchedulerSettings


def test_the_load_is_a_part_of_the_snapshot() -> None:
    """With one execution over, one under way and one request that waits; a model without requests is in it, too."""
    scheduler = Scheduler(SchedulerSettings(weight_budget_bytes=100))
    costs = {(0, 1): 1.0, (0, 4): 2.0, (1, 2): 3.0}
    for name, nbytes in (("a", 30), ("b", 20)):
        scheduler.handle(ModelAdded(Program(name, costs, True, 8, weight_bytes=nbytes), resident=True), 0.0)
    scheduler.handle(RequestsArrived((Request(1, "a", 0, 1),)), 1.0)
    scheduler.handle(RequestsArrived((Request(2, "a", 0, 1), Request(3, "a", 1, 2))), 1.5)
    scheduler.handle(ExecutionFinished(1, 1.0), 2.0)

    load, snapshot = scheduler.load_report(), scheduler.snapshot()

    assert (load.weight_bytes, load.weight_budget_bytes) == (snapshot.weight_bytes, 100)
    assert load.models.keys() == snapshot.models.keys()
    for name, model in load.models.items():
        whole = snapshot.models[name]
        assert model.row_seconds == min(cost / size for (_, size), cost in whole.costs.items())
        assert model.max_rows == max(size for _, size in whole.costs)
        assert model._replace(row_seconds=0, max_rows=0) == (
            whole.queued, whole.executing, whole.pinned, whole.device_bytes, 0, 0, whole.misses,
            whole.outcomes[Outcome.ANSWERED], whole.device_seconds, whole.useful_rows,
        )  # fmt: skip
    assert (load.models["a"].queued, load.models["a"].executing, load.models["a"].device_seconds) == (
        1,
        1,
        1.0,
    )
