"""`rsrv-bundle export`: parse the inputs on the command line (`image=f32[3,h,w]`), load the model, write the bundle."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.text import counted, os_error
from rsrv_bundle import dtypes
from rsrv_bundle.commands.samples import read_samples
from rsrv_bundle.commands.sources import KINDS, LoadedModel, LoadError, load
from rsrv_bundle.errors import BundleError
from rsrv_bundle.interface import LETTERS
from rsrv_bundle.narrowing import bytes_before
from rsrv_bundle.reader import find_bundles
from rsrv_bundle.spec import Bundle

_INPUT = re.compile(r"(?P<name>[^=]+)=(?P<dtype>\w+)\[(?P<sizes>[^\]]*)\]")
_BATCH = frozenset("nb")


def export(arguments: argparse.Namespace) -> int:
    """Write the bundle, and print a line, or a line for each problem. Return the exit status, as `cli.main` does."""
    [(kind, target)] = [(kind, text) for kind in KINDS if (text := getattr(arguments, kind)) is not None]
    try:
        for option in HF_OPTIONS:
            if getattr(arguments, option) is not None and (kind, option) != ("onnx", "samples"):
                takers = "--hf and --onnx" if option == "samples" else "--hf"
                raise ValueError(
                    f"--{option.replace('_', '-')}: only works with {takers}; leave this option out"
                )
        source, examples, described = _described(kind, target, arguments)
        if arguments.hooks is not None and not arguments.hooks.is_file():
            raise ValueError(f"--hooks {arguments.hooks}: is not a file")
        for file in arguments.files:
            if not file.exists():
                raise ValueError(f"--files {file}: does not exist")
    except LoadError as e:
        if e.__cause__ is not None:
            traceback.print_exception(e.__cause__)
        return _trouble(str(e))
    except ValueError as e:
        return _trouble(str(e))

    def write() -> Bundle:
        bundle: Bundle = source.export(
            *examples,
            **described,
            batch_sizes=arguments.batch_sizes,
            out_dir=arguments.out_dir,
            outputs=arguments.outputs.split(",") if arguments.outputs else None,
            pad=arguments.pad,
            hooks=arguments.hooks,
            files=arguments.files,
            description=arguments.description,
            platform=arguments.platform,
            tolerance=dict(arguments.tolerance),
            weights=arguments.weights,
            compute=arguments.compute,
            overwrite=arguments.overwrite,
        )
        return bundle

    return _write(target, arguments.out_dir, write)


def _write(source: object, out_dir: Path, write: Callable[[], Bundle]) -> int:
    """Write a bundle, and print lines about it, or why `source` cannot be exported. Return the exit status."""
    try:
        bundle = write()
    except BundleError as e:
        for problem in e.problems:
            print(f"{source}: {problem}", file=sys.stderr)
        return 1
    except OSError as e:
        _trouble(os_error(e))
        return 1
    except Exception:  # noqa: BLE001 - the model may raise anything; its traceback helps its author the most
        traceback.print_exc()
        print(f"{source}: cannot be traced; see the last lines above", file=sys.stderr)
        return 1
    error = bundle.manifest.numerics.get("max_rel_error")
    close = "not run here" if error is None else f"at most {error:.3g} from the model"
    print(
        f"ok {out_dir}: {counted(len(bundle.modules), 'module')}, {counted(len(bundle.weights), 'weight')},"
        f" {bundle.weight_bytes} bytes, {close}"
    )
    errors = bundle.manifest.numerics.get("narrowed")
    if isinstance(errors, Mapping):
        before = bytes_before(bundle.manifest)
        print(f"narrowed from {before} bytes, at most {max(errors.values()):.3g} from the wide modules")
    answers, task = bundle.manifest.numerics.get("answers"), bundle.manifest.task
    if isinstance(answers, Mapping) and task is not None:
        print(f"{task.kind}: whole answers are at most {max(answers.values()):.3g} from the framework's")
    if not bundle.manifest.batched:
        print(
            "no batch axis: requests run one at a time; with --batch-sizes 1,8,32, requests can share an execution"
        )
    print(f"next: rsrv serve {shlex.quote(_served(out_dir))}")
    return 0


#: Options of the command line that belong to --hf. The option `samples` also belongs to --onnx.
HF_OPTIONS = (
    "task",
    "adapter",
    "lengths",
    "pooling",
    "too_long",
    "dimensions",
    "image_size",
    "context",
    "slots",
    "samples",
)
#: Options that --hf refuses, because the directory determines them. The value is the option's default.
_DESCRIBED: Mapping[str, Any] = {
    "input": [],
    "input_shape": [],
    "batch_axis": [],
    "bind": [],
    "pad": "",
    "output_names": None,
    "outputs": None,
}


def export_directory(arguments: argparse.Namespace) -> int:
    """Write the bundle of a directory of Hugging Face. Print lines, and return the exit status, as `export` does."""
    from rsrv_bundle.hf.export import export_hf
    from rsrv_bundle.hf.recipe import HubOptions

    try:
        for option, unset in {**_DESCRIBED, "hooks": None, "files": (), "working_tree_patch": False}.items():
            if getattr(arguments, option) != unset:
                raise ValueError(
                    f"--{option.replace('_', '-')}: the directory determines this; leave the option out"
                )
        for file in arguments.samples or ():
            if not file.is_file():
                raise ValueError(f"--samples {file}: is not a file")
    except ValueError as e:
        return _trouble(str(e))
    values = {option: getattr(arguments, option) for option in HF_OPTIONS}

    def write() -> Bundle:
        return export_hf(
            arguments.hf,
            out_dir=arguments.out_dir,
            options=HubOptions(
                **{option: value for option, value in values.items() if value is not None},
                batch_sizes=arguments.batch_sizes,
            ),
            description=arguments.description,
            platform=arguments.platform,
            tolerance=dict(arguments.tolerance),
            weights=arguments.weights,
            overwrite=arguments.overwrite,
        )

    return _write(arguments.hf, arguments.out_dir, write)


def _described(
    kind: str, target: str, arguments: argparse.Namespace
) -> tuple[LoadedModel, list[Mapping[str, Any]], dict[str, Any]]:
    """Load the model that the command line names, and describe its inputs.

    Return the model, a list with the example inputs (an empty list for ONNX), and the exporter's options for inputs and outputs.
    Raises ValueError, LoadError.
    """
    if kind == "onnx":
        for flag, value in (
            ("--input", arguments.input),
            ("--output-names", arguments.output_names),
            ("--working-tree-patch", arguments.working_tree_patch),
        ):
            if value:
                raise ValueError(f"{flag}: an ONNX file describes itself; leave the option out")
        return (
            load(kind, target),
            [],
            {
                "batch_axis": {
                    name: _number("--batch-axis", name, text, int) for name, text in arguments.batch_axis
                },
                "bind": {name: _number("--bind", name, text, float) for name, text in arguments.bind},
                "input_shapes": [_named_sizes(text) for text in arguments.input_shape],
                "samples": _arrays(arguments.samples or ()),
            },
        )
    for flag, value in (("--batch-axis", arguments.batch_axis), ("--bind", arguments.bind)):
        if value:
            raise ValueError(f"{flag}: is for ONNX files; describe the inputs with --input")
    inputs = parse_inputs(arguments.input, arguments.input_shape, batched=bool(arguments.batch_sizes))
    source = load(kind, target)
    if arguments.input and source.examples:
        raise ValueError(f"--input: {target} gives example inputs; leave one of the two out")
    if not arguments.input and not source.examples:
        raise ValueError(
            f"--input: {target} gives no example inputs; describe the inputs, such as --input 'x=f32[8]'"
        )
    if arguments.input_shape and source.examples:
        named = ", ".join(source.examples)
        raise ValueError(
            f"--input-shape: the example inputs of {target} ({named}) name no axes; let it return the model alone, and"
            " describe each input with letters for the axes that vary: --input 'NAME=f32[3,h,w]'"
        )
    return (
        source,
        [source.examples or inputs.examples],
        {
            "batch_axis": 0 if arguments.batch_sizes else None,
            "axes": inputs.axes,
            "input_shapes": inputs.input_shapes,
            "output_names": arguments.output_names.split(",") if arguments.output_names else None,
            "working_tree_patch": arguments.working_tree_patch,
        },
    )


def _arrays(files: Sequence[Path]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of the file of `--samples`, by input."""
    if len(files) > 1:
        raise ValueError(f"--samples {' '.join(map(str, files))}: with --onnx, give one .npz file")
    for file in files:
        try:
            return read_samples(file)
        except (OSError, ValueError) as e:
            raise ValueError(f"--samples {file}: {os_error(e) if isinstance(e, OSError) else e}") from e
    return {}


def _number(flag: str, name: str, text: str, kind: type[int | float]) -> Any:
    try:
        return int(text) if text.lstrip("-").isdigit() else kind(text)
    except ValueError:
        raise ValueError(f"{flag} {name}={text}: '{text}' is not a number") from None


def _named_sizes(text: str) -> dict[str, int]:
    """Parse `--input-shape` for an ONNX file: `NAME=SIZE,...`, with the names that axes have in the file."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.rpartition("=")
        if not name or not size.isdigit() or int(size) == 0:
            raise ValueError(f"--input-shape {text}: write NAME=SIZE,NAME=SIZE, e.g. height=224,width=224")
        sizes[name] = int(size)
    return sizes


def _served(bundle: Path) -> str:
    """Return the path to pass to a server: the folder around the bundle, or the bundle itself if the folder has other files."""
    folder = bundle.parent
    try:
        only_bundles = {*folder.iterdir()} == {*find_bundles(folder)}
    except OSError:
        only_bundles = False
    return f"{folder}/" if only_bundles and folder.name not in ("", "..") else str(bundle)


def _trouble(message: str) -> int:
    print(f"rsrv-bundle: {message}", file=sys.stderr)
    return 2


@dataclass(frozen=True, slots=True)
class ParsedInputs:
    """Arguments of `export_bundle` about the inputs."""

    #: Arrays of zeros with the shapes and types of the inputs.
    examples: Mapping[str, np.ndarray[Any, Any]]
    axes: Mapping[str, str]
    input_shapes: Sequence[Mapping[str, int]]


def parse_inputs(inputs: Sequence[str], input_shapes: Sequence[str], *, batched: bool) -> ParsedInputs:
    """Parse `--input` and `--input-shape`. Raises ValueError, which names the wrong option.

    inputs: `NAME=TYPE[SIZE,...]`. A size is a number, `n` or `b` for the batch axis, or the letter of an axis that varies. If
    `batched`, an input without a batch axis gets one in front. input_shapes: `LETTER=SIZE,...`.
    """
    variants = [_variant(text) for text in input_shapes]
    parts = [_input(text, batched) for text in inputs]
    taken = {size for _, _, sizes in parts for size in sizes if not size.isdigit()}
    missing = sorted(taken - _BATCH - set(variants[0] if variants else ()))
    if missing:
        raise ValueError(f"--input: axis '{missing[0]}' has no size; give it one in --input-shape")
    examples, axes = {}, {}
    for name, dtype, sizes in parts:
        shape = [
            int(size) if size.isdigit() else variants[0].get(size, 1) if variants else 1 for size in sizes
        ]
        examples[name] = np.zeros(shape, dtypes.numpy_dtype(dtype))
        # Axes of fixed size get letters that the user has not given to variable axes.
        free = (letter for letter in LETTERS if letter not in taken)
        axes[name] = "".join(next(free) if size.isdigit() else size for size in sizes)
    if len(examples) < len(inputs):
        raise ValueError("--input: two have the same name")
    return ParsedInputs(examples, axes, variants)


def _input(text: str, batched: bool) -> tuple[str, str, list[str]]:
    match = _INPUT.fullmatch(text)
    if match is None:
        raise ValueError(f"--input {text}: write NAME=TYPE[SIZE,SIZE], e.g. image=f32[3,32,32]")
    name, dtype, inner = match.group("name", "dtype", "sizes")
    if dtype not in dtypes.TOKENS:
        raise ValueError(f"--input {text}: no element type '{dtype}'; {dtypes.unknown(dtype)}")
    sizes = [size.strip() for size in inner.split(",")] if inner.strip() else []
    for size in sizes:
        if not re.fullmatch(r"[1-9][0-9]*|[A-Za-z]", size):
            raise ValueError(f"--input {text}: '{size}' is neither a size nor an axis' letter")
    if batched and not _BATCH.intersection(sizes):
        sizes.insert(0, "n")
    return name, dtype, sizes


def _variant(text: str) -> dict[str, int]:
    sizes_by_letter = re.findall(r"([A-Za-z])=([1-9][0-9]*)", text)
    if ",".join(f"{letter}={size}" for letter, size in sizes_by_letter) != text:
        raise ValueError(f"--input-shape {text}: write LETTER=SIZE,LETTER=SIZE, e.g. h=224,w=224")
    return {letter: int(size) for letter, size in sizes_by_letter}
