"""Functions that call models with inputs by name, and that name the results. Needs no framework."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rsrv_bundle.errors import BundleError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a model, flattened."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    #: True if the model names no results, so that `names` are only positions. The user may then choose other names.
    positional: bool = False

    @classmethod
    def of(cls, result: Any) -> Results:
        """Flatten a result.

        Parts of mappings, dataclasses and named tuples have names. Parts of other tuples and of lists have numbers. Nested
        names are joined by "_". A lone array is `output`, and the parts of a tuple are `output_0` and so on. None is left out.
        """
        if isinstance(result, cls):
            return result
        parts = _parts(result)
        leaves = list(_leaves("output", result) if parts is None else _inner(parts, ""))
        return cls(tuple(name for name, _ in leaves), tuple(value for _, value in leaves), parts is None)

    def convert(self, convert: Callable[[str, Any], Any]) -> Results:
        """Return the results with converted values. `convert` gets a name for errors, and the value."""
        values = (convert(f"outputs: {at}", value) for at, value in zip(self.names, self.values, strict=True))
        return Results(self.names, tuple(values), self.positional)

    def only(self, keep: Callable[[Any], bool]) -> Results:
        """Return the results whose values `keep` accepts. Raises BundleError if there are none."""
        accepted = [(name, value) for name, value in zip(self.names, self.values, strict=True) if keep(value)]
        if not accepted:
            types = ", ".join(sorted({type(value).__name__ for value in self.values})) or "nothing"
            raise BundleError(f"outputs: the model returns no tensor ({types}); return tensors")
        names, values = zip(*accepted, strict=True)
        return Results(names, values, self.positional)

    def named(self, given: Sequence[str] | None, keep: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the values by name. Raises BundleError if the given names do not fit.

        given: names for the parts of a tuple. If the model itself names its results, `given` must list these names. It then
            determines only their order.
        keep: names of the values to return, in this order. Default: all values.
        """
        names: Sequence[str] = self.names
        if given is not None and self.positional:
            if len(given) != len(self.values) or len(set(given)) != len(given):
                raise BundleError(
                    f"outputs: the model returns {len(self.values)} arrays, but output_names are {list(given)}"
                )
            names = given
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice:
            raise BundleError(f"outputs: {', '.join(twice)}: two have this name; rename one")
        if given is not None and set(given) != set(names):
            raise BundleError(
                f"outputs: the model returns {sorted(names)}, but output_names are {sorted(given)}"
            )
        values = dict(zip(names, self.values, strict=True))
        if unknown := [name for name in keep or () if name not in values]:
            raise BundleError(
                f"outputs: {unknown[0]}: the model has no such output; it returns {', '.join(values)}"
            )
        return {name: values[name] for name in keep or given or names}


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the names and the parts of a container, or None if `value` is not a container with names."""
    if isinstance(value, Mapping):
        return [(str(name), part) for name, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "shape"):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    parts = _parts(value)
    if parts is None and isinstance(value, tuple | list):
        parts = [(str(index), part) for index, part in enumerate(value)]
    if parts is not None:
        yield from _inner(parts, f"{name}_")
    elif value is not None:
        yield name, value


def _inner(parts: list[tuple[str, Any]], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in parts:
        yield from _leaves(prefix + name, value)


def caller(
    call: Callable[..., Any], names: Sequence[str], like: Callable[..., Any] | None = None
) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that calls `call` with inputs by name.

    The inputs are passed by keyword, or in the order of `names` if `call` takes only positional arguments. like: a function whose
    signature is read if `call` itself does not show it. Raises BundleError if `call` has no argument with the name of an input,
    or if an argument has neither an input nor a default.
    """
    try:
        parameters = inspect.signature(like or call).parameters.values()
    except (TypeError, ValueError):
        return lambda inputs: call(**inputs)
    kinds = {parameter.kind for parameter in parameters}
    by_name = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
    if not by_name.intersection(names) and (
        inspect.Parameter.POSITIONAL_ONLY in kinds
        # Arguments by position could be swapped. So pass several inputs by name if `call` has a parameter such as **kwargs.
        or (
            inspect.Parameter.VAR_POSITIONAL in kinds
            and (len(names) == 1 or inspect.Parameter.VAR_KEYWORD not in kinds)
        )
    ):
        return lambda inputs: call(*(inputs[name] for name in names))
    named = [parameter for parameter in parameters if parameter.kind not in _REST]
    takes = ", ".join(parameter.name for parameter in named)
    unknown = [name for name in names if name not in by_name]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise BundleError(
            f"{unknown[0]}: the model has no such input; it takes ({takes}), so use these names"
        )
    missing = [p.name for p in named if p.name not in names and p.default is inspect.Parameter.empty]
    if missing:
        raise BundleError(
            f"{missing[0]}: the model takes ({takes}), and this input has no default; give this input"
        )
    return lambda inputs: call(**inputs)
