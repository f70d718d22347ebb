"""Check of a bundle's hooks file, `model.py`, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from rsrv_bundle.errors import Problems
from rsrv_bundle.spec import Kind

#: Positional arguments of each hook, by kind of bundle.
HOOKS: Mapping[Kind, Mapping[str, tuple[str, ...]]] = {
    "model": {"preprocess": ("inputs",), "postprocess": ("outputs",)},
    "meta": {"run": ("inputs", "call")},
}
_MAX_BYTES = 1_000_000


def source_of(hooks: Path | str) -> str:
    """Return the text of model.py. A Path, or a str of one line that ends with .py, names a file. Another str is the text.

    Raises OSError if the file cannot be read.
    """
    if isinstance(hooks, str) and ("\n" in hooks or not hooks.endswith(".py")):
        return hooks
    return Path(hooks).read_text(encoding="utf-8")


def check_hooks(file: Path, kind: Kind) -> tuple[str, ...]:
    """Return the hooks that `file` defines at its top level, by assignment, import or `def`.

    A model has `preprocess(inputs)` and `postprocess(outputs)`. A meta model has `run(inputs, call)`, which may be an `async def`.
    Raises BundleError if the file is not valid Python, if it defines none of the hooks of this kind of bundle, or if a hook cannot
    be called with its arguments.
    """
    problems = Problems()
    arguments = HOOKS[kind]
    hooks: tuple[str, ...] = ()
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"holds more than {_MAX_BYTES} bytes")
        tree = ast.parse(file.read_bytes(), filename=file.name)
        defined = list(_top_level_names(tree.body))
        hooks = tuple(name for name in arguments if any(name == defined_name for defined_name, _ in defined))
        if not hooks:
            problems.add(file.name, "", f"defines no hook; define {' or '.join(arguments)} as a function")
        for name in hooks:
            rules = [
                _wrong_use(name, how, arguments[name])
                for defined_name, how in defined
                if defined_name == name
            ]
            # If there are several definitions, only running the file would show which one is used. So report them only if all are
            # wrong.
            if all(rules):
                problems.add(file.name, name, rules[-1])
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as e:
        problems.add(file.name, "", f"is not valid Python: {e}")
    problems.raise_if_any()
    return hooks


def _wrong_use(name: str, definition: ast.AST | None, arguments: tuple[str, ...]) -> str:
    """Return why a hook with this definition cannot be called.

    The text is empty if the hook can be called, or if only running the file would show whether it can.
    """
    signature = f"{name}({', '.join(arguments)})"
    if isinstance(definition, ast.AsyncFunctionDef) and name != "run":
        return f"must be a plain function; write def {signature}"
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return ""
    if not isinstance(definition, ast.Lambda) and definition.decorator_list:
        return ""
    takes = definition.args
    positional = [*takes.posonlyargs, *takes.args]
    required = len(positional) - len(takes.defaults)
    enough = len(positional) >= len(arguments) or takes.vararg is not None
    by_name = any(default is None for default in takes.kw_defaults)
    if required <= len(arguments) and enough and not by_name:
        return ""
    return f"takes ({ast.unparse(takes)}), but it is called as {signature}"


def _top_level_names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield every defined name, with its function if the source shows it."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, statement
            case ast.ClassDef(name=name):
                yield name, None
            case ast.Assign(targets=targets, value=value):
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                yield name, value
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name, None) for alias in names)
            case ast.If(body=inner, orelse=further):
                yield from _top_level_names([*inner, *further])
            case ast.Try(body=inner, handlers=handlers, orelse=further):
                yield from _top_level_names(
                    [*inner, *further, *(line for handler in handlers for line in handler.body)]
                )
            case _:
                pass
