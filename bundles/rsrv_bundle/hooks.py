"""The hooks file, `model.py`: what it must define, checked without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rsrv_bundle.errors import Problems
from rsrv_bundle.spec import Kind

NAMES = {"model": ("preprocess", "postprocess"), "meta": ("run",)}
_MAX_BYTES = 4_000_000


def check_hooks(file: Path, kind: Kind) -> tuple[str, ...]:
    """The hooks that `file` defines at its top level, by assignment, import or `def`.

    Raises BundleError if it is no Python, or if it defines none of the hooks of a bundle of this kind: a model's
    are `preprocess` and `postprocess`, a meta model's is `run`.
    """
    problems = Problems()
    wanted = NAMES[kind]
    found: tuple[str, ...] = ()
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"holds more than {_MAX_BYTES} bytes")
        tree = ast.parse(file.read_bytes(), filename=file.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as e:
        problems.add(file.name, "", f"is not valid Python: {e}")
    else:
        defined = set(_top_level_names(tree.body))
        found = tuple(name for name in wanted if name in defined)
        if not found:
            problems.add(file.name, "", f"defines no hook; define {' or '.join(wanted)} as a function")
    problems.raise_if_any()
    return found


def _top_level_names(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.If(body=inner, orelse=other):
                yield from _top_level_names([*inner, *other])
            case ast.Try(body=inner, handlers=handlers, orelse=other):
                yield from _top_level_names(
                    [*inner, *other, *(line for handler in handlers for line in handler.body)]
                )
            case _:
                pass
