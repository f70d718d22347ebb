"""Limits on a module's operations, because a few kilobytes can keep a compiler busy forever."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rsrv_bundle.errors import Problems

# Allowed targets of custom calls. Other targets may read memory that this module cannot check. The most dangerous ones are
# callbacks into the exporting process.
_CUSTOM_CALLS = re.compile(
    r"(lapack|cusolver|cublas|cuhybrid|hipsolver|hipblas|hiphybrid)_\w+|(cu|hip)_(threefry2x32|lu_pivots_to_permutation)\w*"
    r"|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|AllocateBuffer"
    r"|ApproxTopK|stablehlo\.\w+|mhlo\.\w+|chlo\.\w+"
)
_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy"})
# Limits on a module. A few kilobytes can describe a huge module, because the compiler inlines nested calls of functions, and
# because a large tensor takes no more text than a small one.
_MAX_OPERATIONS = 1_000_000
_MAX_DEPTH = 100
_MAX_ELEMENTS = 2**40
# Operations that call a function, with the attribute that names the function.
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}


def check_operations(module: Any, file: str, problems: Problems) -> None:
    """Report operations that are not allowed, and modules with more operations than a compiler can handle."""
    #: By name of a function: its number of operations, and how often it calls each other function.
    functions: dict[str, tuple[int, Counter[str]]] = {}
    for function in module.body.operations:
        calls: Counter[str] = Counter()
        count = _check_function(function.operation, file, calls, problems)
        functions[str(getattr(function, "sym_name", "")).strip('"')] = count, calls
    if _inlined("main", functions, {}) > _MAX_OPERATIONS:
        problems.add(
            file, "", f"comes to more than {_MAX_OPERATIONS} operations, with those of the functions it calls"
        )


def _check_function(function: Any, file: str, calls: Counter[str], problems: Problems) -> int:
    """Check a function, and return its number of operations. Add its calls of other functions to `calls`."""
    from jaxlib.mlir import ir

    count = 0

    def check(operation: Any) -> Any:
        nonlocal count
        count += 1
        name = operation.name
        dialect = name.partition(".")[0]
        if dialect not in _DIALECTS:
            problems.add(file, name, f"uses the dialect '{dialect}'; allowed: {' '.join(sorted(_DIALECTS))}")
        elif name == "stablehlo.custom_call":
            target = operation.attributes["call_target_name"].value
            if not _CUSTOM_CALLS.fullmatch(target):
                problems.add(
                    file, f"custom_call {target}", "is not an allowed target; export without host callbacks"
                )
        elif name in _CALLS:
            calls[operation.attributes[_CALLS[name]].value] += 1
        for result in operation.results:
            kind = result.type
            if isinstance(kind, ir.RankedTensorType) and kind.has_static_shape:
                check_extent(kind.shape, name, file, problems)
        if len(operation.regions) and _depth(operation) > _MAX_DEPTH:
            problems.add(file, name, f"is nested more than {_MAX_DEPTH} levels deep")
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE if count <= _MAX_OPERATIONS else ir.WalkResult.INTERRUPT

    function.walk(check, ir.WalkOrder.PRE_ORDER)
    return count


def check_extent(shape: Any, key: str, file: str, problems: Problems) -> None:
    if math.prod(shape) > _MAX_ELEMENTS:
        problems.add(file, key, f"makes a tensor of more than {_MAX_ELEMENTS} elements: {list(shape)!s:.100}")


def _depth(operation: Any) -> int:
    depth = 0
    while depth <= _MAX_DEPTH and (operation := operation.parent) is not None:
        depth += 1
    return depth


def _inlined(name: str, functions: Mapping[str, tuple[int, Mapping[str, int]]], known: dict[str, int]) -> int:
    """Return the number of operations that a function has after the compiler has inlined all calls."""
    if name not in known:
        known[name] = _MAX_OPERATIONS + 1  # A recursive function counts as endless.
        count, calls = functions.get(name, (0, {}))
        known[name] = count + sum(
            times * _inlined(callee, functions, known) for callee, times in calls.items()
        )
    return known[name]
