"""The control process's records of a runtime, which the runtime's answers update."""

from __future__ import annotations

from rsrv.control.records import RuntimeRecords, total
from rsrv.control.v1 import control_pb2 as pb
from tests.unit.control.peers import model_record


def test_an_answer_with_changes_keeps_the_other_models_and_no_meta_model_that_left() -> None:
    """An answer that has only the changed models keeps the records of the other models.

    A meta model that is missing in the answer is dropped, because its stub has ended.
    """
    models = [model_record("a"), model_record("b"), pb.ModelRecord(name="meta", meta=True, queued=3)]
    before = RuntimeRecords().updated(pb.DeviceRecord(next=5, models=models))
    after = before.updated(pb.DeviceRecord(since=5, next=6, models=[model_record("b", queued=9)]))
    assert [*after.models] == ["a", "b"]
    assert after.models["a"] is before.models["a"]
    assert after.models["b"].queued == 9


def test_the_nearest_place_of_weights_counts() -> None:
    """If weights are on disk for one device and in host memory for another, the total shows host memory."""
    places = [model_record(weights_state=place) for place in ("on disk", "absent")]
    assert total(places).weights_state == "absent"
