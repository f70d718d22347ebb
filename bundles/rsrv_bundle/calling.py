"""Calls of models with inputs by name, and names for their results. Needs no framework."""

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

    #: None where the model gave no names
    names: tuple[str, ...] | None
    values: tuple[Any, ...]
    #: The model returned one array, and no container.
    lone: bool = False

    @classmethod
    def of(cls, result: Any) -> Results:
        """Flatten a result. Mappings, dataclasses and named tuples give names, nested ones joined by "_"; None is left out."""
        if isinstance(result, cls):
            return result
        parts = _parts(result)
        if parts is not None:
            named = list(_leaves("", parts))
            return cls(tuple(name for name, _ in named), tuple(value for _, value in named))
        if isinstance(result, tuple | list):
            return cls(None, tuple(value for value in result if value is not None))
        return cls(None, (result,), lone=True)

    def convert(self, convert: Callable[[str, Any], Any]) -> Results:
        """Return the results with converted values; `convert` gets the value's name for errors, and the value."""
        labels = self.names or tuple(map(str, range(len(self.values))))
        values = (convert(f"outputs: {at}", value) for at, value in zip(labels, self.values, strict=True))
        return Results(self.names, tuple(values), self.lone)

    def named(self, given: Sequence[str] | None) -> dict[str, Any]:
        """Return the values by name, in the order of `given`, if any. Raises BundleError if the names do not fit."""
        if self.names is not None:
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            if twice:
                raise BundleError(f"outputs: {', '.join(twice)}: two have this name; rename one")
            if given is not None and set(given) != set(self.names):
                raise BundleError(
                    f"outputs: fn returns {sorted(self.names)}, output_names says {sorted(given)}"
                )
            found = dict(zip(self.names, self.values, strict=True))
            return {name: found[name] for name in given or self.names}
        names = given
        if names is None:
            if not self.lone:
                raise BundleError("outputs: fn returns a tuple; name its parts with output_names")
            names = ("output",)
        if len(names) != len(self.values) or len(set(names)) != len(names):
            raise BundleError(
                f"outputs: fn returns {len(self.values)} arrays, output_names are {list(names)}"
            )
        return dict(zip(names, self.values, strict=True))


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container with names; None for others."""
    if isinstance(value, Mapping):
        return [(str(name), part) for name, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "shape"):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def _leaves(prefix: str, parts: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in parts:
        inner = _parts(value)
        if inner is None and isinstance(value, tuple | list):
            inner = [(str(index), part) for index, part in enumerate(value)]
        if inner is not None:
            yield from _leaves(f"{prefix}{name}_", inner)
        elif value is not None:
            yield prefix + name, value


def caller(
    call: Callable[..., Any], names: Sequence[str], like: Callable[..., Any] | None = None
) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that calls `call` with inputs by name.

    They go by keyword, or in the order of `names` if `call` takes only positional arguments. like: function with the
    signature, if `call` itself does not show it. Raises BundleError if `call` has no argument of such a name, or an
    argument without a default that has no input.
    """
    try:
        parameters = inspect.signature(like or call).parameters.values()
    except (TypeError, ValueError):
        return lambda inputs: call(**inputs)
    kinds = {parameter.kind for parameter in parameters}
    by_name = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
    if not by_name.intersection(names) and (
        inspect.Parameter.POSITIONAL_ONLY in kinds
        # Several inputs could be swapped, so they go by name wherever that may work.
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
        raise BundleError(f"{unknown[0]}: the model takes ({takes}); name the inputs as it does")
    missing = [p.name for p in named if p.name not in names and p.default is inspect.Parameter.empty]
    if missing:
        raise BundleError(f"{missing[0]}: the model takes ({takes}), and this one has no default; give it")
    return lambda inputs: call(**inputs)
