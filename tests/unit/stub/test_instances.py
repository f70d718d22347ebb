"""How many processes Triton starts for a model is computed from the model's configuration."""

from typing import Any

import pytest

from rsrv.stub.model import instances


@pytest.mark.parametrize(
    ("groups", "count"),
    [
        ([{"kind": "KIND_CPU", "count": 1, "gpus": []}], 1),
        ([{"kind": "KIND_CPU", "count": 2, "gpus": []}], 2),
        ([{"kind": "KIND_CPU", "count": 1}, {"kind": "KIND_CPU", "count": 1}], 2),
        ([{"kind": "KIND_GPU", "count": 1, "gpus": [0, 1]}], 2),
    ],
)
def test_instances_are_counted_over_groups_and_gpus(groups: list[dict[str, Any]], count: int) -> None:
    """Triton starts `count` processes for each group. If the group names GPUs, it starts this number for each GPU."""
    assert instances({"instance_group": groups}) == count
