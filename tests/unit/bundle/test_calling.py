"""Inputs by name, and names of results."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from rsrv_bundle import BundleError
from rsrv_bundle.calling import Results, caller


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Found:
    score: Any
    box: Any = None


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (1, {"output": 1}),
        ({"b": 1, "a": 2}, {"b": 1, "a": 2}),
        (OrderedDict(a=(1, None, [2])), {"a_0": 1, "a_2_0": 2}),
        (Pair(1, {"x": 2}), {"left": 1, "right_x": 2}),
        (Found(1), {"score": 1}),
        ({0: Found(1, 2)}, {"0_score": 1, "0_box": 2}),
        (
            (1, None, {"boxes": 2, "levels": [3, 4]}),
            {
                "output_0": 1,
                "output_2_boxes": 2,
                "output_2_levels_0": 3,
                "output_2_levels_1": 4,
            },
        ),
    ],
)
def test_containers_that_have_names_name_their_parts(result: Any, named: dict[str, Any]) -> None:
    """The containers of a result name or number its parts. A single array is called `output`.

    A part that is None is left out, but it still uses up its number.
    """
    assert list(Results.of(result).named(None).items()) == list(named.items())


def test_given_names_order_a_mapping_and_name_a_tuple() -> None:
    """Given names order a mapping, and name the parts of a tuple or a lone array."""
    assert list(Results.of({"a": 1, "b": 2}).named(["b", "a"]).items()) == [("b", 2), ("a", 1)]
    assert Results.of((1, None, 2)).named(["x", "y"]) == {"x": 1, "y": 2}
    assert Results.of(3).named(["z"]) == {"z": 3}
    assert Results.of((1, 2)).convert(lambda label, value: (label, value)).values == (
        ("outputs: output_0", 1),
        ("outputs: output_1", 2),
    )
    assert Results.of((1, (2, 3))).named(["x", "y", "z"], ["z", "x"]) == {"z": 3, "x": 1}
    assert list(Results.of({"a": 1, "b": 2, "c": 3}).named(None, ["c", "a"])) == ["c", "a"]


@pytest.mark.parametrize(
    ("result", "names", "message"),
    [
        ((1, 2), ["a"], "outputs: the model returns 2 arrays, but output_names are ['a']"),
        ({"a": 1}, ["b"], "outputs: the model returns ['a'], but output_names are ['b']"),
        ({"a": (1,), "a_0": 2}, None, "outputs: a_0: two have this name; rename one"),
    ],
)
def test_names_that_do_not_fit_are_refused(result: Any, names: list[str] | None, message: str) -> None:
    """Names that do not fit the results, and duplicate names, are refused. The message has the names."""
    with pytest.raises(BundleError, match=re.escape(message)):
        Results.of(result).named(names)


def plain(a: Any, b: Any = 0, *, c: Any = 0) -> Any:
    return a, b, c


def positional(a: Any, b: Any, /) -> Any:
    return a, b


def anything(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.mark.parametrize(
    ("call", "inputs", "result"),
    [
        (plain, {"c": 3, "a": 1}, (1, 0, 3)),
        (positional, {"y": 1, "x": 2}, (1, 2)),
        (lambda *args: args, {"y": 1, "x": 2}, (1, 2)),
        (anything, {"x": 1}, ((1,), {})),
        # Inputs are passed by name where possible, so that they cannot be swapped.
        (anything, {"x": 1, "y": 2}, ((), {"x": 1, "y": 2})),
    ],
)
def test_inputs_go_by_name_where_they_can(
    call: Callable[..., Any], inputs: dict[str, Any], result: Any
) -> None:
    """Inputs are passed by name if the callable allows it. If not, they are passed in their order."""
    assert caller(call, tuple(inputs))(inputs) == result


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "x"], "x: the model has no such input; it takes (a, b, c), so use these names"),
        (["b"], "a: the model takes (a, b, c), and this input has no default; give this input"),
    ],
)
def test_inputs_that_a_model_does_not_take_are_refused(names: list[str], message: str) -> None:
    """Inputs that a model does not take are refused before it is called."""
    with pytest.raises(BundleError, match=re.escape(message)):
        caller(plain, names)
