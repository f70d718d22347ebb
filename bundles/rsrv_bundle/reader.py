"""Reader of bundles: find their files, and check that they agree with the manifest.

It checks everything that needs no compiler. `rsrv_bundle.modules` reads the content of the modules.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rsrv_bundle import manifest as manifest_file
from rsrv_bundle import weights as weights_file
from rsrv_bundle import yaml12
from rsrv_bundle.dtypes import BYTES
from rsrv_bundle.errors import BundleError, Problems, mismatch
from rsrv_bundle.hooks import check_hooks
from rsrv_bundle.spec import Bundle, Manifest, WeightSpec
from rsrv_bundle.tensors import MAX_EXTENT

HOOKS_FILE = "model.py"
_JULIA_HOOKS_FILE = "model.jl"

NAME_RULE = "a bundle's directory name is letters, digits, '_', '-' and '.', and starts with no '.'"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_MODULE = re.compile(r"(model(?:\.v(?:0|[1-9]\d{0,5}))?)(?:\.b([1-9]\d{0,9}))?\.mlir", re.ASCII)
_MAX_ENTRIES = 10_000
_MAX_DEPTH = 16
_MAX_HOLES = 2**30


def find_bundles(root: str | os.PathLike[str]) -> list[Path]:
    """Return the bundles directly below `root`, by name.

    A bundle is a directory with a manifest.yaml. Unreadable directories are also returned, because reading them reports the reason.
    Raises OSError if `root` cannot be listed.
    """
    return sorted(
        entry for entry in Path(root).iterdir() if may_be_bundle(entry.name) and _has_manifest(entry)
    )


def may_be_bundle(name: str) -> bool:
    """Return whether a directory of this name may be a bundle.

    Hidden directories are not bundles, because they hold unfinished copies. Neither is a file system's lost+found.
    """
    return not name.startswith(".") and name != "lost+found"


def may_be_name(name: str) -> bool:
    """Return whether a model and its bundle's directory can have this name; see NAME_RULE."""
    return _NAME.fullmatch(name) is not None


def _has_manifest(entry: Path) -> bool:
    try:
        return (entry / manifest_file.FILE).is_file()
    except OSError:
        return True


def read_bundle(path: str | os.PathLike[str], *, digest: bool = True, verify: bool = True) -> Bundle:
    """Read and check the bundle in the directory `path`.

    This needs neither jax nor a device. It maps nothing and runs nothing. With `digest=False`, not every byte is read, and
    `Bundle.digest` is empty. With `verify=False`, the checksums in the manifest are trusted without reading the files;
    `WeightsFile.read_all` and `check_signatures` compare them later. Raises BundleError with all problems.
    """
    # Do not resolve links. If the path is a link to a versioned directory, the model has the name of the link.
    directory = Path(os.path.abspath(path))
    name = directory.name
    problems = Problems()
    if not may_be_name(name):
        problems.add(name, "", NAME_RULE)
    if not directory.is_dir():
        raise BundleError([*problems.lines, f"{name}: there is no such directory"])
    files = list_files(directory, problems)
    if _JULIA_HOOKS_FILE in files:
        problems.add(
            _JULIA_HOOKS_FILE,
            "",
            "Julia hooks cannot run here; rewrite them as preprocess and postprocess in model.py"
            " and remove this file",
        )
    if manifest_file.FILE not in files:
        problems.add(manifest_file.FILE, "", "is missing; every bundle needs one")
        raise BundleError(problems.lines)
    for inner in _inner_bundles(files):
        # `mv new old` moves `new` into `old` if `old` exists. Without this check, the server would still serve the old model.
        problems.add(
            inner,
            "",
            f"is a bundle inside this bundle. mv and cp -r put it there because {name} existed. Rename {name} to a name that"
            f" starts with '.', and then rename the inner bundle to {name}",
        )
    hooks = files.get(HOOKS_FILE)
    data = _read_manifest(files[manifest_file.FILE], problems)
    manifest = manifest_file.parse_manifest(
        # Do not report the missing model.py of a Julia bundle, because its Julia hooks are already reported.
        data,
        name=name,
        has_hooks=hooks is not None or _JULIA_HOOKS_FILE in files,
        problems=problems,
    )
    if manifest is None:
        raise BundleError(problems.lines)
    modules: dict[tuple[int, int], Path] = {}
    weights: tuple[WeightSpec, ...] = ()
    file = None
    stamp: tuple[int, ...] = ()
    if manifest.kind == "model":
        modules = _find_modules(manifest, files, problems)
        file = files.get(weights_file.FILE)
        if file is not None:
            reverse = manifest.format_version == "2.0"
            # Take the stamp before reading the header, so that `WeightsFile` detects a change in between.
            stamp = weights_file.stamp(file.stat())
            own = Problems()
            weights = weights_file.read_weights(file, reverse=reverse, problems=own)
            listed = manifest.sha256.get(file.name)
            if own.lines and listed is not None and _sha256(file, file.name) != listed:
                # The file does not match its checksum. Report only this, because other broken rules would not help the author.
                own.lines = [mismatch(file.name)]
            problems.lines += own.lines
        elif manifest.format_version == "2.0":
            problems.add(
                weights_file.FILE, "", "is missing; format 2.0 needs it even when it holds no tensor"
            )
    if manifest.format_version != "2.0":
        _check_listed(
            manifest, {path.name for path in (*modules.values(), *([file] if file else []))}, problems
        )
    if hooks is not None and manifest.kind == "model":
        _check_strings(manifest, hooks, problems)
    tokenizer = manifest.generate.tokenizer if manifest.generate else None
    if tokenizer is not None and tokenizer not in files:
        problems.add(
            manifest_file.FILE, "generate.tokenizer", f"there is no file {tokenizer!r:.80} in the bundle"
        )
    problems.raise_if_any()
    bundle = Bundle(
        name=name,
        path=directory,
        manifest=manifest,
        hooks=hooks,
        modules=modules,
        weights_file=file,
        weights=weights,
        digest="",
        weights_stamp=stamp,
    )
    if not digest:
        return bundle
    return replace(bundle, digest=_digest(files, checksums(bundle) if verify else manifest.sha256))


def _inner_bundles(files: Mapping[str, Path]) -> list[str]:
    """Return the folders of a bundle that are themselves bundles. Such a folder has a manifest, and modules, weights or hooks.

    A manifest.yaml alone may belong to another program.
    """
    folders: dict[str, set[str]] = {}
    for path in files:
        folder, _, name = path.partition("/")
        folders.setdefault(folder, set()).add(name)
    return sorted(
        folder
        for folder, names in folders.items()
        if manifest_file.FILE in names
        and any(name in (HOOKS_FILE, weights_file.FILE) or _MODULE.fullmatch(name) for name in names)
    )


def _check_strings(manifest: Manifest, hooks: Path, problems: Problems) -> None:
    """Report client tensors with strings that no hook converts from or to tensors of the module."""
    sides = (
        ("client_inputs", manifest.client_inputs, "preprocess"),
        ("client_outputs", manifest.client_outputs, "postprocess"),
    )
    for section, specs, hook in sides:
        named = [spec.name for spec in specs or () if spec.dtype == BYTES]
        if named and hook not in check_hooks(hooks, manifest.kind):
            rule = f"only {hook} in {HOOKS_FILE} can convert strings, but this function is missing"
            problems.add(manifest_file.FILE, f"{section}.{named[0]}", rule)


def checksums(bundle: Bundle) -> dict[str, str]:
    """Return the SHA-256 of the weights and of every module, by file name, as they are now.

    Raises BundleError if a file is gone, or if the manifest has another checksum of it.
    """
    digests = sha256_of(bundle.summed_files)
    listed = bundle.manifest.sha256
    if torn := [name for name in digests if listed.get(name, digests[name]) != digests[name]]:
        raise BundleError(map(mismatch, torn))
    return digests


def sha256_of(files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256, hexadecimal, of each file's content, by the file's name. Raises BundleError if a file is gone."""
    return {file.name: _sha256(file, file.name) for file in files}


def list_files(directory: Path, problems: Problems) -> dict[str, Path]:
    """Return the path of every regular file by its relative POSIX name, without Python's caches.

    Links must stay inside the bundle. Devices and pipes are refused, because opening one can block forever. Raises BundleError if
    there are too many files.
    """
    files: dict[str, Path] = {}
    folders = [""]
    count = 0
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(directory / folder) as listing:
                # Read at most one entry more than allowed, which is enough to detect that there are too many.
                entries = [*islice(listing, _MAX_ENTRIES - count + 1)]
        except OSError as e:
            problems.add(folder or ".", "", f"cannot be listed: {e.strerror}")
            continue
        count += len(entries)
        if count > _MAX_ENTRIES:
            problems.add(directory.name, "", f"holds more than {_MAX_ENTRIES} files and directories")
            raise BundleError(problems.lines)
        for entry in sorted(entries, key=lambda entry: entry.name):
            relative = f"{folder}/{entry.name}" if folder else entry.name
            rule, mode = _wrong_file(entry, relative, directory)
            if rule:
                problems.add(relative, "", rule)
            elif stat.S_ISREG(mode):
                files[relative] = Path(entry.path)
            elif entry.name != "__pycache__":
                folders.append(relative)
    return files


def _wrong_file(entry: os.DirEntry[str], relative: str, root: Path) -> tuple[str, int]:
    """Return the rule that a directory entry breaks, or an empty text, and the entry's mode."""
    if not relative.isprintable():
        return "has a name that cannot be printed; rename it", 0
    if relative.count("/") > _MAX_DEPTH:
        return f"lies more than {_MAX_DEPTH} directories deep", 0
    try:
        status = entry.stat()
        if entry.is_symlink():
            if not Path(entry.path).resolve(strict=True).is_relative_to(root.resolve()):
                return "is a link that leaves the bundle; put the file itself here", 0
            if stat.S_ISDIR(status.st_mode):
                return "is a link to a directory; put the directory itself here", 0
        if not stat.S_ISREG(status.st_mode):
            if stat.S_ISDIR(status.st_mode):
                return "", status.st_mode
            return "is neither a file nor a directory; remove it", 0
        if status.st_size > _MAX_HOLES and _holes(entry.path, status.st_size) > _MAX_HOLES:
            return (
                f"is a sparse file with more than {_MAX_HOLES} bytes of holes; copy it with --sparse=never",
                0,
            )
    except (OSError, RuntimeError):
        return "cannot be read, or is a link to nothing", 0
    return "", status.st_mode


def _holes(path: str, size: int) -> int:
    """Return the number of bytes of holes in a file, counted up to the limit.

    Holes are limited: writing them costs nothing, but reading them costs as much as reading other bytes.
    """
    holes = at = 0
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while at < size and holes <= _MAX_HOLES:
            start = os.lseek(fd, at, os.SEEK_HOLE)
            try:
                at = os.lseek(fd, start, os.SEEK_DATA)
            except OSError:  # There is no more data.
                at = size
            holes += max(0, at - start)
    finally:
        os.close(fd)
    return holes


def _read_manifest(path: Path, problems: Problems) -> bytes:
    try:
        with path.open("rb") as file:
            # Read one byte more than allowed, so that the parser detects a file that is too long.
            return file.read(yaml12.MAX_BYTES + 1)
    except OSError as e:
        problems.add(manifest_file.FILE, "", f"cannot be read: {e.strerror}")
        raise BundleError(problems.lines) from e


def _find_modules(
    manifest: Manifest, files: Mapping[str, Path], problems: Problems
) -> dict[tuple[int, int], Path]:
    """Return the file of each module by (variant, batch size).

    The prefix of a file is `model`, or `model.v{i}` with variants. If files `<prefix>.b{N}.mlir` exist, they are the modules of this
    prefix, and `<prefix>.mlir` is ignored. There must be a file for every declared size. Files of other sizes are also modules of
    the bundle. If there are no files `<prefix>.b{N}.mlir`, `<prefix>.mlir` must exist, and its batch size in the result is 0.
    """
    by_prefix: dict[str, dict[int, Path]] = {}
    for name, path in files.items():
        match = _MODULE.fullmatch(name)
        if match:
            by_prefix.setdefault(match[1], {})[int(match[2] or 0)] = path
        elif name.startswith("model.") and name.endswith(".mlir"):
            problems.add(
                name,
                "",
                "is not a module name: model.mlir, model.b{N}.mlir, model.v{i}.mlir or model.v{i}.b{N}.mlir,"
                " numbers without leading zeros",
            )
    modules: dict[tuple[int, int], Path] = {}
    variants = range(len(manifest.input_shapes)) if manifest.input_shapes else [None]
    for variant in variants:
        prefix = "model" if variant is None else f"model.v{variant}"
        by_size = by_prefix.get(prefix, {})
        sized = {size: path for size, path in by_size.items() if size}
        if not by_size:
            rule = "is missing, and there is no file for any batch size either"
            problems.add(f"{prefix}.mlir", "", rule)
        for size in manifest.compiled_batch_sizes if sized else ():
            if size not in sized:
                rule = f"is missing, but batching.compiled_batch_sizes declares {size}"
                problems.add(f"{prefix}.b{size}.mlir", "", rule)
        if len(sized) > 1 and not manifest.batched:
            sizes = ", ".join(map(str, sorted(sized)))
            rule = f"no executable input has a batch axis, so there can be only one module, not sizes {sizes}"
            problems.add(f"{prefix}.b*.mlir", "", rule)
        if any(size > MAX_EXTENT for size in sized):
            problems.add(f"{prefix}.b{max(sized)}.mlir", "", f"batch sizes end at {MAX_EXTENT}")
        for size, path in sorted((sized or by_size).items()):
            modules[variant or 0, size] = path
    return modules


def _check_listed(manifest: Manifest, names: set[str], problems: Problems) -> None:
    """Report missing and superfluous checksums. The weights and every module must have a checksum, and no other file may."""
    for name in sorted(names - manifest.sha256.keys()):
        rule = (
            "is missing; format 3 has the SHA-256 of the weights and of every module: export the bundle again"
        )
        problems.add(manifest_file.FILE, f"sha256.{name}", rule)
    for name in sorted(manifest.sha256.keys() - names):
        if name == weights_file.FILE:
            problems.add(name, "", "is missing: copy the whole bundle again, or export it again")
        elif not any(line.startswith(f"{name}: is missing") for line in problems.lines):
            rule = "is neither a module nor the weights of this bundle; export the bundle again"
            problems.add(manifest_file.FILE, f"sha256.{name}", rule)


def _digest(files: Mapping[str, Path], known: Mapping[str, str]) -> str:
    """Return one hash over the names and contents of all files.

    Each content is hashed separately, so that the boundaries between files also count. `known` has the SHA-256 of files that need
    not be read. Raises BundleError if a file is gone.
    """
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = known.get(name) or _sha256(path, name)
        total.update(f"{len(name)}:{name}:{content}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _sha256(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise BundleError(f"{name}: cannot be read: {e.strerror}") from e
