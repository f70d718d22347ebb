"""Loading of a bundle's `model.py`, which is trusted Python code of the user, executed in this process."""

import builtins
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
Hook = Callable[[Arrays], Arrays]


#: An import may take at least this many seconds even if the limit for hooks is shorter, because large libraries take several
#: seconds.
_IMPORT_S = 60.0
#: Folders of the files that `_execute` has executed.
_folders: list[Path] = []


class HookError(Exception):
    """model.py or the tokeniser is faulty. The message names the fault and the remedy."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """A model's hooks.

    A hook takes and returns row-major arrays by name, for one request. If a hook is None, tensors pass unchanged.
    """

    preprocess: Hook | None = None
    postprocess: Hook | None = None


def load_hooks(path: Path) -> Hooks:
    """Execute a model's `model.py`, if it exists, and return its hooks. Raises HookError, and any error of the file."""
    if not path.exists():
        return Hooks()
    module = _execute(path)
    hooks = {name: _function(module, name, "one dict of arrays") for name in ("preprocess", "postprocess")}
    if not any(hooks.values()):
        raise HookError(
            "model.py: defines neither preprocess nor postprocess; define one, or remove the file"
        )
    return Hooks(**hooks)


def load_run(path: Path) -> Callable[..., Any]:
    """Execute a meta model's `model.py`, and return its `run`. Raises HookError, and any error of the file."""
    run = _function(_execute(path), "run", "a dict of arrays and `call`")
    if run is None:
        raise HookError("model.py: a meta model defines run(inputs, call)")
    return run


def import_limit_s(hook_timeout_s: float | None) -> float | None:
    """Return the limit of an import of `model.py` for this `stub.hook_timeout_s`, or None without a limit."""
    return None if hook_timeout_s is None else max(hook_timeout_s, _IMPORT_S)


def _execute(path: Path) -> types.ModuleType:
    """Execute a `model.py` as Python executes a script.

    The file can import the modules in its folder. It has a module name, so that its functions and classes can be pickled:
    processes of `multiprocessing` get this process's `sys.path`, and import the file as `model`. The process of an alias or
    a meta model executes several such files. Their folders may have modules with equal names.
    """
    folder = path.parent
    if folder not in _folders:
        _folders.append(folder)
        if len(_folders) == 1:
            sys.path.insert(0, str(folder))
    number = 1 + _folders.index(folder)
    module = types.ModuleType("model" if number == 1 else f"model_{number}")
    module.__file__ = str(path)
    if number > 1:
        module.__dict__["__builtins__"] = _Imports.of(f"bundle_{number}", folder).builtins
    sys.modules[module.__name__] = module  # Pickles, dataclasses and typing look a module up by its name.
    # Compile the file here instead of importing it, because an import would write a .pyc file into the folder. Triton would take
    # that for a new version of the model.
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # noqa: S102  trusted code, by the format's definition
    except UnicodeEncodeError as error:
        # Python in Triton's stub processes encodes file names in ASCII, and this cannot be changed here.
        if sys.getfilesystemencoding() != "utf-8" and os.path.lexists(error.object.encode()):
            raise HookError(
                f"model.py cannot open {Path(error.object).name!a}: Triton's stub processes allow only ASCII in file "
                "names. Rename the file"
            ) from error
        raise
    except ModuleNotFoundError as error:
        raise HookError(
            f"model.py: {error}. Hooks run with the Python in {sys.prefix}: install the package there. "
            "`rsrv triton pip install PACKAGE` does that for a server of `rsrv triton install`"
        ) from error
    return module


class _Imports(MetaPathFinder):
    """The imports of a second or later bundle in a process. The modules in the bundle's folder form a package of their own."""

    def __init__(self, package: str, folder: Path) -> None:
        self._package, self._folder = package, folder
        self.builtins = {**vars(builtins), "__import__": self._import}

    @classmethod
    def of(cls, package: str, folder: Path) -> Self:
        """Return the imports of a bundle. A file that is executed again gets the same object."""
        for finder in sys.meta_path:
            if isinstance(finder, cls) and finder._package == package:
                return finder
        finder = cls(package, folder)
        module = types.ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module
        sys.meta_path.insert(0, finder)
        return finder

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> types.ModuleType:
        """Do what the statement `import` does in a file of this bundle."""
        first = name.partition(".")[0]
        if level > 0 or PathFinder.find_spec(first, [str(self._folder)]) is None:
            return builtins.__import__(name, globals, locals, fromlist, level)
        module = builtins.__import__(f"{self._package}.{name}", globals, locals, fromlist)
        return module if fromlist else sys.modules[f"{self._package}.{first}"]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the package. The module's own imports then work as the imports of `model.py`."""
        if not fullname.startswith(f"{self._package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.builtins = self.builtins
        return spec


class _Loader(SourceFileLoader):
    builtins: Mapping[str, Any]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = self.builtins
        super().exec_module(module)


def _function(module: types.ModuleType, name: str, arguments: str) -> Callable[..., Any] | None:
    function = getattr(module, name, None)
    if function is not None and not callable(function):
        raise HookError(f"model.py: {name} must be a function of {arguments}, not {type(function).__name__}")
    return function
