"""The plan of a request of any length along a padded axis."""

import pytest

from rsrv.stub.endpoint import BadShape, resolve
from rsrv.wire.layout import Block, Interface, Tensor, Variant

INTERFACE = Interface(
    tuple(
        Variant(
            Block((Tensor("ids", "i32", (-1, length), 0, 1), Tensor("mask", "i32", (length, -1), 1, 0))),
            Block((Tensor("hidden", "f32", (-1, length, 2), 0, 1), Tensor("mean", "f32", (-1, 2), 0))),
            (1, 8),
        )
        for length in (4, 16)
    ),
    exact=False,
)


@pytest.mark.parametrize(("length", "variant"), [(1, 0), (4, 0), (5, 1), (16, 1)])
def test_a_request_has_the_shortest_variant_and_tensors_of_its_length(length: int, variant: int) -> None:
    """A request takes the shortest variant that holds its length. Its inputs and outputs have the request's own length."""
    plan = resolve(INTERFACE, [(3, length), (length, 3)])

    assert (plan.variant, plan.length, plan.rows) == (variant, length, 3)
    assert [output.shape for output in plan.outputs] == [(3, length, 2), (3, 2)]


@pytest.mark.parametrize(
    ("shapes", "lengths"),
    [([(1, 17), (17, 1)], r"\[17\]"), ([(1, 3), (4, 1)], r"\[3, 4\]"), ([(1, 0), (0, 1)], r"\[0\]")],
)
def test_a_length_that_no_variant_holds_is_refused(shapes: list[tuple[int, ...]], lengths: str) -> None:
    """If no variant is long enough, the request is refused. The error has the lengths of its inputs and the possible lengths."""
    with pytest.raises(BadShape, match=f"the lengths {lengths} along the padded axis; .* from 1 to 16"):
        resolve(INTERFACE, shapes)
