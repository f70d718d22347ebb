"""Tensors on the device as inputs of later calls: the stub checks their shapes and types."""

from typing import Any

import pytest

from rsrv.runtime.runs import Kept
from rsrv.stub.direct import DeviceTensor, DirectRun
from rsrv.stub.replies import RequestFailure
from rsrv.wire.calls import Entrance
from rsrv.wire.frames import Status
from rsrv.wire.layout import Tensor

ROWS = Tensor("x", "u16", (-1, 3), 0)


def spot(made: Tensor, rows: int, target: Tensor, call_rows: int) -> Any:
    connection: Any = None
    run = DirectRun(connection, Entrance(0, 7, 0, 0), "test")
    return DeviceTensor(run, 0, made, rows).spot(run, target, call_rows)


@pytest.mark.parametrize(
    ("made", "rows", "why"),
    [
        (Tensor("y", "bf16", (-1, 3), 0), 2, "on the device as bf16, expected u16"),
        (Tensor("y", "u16", (2, -1), 1), 3, "another batch axis or number of rows"),
        (Tensor("y", "u16", (2, 3), None), 1, "another batch axis or number of rows"),
    ],
)
def test_a_tensor_of_the_same_bytes_and_another_meaning_does_not_fit(
    made: Tensor, rows: int, why: str
) -> None:
    """The stub refuses a tensor that has the right number of bytes but another type or shape.

    If the stub sent it, the runtime would close the connection.
    """
    assert made.shape(rows) == ROWS.shape(2)

    with pytest.raises(RequestFailure, match=why) as caught:
        spot(made, rows, ROWS, 2)

    assert caught.value.status is Status.INVALID
    buffer: Any = None
    assert not Kept(buffer, made, 0, rows, rows).fits(ROWS, 2)


def test_a_tensor_without_rows_fits_any_number_of_rows() -> None:
    """A tensor without a batch axis may be an input of calls with any number of rows, because its shape is always the same."""
    table = Tensor("table", "f32", (4, 4), None)
    buffer: Any = None

    assert spot(table, 1, table, 8).at == 0
    assert Kept(buffer, table, 0, 1, 1).fits(table, 8)
