"""Models that the command line names as `package.module:factory`.

Imports a framework only for a model of that framework.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rsrv.extras import install_command
from rsrv.text import nearest

#: Descriptions of the kinds of models that can be exported.
KINDS: Mapping[str, str] = {
    "jax": "a JAX function of parameters and inputs, with its parameters",
    "nnx": "a Flax NNX module",
    "equinox": "an Equinox module",
    "torch": "a PyTorch module",
    "onnx": "an ONNX file",
}

#: Extra that installs each missing package.
_EXTRAS = {
    "jax": "export",
    "flax": "export-flax",
    "equinox": "export-equinox",
    "torch": "export-torch",
    "torchax": "export-torch",
    "onnx": "export-onnx",
    "onnxruntime": "export-onnx",
}

#: Example of a factory's return value for each kind of model.
_SAMPLES = {
    "jax": 'fn, params, {"x": jnp.ones((1, 8))}',
    "nnx": 'model, {"x": jnp.ones((1, 8))}',
    "equinox": 'model, {"x": jnp.ones((1, 8))}',
    "torch": 'net.eval(), {"x": torch.rand(1, 8)}',
}


#: For each kind of model: the module of this package, its function that makes `LoadedModel.eager`, and its exporting function.
_EXPORTERS = {
    "jax": ("export", "eager_jax", "export_bundle"),
    "nnx": ("from_nnx", "eager_nnx", "export_nnx"),
    "equinox": ("from_equinox", "eager_equinox", "export_equinox"),
    "torch": ("from_torch", "eager_torch", "export_torch"),
}


def extra_of(kind: str) -> str:
    """Return the extra that installs the exporter of a kind of model."""
    return _EXTRAS[{"nnx": "flax"}.get(kind, kind)]


class LoadError(Exception):
    """The model cannot be loaded. The message has the reason. `__cause__`, if any, is the program's exception."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model as its author wrote it."""

    #: A function that takes numpy arrays by input name. It returns the model's results as numpy arrays or as `calling.Results`.
    eager: Callable[..., Any]
    #: The exporting function of this kind of model, such as `rsrv_bundle.export.export_bundle`, with the model as its first
    #: arguments. It still needs the example inputs (except for ONNX) and the options.
    export: partial[Any]
    #: Example inputs that the factory returned, or an empty mapping.
    examples: Mapping[str, Any]


def load(kind: str, target: str) -> LoadedModel:
    """Load the model that `target` names.

    `target` is `package.module:name` and names a model, or a function without arguments that returns the model. With the
    kind `onnx`, `target` is the path of a file. With the kind `jax`, the model is a pair of a function and parameters. The
    model may also be in a tuple whose last part is the example inputs by name. Modules in the working directory can be
    imported, as with `python -m`. Raises LoadError.

    kind: one of KINDS.
    """
    if kind == "onnx":
        return _onnx(target)
    value = named(target)
    try:
        made = value if _is_model(kind, value) or _is_linen(value) or not callable(value) else value()
    except ModuleNotFoundError as e:
        raise _missing(target, e) from None
    except Exception as e:
        raise LoadError(f"{target}: raised {type(e).__name__}: {e}") from e
    parts = made if isinstance(made, tuple) else (made,)
    model, further = (parts[:2], parts[2:]) if kind == "jax" else (parts[0], parts[1:])
    if _is_linen(model):
        raise LoadError(
            f"{target}: is a Flax Linen module; export it with --jax and a factory that returns (net.apply, variables,"
            ' {"x": x}), where x is the name of the argument'
        )
    if (
        not _is_model(kind, model)
        or len(further) > 1
        or not all(isinstance(part, Mapping) for part in further)
    ):
        raise LoadError(
            f"{target}: must return {KINDS[kind]}, and may return example inputs by name after it, such as"
            f" `return {_SAMPLES[kind]}`"
        )
    # Functions and classes know the file that defines them. Other objects do not, so use the module of `target`.
    code = (
        value
        if inspect.isfunction(value) or inspect.isclass(value)
        else import_module(target.partition(":")[0])
    )
    try:
        module, eager, export = _EXPORTERS[kind]
        exporter = import_module(f"rsrv_bundle.{module}")
        arguments = model if kind == "jax" else (model,)
        source = getattr(exporter, eager)(*arguments)
        write = partial(getattr(exporter, export), *arguments, code=code)
    except ModuleNotFoundError as e:
        raise _missing(target, e) from None
    except (ImportError, AttributeError) as e:
        raise LoadError(
            f"{target}: its exporter fails: {type(e).__name__}: {e}; run {install_command(extra_of(kind))}"
        ) from e
    return LoadedModel(source, write, dict(further[0]) if further else {})


def _onnx(target: str) -> LoadedModel:
    if not Path(target).is_file():
        raise LoadError(f"{target}: there is no such file; --onnx takes the path of an ONNX file")
    try:
        from rsrv_bundle.from_onnx import eager_onnx, export_onnx
    except ModuleNotFoundError as e:
        raise _missing(target, e) from None
    return LoadedModel(eager_onnx(target), partial(export_onnx, target), {})


def named(target: str) -> Any:
    """Import the object `package.module:name`, also from modules in the working directory. Raises LoadError."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise LoadError(f"'{target}': {_instead(Path(module))}")
    if module.endswith(".py"):
        raise LoadError(f"'{target}': write {_dotted(Path(module))}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        container = import_module(module)
    except ModuleNotFoundError as e:
        if e.name and f"{module}.".startswith(f"{e.name}."):
            raise LoadError(f"{target}: {e}{_places(module)}") from None
        raise _missing(target, e) from None
    except Exception as e:
        raise LoadError(f"{target}: cannot be imported: {type(e).__name__}: {e}") from e
    try:
        return getattr(container, name)
    except AttributeError:
        own = [
            word for word, value in vars(container).items() if getattr(value, "__module__", None) == module
        ]
        raise LoadError(f"{target}: module {module} has no {name!r}{nearest(name, own)}") from None


def _instead(target: Path) -> str:
    """Return a remedy for a target that names no factory."""
    if target.suffix == ".py":
        return f"write {_dotted(target)}:factory, with the name of a function in that file"
    if target.is_file():
        return (
            "a file of weights is not a model: write a function that makes the module, loads the file and returns it"
            " (module.load_state_dict(torch.load(FILE)); module.eval()), and name it as package.module:function"
        )
    return "write package.module:factory"


def _dotted(file: Path) -> str:
    """Return the name of a file as a module.

    The name of a file outside the working directory is relative to the file's own folder.
    """
    outside = file.is_absolute() or ".." in file.parts
    return file.stem if outside else ".".join(file.with_suffix("").parts)


def _places(module: str) -> str:
    """Return the end of an error text: the places where a module was searched, and a module with a similar name, if any."""
    files = Path(*module.split(".")[:-1]).glob("*.py")
    hint = nearest(module, map(_dotted, files))
    return f" in {os.getcwd()} or among the installed packages{hint if 'did you mean' in hint else ''}"


def _is_linen(value: Any) -> bool:
    return any(base.__module__.startswith("flax.linen.") for base in type(value).__mro__)


def _missing(target: str, error: ModuleNotFoundError) -> LoadError:
    package = (error.name or "").partition(".")[0]
    cure = f"; run {install_command(_EXTRAS[package])}" if package in _EXTRAS else ""
    return LoadError(f"{target}: {error}{cure}")


def _is_model(kind: str, value: Any) -> bool:
    """Return whether the value is a model. A class whose instances are models is not a model itself."""
    if kind == "jax":
        return isinstance(value, tuple) and len(value) >= 2 and callable(value[0])
    home, name = {
        "nnx": ("flax.nnx", "Module"),
        "equinox": ("equinox", "Module"),
        "torch": ("torch.nn", "Module"),
    }[kind]
    return isinstance(value, getattr(import_module(home), name))
