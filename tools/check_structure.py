"""Print the size of the source tree, and check its structure.

    python tools/check_structure.py

The command exits with 1 for circles of imports, imports against the layers, and class names with two meanings. Sizes are only
printed, because shorter is not simpler.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Folders of packages, by the name under which they are imported.
PACKAGES = {
    "rsrv": "triton_backend/rsrv",
    "rsrv_bundle": "bundles/rsrv_bundle",
    "rsrv_gateway": "gateway/rsrv_gateway",
    "rsrv_gen": "model_repository_gen/rsrv_gen",
}
#: Packages of the core, below rsrv.
CORE = ("runtime", "scheduler", "stub", "wire", "control")
#: Our packages that the modules of a package may import, in addition to each other.
LAYERS = {
    "rsrv.wire": (),
    "rsrv.scheduler": ("rsrv.histogram", "rsrv.text"),
    "rsrv.placement": ("rsrv.settings_fleet", "rsrv.text"),
    "rsrv.front": ("rsrv.wire", "rsrv.placement"),
}
#: Packages at the top, each with the packages that may import it.
TOPS = {
    "rsrv_gateway": ("rsrv.cli",),
    "rsrv.cli": (),
    "rsrv.serve": ("rsrv.cli", "rsrv.gpu"),
    "rsrv.gpu": ("rsrv.cli",),
}


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def imports(self, names: Collection[str]) -> set[str]:
        """Return the modules among `names` that this module imports, also inside functions."""
        imported: set[str] = set()
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                inner = {f"{base}.{alias.name}" for alias in node.names}
                # An import of a package counts for the package itself, not for its modules.
                imported |= inner & set(names) or {base}
        return imported & set(names) - {self.name}


def read_modules(root: Path = ROOT) -> dict[str, Module]:
    """Return the hand-written modules of all packages, by name."""
    modules = {}
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, path)
    return modules


def arrows(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return the imported modules of each module."""
    return {name: module.imports(modules.keys()) for name, module in modules.items()}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of two or more modules (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return groups


def _below(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def backward(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the imports that break LAYERS and TOPS."""
    broken = []
    for name, targets in graph.items():
        for target in sorted(targets):
            low = any(
                _below(name, [layer]) and not _below(target, [layer, *allowed])
                for layer, allowed in LAYERS.items()
            )
            high = any(
                _below(target, [top]) and not _below(name, [top, *allowed]) for top, allowed in TOPS.items()
            )
            if low or high:
                broken.append(f"{name} -> {target}")
    return broken


def homonyms(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return names of classes that several modules define. A leading underscore is ignored."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module.name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def docstrings(modules: Iterable[Module]) -> int:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(
        isinstance(node, kinds) and ast.get_docstring(node) is not None
        for module in modules
        for node in ast.walk(module.tree)
    )


def settings() -> int:
    """Count the keys of rsrv.yaml's schema. The keys of a section that is used several times count once."""
    from pydantic import BaseModel

    from rsrv.settings import Settings

    def leaves(model: type[BaseModel], seen: set[type[BaseModel]]) -> int:
        if model in seen:
            return 0
        seen.add(model)
        count = 0
        for field in model.model_fields.values():
            inner = [model for model in _classes(field.annotation) if issubclass(model, BaseModel)]
            count += sum(leaves(model, seen) for model in inner) if inner else 1
        return count

    return leaves(Settings, set())


def _classes(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _classes(argument)


def lines_of(paths: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def traced_request() -> str:
    """Return how many calls, and changes of module, one warm request takes (`trace_request.py`)."""
    command = [sys.executable, str(ROOT / "tools" / "trace_request.py"), "--summary"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.rstrip() or f"one warm request: not traced, {command[1]} failed"


def main() -> int:
    """Print the table and the faults. Return 1 if there is a fault."""
    modules = read_modules()
    graph = arrows(modules)
    core = [
        name for name in modules if name.split(".")[:1] == ["rsrv"] and set(name.split(".")[1:2]) & set(CORE)
    ]
    gateway = [module for name, module in modules.items() if name.startswith(("rsrv_gateway", "rsrv.serve"))]
    pages = sorted((ROOT / "docs").glob("*.md"))
    targets = re.findall(r"^([a-z][a-z-]*):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    sources = [module.path for module in modules.values()] + sorted((ROOT / "tools").glob("*.py"))
    tests = sorted((ROOT / "tests").rglob("*.py"))
    print(
        f"source without tests: {lines_of(sources):,} lines, {len(sources)} files",
        f"core ({', '.join(CORE)}): {len(core)} files",
        f"gateway and serve: {sum(module.lines for module in gateway):,} lines, {len(gateway)} files",
        f"tests, benches, chaos and fuzz: {lines_of(tests):,} lines",
        f"pages: {len(pages)}, {sum(len(page.read_text().split()) for page in pages):,} words",
        f"make targets: {len(targets)}",
        f"settings: {settings()}",
        f"docstrings: {docstrings(modules.values()):,}",
        traced_request(),
        sep="\n",
    )
    faults = {
        "circles of imports": [" <-> ".join(group) for group in circles(graph)],
        "imports against the layers": backward(graph),
        "class names with two meanings": [
            f"{name}: {', '.join(where)}" for name, where in homonyms(modules.values()).items()
        ],
    }
    verbose = "-v" in sys.argv[1:]
    for fault, lines in faults.items():
        print(f"{fault}: {len(lines)}")
        for line in lines[: None if verbose else 10]:
            print(f"    {line}")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
