"""The control process's records of a runtime, as its answers change them."""

from __future__ import annotations

from rsrv.control.records import RuntimeRecords, total
from rsrv.control.v1 import control_pb2 as pb
from tests.unit.control.peers import model_record


def test_an_answer_with_changes_keeps_the_other_models_and_no_meta_model_that_left() -> None:
    """A meta model leaves when its stub ends, although the models that it called stay."""
    models = [model_record("a"), model_record("b"), pb.ModelRecord(name="meta", meta=True, queued=3)]
    before = RuntimeRecords().updated(pb.DeviceRecord(next=5, models=models))
    after = before.updated(pb.DeviceRecord(since=5, next=6, models=[model_record("b", queued=9)]))
    assert [*after.models] == ["a", "b"]
    assert after.models["a"] is before.models["a"]
    assert after.models["b"].queued == 9


def test_the_nearest_place_of_weights_counts() -> None:
    """Weights that one device reads from disk are in host memory for another one."""
    places = [model_record(weights_state=place) for place in ("on disk", "absent")]
    assert total(places).weights_state == "absent"
