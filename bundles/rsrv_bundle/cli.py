"""The command `rsrv-bundle`. Each subcommand imports its own modules, so that `--help` is fast."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsrv.command import EXIT_STATUS, CommandParser, command
from rsrv.extras import install_command
from rsrv_bundle.commands.sources import KINDS, extra_of

if TYPE_CHECKING:
    from rsrv_bundle.commands.agreement import Comparison


@command("rsrv-bundle", extra="export")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code.

    0: success. With `diff`, the bundles are equal.
    1: a bundle is broken, or exceeds its tolerance. With `diff`, the bundles differ.
    2: the command line is wrong, a directory does not exist, or a package is missing.
    130, 143: SIGINT or SIGTERM has ended the command. Temporary files are removed.
    """
    try:
        arguments = parser().parse(argv)
        return COMMANDS[arguments.command](arguments)
    except SystemExit as e:
        # argparse has printed an error or the help.
        return int(e.code or 0)
    except UsageError as e:
        print(f"rsrv-bundle: {e}", file=sys.stderr)
        return 2


class UsageError(Exception):
    """The command line cannot be carried out. The message says why."""


def parser() -> CommandParser:
    top = CommandParser(
        prog="rsrv-bundle", description="Work with bundles of compiled models.", epilog=EXIT_STATUS
    )
    top.add_version()
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    _add_export(commands)
    _add_check(commands)
    _add_show(commands)
    _add_diff(commands)
    _add_convert(commands)
    _add_narrow(commands)
    return top


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a bundle from a model",
        epilog="TARGET is package.module:factory: a function without arguments that returns the model, or the model and"
        " example inputs by name; or the model itself. Modules in the working directory count. FILE is the path of an ONNX"
        " file, which describes its inputs itself.",
    )
    sources = export.add_mutually_exclusive_group(required=True)
    for kind, takes in KINDS.items():
        sources.add_argument(f"--{kind}", metavar="FILE" if kind == "onnx" else "TARGET", help=takes)
    sources.add_argument(
        "--hf", metavar="DIR", type=Path, help="a directory of Hugging Face, as save_pretrained writes it"
    )
    _add_hf(export)
    export.add_argument(
        "-o",
        "--out-dir",
        metavar="OUT",
        type=Path,
        required=True,
        help="the bundle's directory; its name is the model's",
    )
    export.add_argument(
        "--batch-sizes",
        metavar="N,N",
        type=_whole_numbers,
        default=(),
        help="rows to compile for, e.g. 1,8,32; without it the model has no batch axis",
    )
    export.add_argument(
        "--input",
        metavar="NAME=TYPE[SIZES]",
        action="append",
        default=[],
        help="in the model's order, e.g. image=f32[3,32,32]; the batch axis comes first, or where n stands; other letters"
        " are the axes of --input-shape",
    )
    export.add_argument(
        "--input-shape",
        metavar="LETTER=SIZE,...",
        action="append",
        default=[],
        help="a variant: the sizes of the axes that vary, e.g. h=224,w=224; for an ONNX file, the axes have the file's names",
    )
    export.add_argument(
        "--pad",
        metavar="LETTER=VALUE,mask=INPUT",
        default="",
        help="requests may have any length along this axis: the server pads them, and the export proves that no answer"
        " changes, e.g. t=0,mask=attention_mask",
    )
    export.add_argument(
        "--batch-axis",
        metavar="NAME=AXIS",
        type=_pair,
        action="append",
        default=[],
        help="for an ONNX file: the axis of an input that is the batch, if it is not the first, e.g. state=1",
    )
    export.add_argument(
        "--bind",
        metavar="NAME=VALUE",
        type=_pair,
        action="append",
        default=[],
        help="for an ONNX file: fix an input at this value, e.g. sr=16000",
    )
    export.add_argument(
        "--output-names", metavar="NAME,NAME", help="names of the outputs, if the model returns a tuple"
    )
    export.add_argument(
        "--outputs",
        metavar="NAME,NAME",
        help="keep only these outputs; for an ONNX file, any values of its graph, which is cut after them",
    )
    export.add_argument("--hooks", metavar="FILE", type=Path, help="file to store as model.py")
    export.add_argument(
        "--files",
        metavar="PATH",
        type=Path,
        nargs="+",
        default=(),
        help="files and folders that the hooks import or read; they are copied into the bundle",
    )
    export.add_argument("--description", metavar="TEXT", default="", help="text for the manifest")
    export.add_argument(
        "--platform",
        default="cpu",
        help="platform that executes the modules: cpu (default), cuda, rocm or tpu",
    )
    _add_weights(export)
    _add_tolerance(export, _bound)
    export.add_argument(
        "--working-tree-patch",
        action="store_true",
        help="also store the uncommitted changes of the source code; they may contain secrets",
    )
    export.add_argument("--overwrite", action="store_true", help="replace an existing bundle")


def _add_hf(export: Any) -> None:
    """Add the options of --hf. They are None if they are not given."""
    group = export.add_argument_group("with --hf")
    group.add_argument(
        "--task", metavar="TASK", help="default: the task that config.json names, such as text-ranking"
    )
    group.add_argument(
        "--adapter", metavar="DIR", type=Path, help="a LoRA adapter of peft, to merge into the model"
    )
    group.add_argument(
        "--lengths",
        metavar="N,N",
        type=_whole_numbers,
        help="lengths to compile for, in tokens; by default 32,128,512, up to the length that the model can read",
    )
    group.add_argument(
        "--pooling",
        choices=("mean", "cls", "last"),
        help="how to make one vector of the token vectors, if there is no modules.json; by default mean for text",
    )
    group.add_argument(
        "--too-long",
        choices=("cut", "refuse"),
        help="what happens to a text with more tokens than the largest length",
    )
    group.add_argument(
        "--context",
        metavar="N",
        type=int,
        help="maximum number of tokens of a generation, prompt and answer together; by default 1024",
    )
    group.add_argument(
        "--slots", metavar="N", type=int, help="generations on the device at once; by default 8"
    )
    group.add_argument(
        "--image-size",
        metavar="H,W",
        type=_whole_numbers,
        help="resize all pictures to this, if preprocessor_config.json keeps their proportions",
    )
    group.add_argument(
        "--dimensions",
        metavar="N,N",
        type=_whole_numbers,
        help="lengths to which clients may cut an embedding",
    )
    group.add_argument(
        "--samples",
        metavar="FILE",
        type=Path,
        nargs="+",
        help="also compare the answers to these: files of texts, one per line (a query, a tab and a document for text-ranking), or"
        " pictures, or sounds; with --onnx, one .npz file with an array per input, whose first axis counts samples",
    )


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"'{text}': write NAME=VALUE")
    return name, value


def _whole_numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of whole numbers from 1 on, such as 1,8,32")
    return tuple(map(int, parts))


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check", help="check every rule of the format, and print a line for each broken rule"
    )
    check.add_argument("directories", metavar="DIR", nargs="+", help="a bundle's directory")
    _add_json(check)
    check.add_argument(
        "--no-signatures", action="store_true", help="do not look inside the modules (this look needs jaxlib)"
    )
    check.add_argument(
        "--numerics", action="store_true", help="run the modules and compare their answers; needs jax"
    )
    check.add_argument(
        "--run", action="store_true", help="import model.py with the Python that the server uses for hooks"
    )
    numerics = check.add_argument_group("with --numerics")
    source = numerics.add_mutually_exclusive_group()
    source.add_argument(
        "--against",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="also compare with this function, which takes the executable inputs by name, as numpy arrays",
    )
    for kind, takes in KINDS.items():
        source.add_argument(
            f"--{kind}",
            metavar="FILE" if kind == "onnx" else "TARGET",
            help=f"compare with {takes}, given as for export",
        )
    _add_samples(numerics)
    _add_tolerance(numerics)
    numerics.add_argument("--store", action="store_true", help="write the measured errors into the manifest")


def _add_json(options: Any) -> None:
    options.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def _add_show(commands: Any) -> None:
    show = commands.add_parser("show", help="print a bundle's tensors, sizes, work, weights and provenance")
    show.add_argument("directory", metavar="DIR", help="a bundle's directory")
    _add_json(show)
    show.add_argument(
        "--compile",
        action="store_true",
        help="compile the modules here, and show the compiler's figures",
    )


def _add_diff(commands: Any) -> None:
    diff = commands.add_parser(
        "diff",
        help="print the differences of two bundles and their shared tensors",
        epilog="Exit status: 0 if the bundles are equal, 1 if they differ, 2 on an error.",
    )
    diff.add_argument("a", metavar="A", help="a bundle's directory")
    diff.add_argument("b", metavar="B", help="another bundle's directory")
    _add_json(diff)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert", help="write a bundle for another version of StableHLO, in format 3"
    )
    convert.add_argument("directory", metavar="DIR", help="a bundle's directory")
    convert.add_argument(
        "-o",
        "--out-dir",
        metavar="OUT",
        required=True,
        help="the new bundle's directory; its name is the model's",
    )
    convert.add_argument(
        "--stablehlo-version", metavar="VERSION", help="e.g. 1.9.0; by default the one that jax exports"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace an existing bundle")


def _add_narrow(commands: Any) -> None:
    narrow = commands.add_parser(
        "narrow",
        help="write a bundle with weights in a narrower type, and compare both",
        epilog="Nothing is written if the answers differ by more than the bound of the type.",
    )
    narrow.add_argument("directory", metavar="DIR", help="a bundle's directory")
    narrow.add_argument(
        "-o",
        "--out-dir",
        metavar="OUT",
        required=True,
        help="the new bundle's directory; its name is the model's",
    )
    _add_weights(narrow)
    _add_samples(narrow)
    _add_tolerance(narrow, _bound)
    narrow.add_argument("--overwrite", action="store_true", help="replace an existing bundle")


def _add_weights(options: Any) -> None:
    options.add_argument(
        "--weights",
        metavar="TYPE[,PATTERN=TYPE]",
        type=_types,
        help="store weights as bf16, f16, f8_e4m3 or i8; a pattern chooses another type for some, or keeps them: i8,*head*=keep",
    )

    options.add_argument(
        "--compute",
        choices=("bf16", "f16"),
        help="compute products in this type; norms, softmax and sums stay in f32",
    )


def _types(text: str) -> str:
    from rsrv_bundle.narrowing import WeightTypes

    try:
        return WeightTypes.parse(text).text
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _add_samples(options: Any) -> None:
    options.add_argument(
        "--samples",
        metavar="FILE.npz",
        type=Path,
        help="also compare on these samples: one array per input, whose first axis counts samples",
    )


def _samples(arguments: argparse.Namespace) -> Any:
    """Return the arrays of `--samples` by name, or None without the flag."""
    from rsrv_bundle.commands.samples import read_samples

    try:
        return None if arguments.samples is None else read_samples(arguments.samples)
    except (OSError, ValueError) as e:
        raise UsageError(f"--samples {arguments.samples}: {e}") from e


def _bound(text: str) -> tuple[str, float]:
    """Parse a tolerance for narrowing: TYPE=ERROR, or FIGURE=ERROR with a figure of TASK_BOUNDS."""
    from rsrv_bundle.narrowing import TASK_BOUNDS

    figure, _, number = text.partition("=")
    if figure not in TASK_BOUNDS:
        return _tolerance(text)
    return figure, _error_bound(text, number)


def _add_tolerance(options: Any, kind: Callable[[str], tuple[str, float]] | None = None) -> None:
    options.add_argument(
        "--tolerance",
        metavar="TYPE=ERROR",
        type=kind or _tolerance,
        action="append",
        default=[],
        help="largest error allowed, relative to an output's largest magnitude, e.g. f32=1e-3",
    )


def _tolerance(text: str) -> tuple[str, float]:
    from rsrv_bundle.dtypes import TOKENS, unknown

    dtype, _, number = text.partition("=")
    error = _error_bound(text, number)
    if dtype not in TOKENS:
        raise argparse.ArgumentTypeError(f"'{text}': no element type '{dtype}'; {unknown(dtype)}")
    return dtype, error


def _error_bound(text: str, number: str) -> float:
    """Parse the number of the tolerance `text`."""
    try:
        error = float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': write TYPE=ERROR, e.g. f32=1e-3") from None
    if not 0 <= error < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}': the error is a finite number of at least 0")
    return error


#: Packages that --hf needs. The extra export-hf installs them.
_HF_PACKAGES = ("jax", "torch", "torchax", "transformers", "sentence_transformers", "tokenizers", "PIL")


def _export(arguments: argparse.Namespace) -> int:
    _free(arguments)
    if arguments.hf is not None:
        from importlib.util import find_spec

        if missing := [package for package in _HF_PACKAGES if find_spec(package) is None]:
            raise UsageError(
                f"{missing[0]} is not installed for {sys.executable}; run {install_command('export-hf')}"
            )
        from rsrv_bundle.commands import exporting

        return exporting.export_directory(arguments)
    _need_jax(_target(arguments)[0])
    from rsrv_bundle.commands import exporting

    return exporting.export(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from rsrv_bundle.commands import checking

    comparison = None
    if arguments.numerics:
        if arguments.no_signatures:
            raise UsageError("--numerics looks inside the modules; leave out --no-signatures")
        comparison = _wanted(arguments)
    elif arguments.samples or arguments.tolerance or arguments.store or _target(arguments) != ("", ""):
        raise UsageError(
            "--samples, --tolerance, --store and the options that name a model need --numerics; add --numerics"
        )
    _directories(*arguments.directories)
    return checking.check(
        arguments.directories,
        signatures=not arguments.no_signatures,
        json=arguments.json,
        numerics=comparison,
        run=arguments.run,
    )


def _wanted(arguments: argparse.Namespace) -> Comparison:
    _need_jax(_target(arguments)[0])
    from rsrv_bundle.commands.agreement import Comparison

    samples = _samples(arguments)
    source, examples = _source(*_target(arguments))
    return Comparison(source, samples, examples, dict(arguments.tolerance), arguments.store)


def _target(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the kind of the model to compare with, or `against` for a function, and its target. Both are empty without a model."""
    targets = [
        (kind, text) for kind in ("against", *KINDS) if (text := getattr(arguments, kind, None)) is not None
    ]
    return targets[0] if targets else ("", "")


def _source(kind: str, target: str) -> tuple[Callable[..., Any] | None, Mapping[str, Any]]:
    """Return the model to compare with, as a function of the inputs by name, and its example inputs.

    Both are empty if there is no such model. Raises UsageError if the model cannot be loaded.
    """
    from rsrv_bundle.commands.sources import LoadError, load, named

    if not kind:
        return None, {}
    try:
        if kind == "against":
            return named(target), {}
        source = load(kind, target)
    except LoadError as e:
        raise UsageError(str(e)) from e
    return source.eager, source.examples


def _need_jax(kind: str = "") -> None:
    """Raise UsageError if jax is not installed. Its text names the extra that installs jax and the framework of `kind`."""
    from importlib.util import find_spec

    if find_spec("jax") is None:
        extra = extra_of(kind if kind in KINDS else "jax")
        raise UsageError(f"jax is not installed for {sys.executable}; run {install_command(extra)}")


def _directories(*paths: str) -> None:
    """Raise UsageError with the remedy if a path is known not to be a bundle."""
    from rsrv_bundle.mistakes import mistaken

    for path in paths:
        if not Path(path, "manifest.yaml").exists() and (mistake := mistaken(Path(path), single=True)):
            raise UsageError(f"{path}: {mistake}")


def _free(arguments: argparse.Namespace) -> None:
    """Raise UsageError if the command cannot write a bundle to its target."""
    from rsrv_bundle.errors import TargetError
    from rsrv_bundle.writer import free_target

    if Path(arguments.out_dir).exists() and not arguments.overwrite:
        raise UsageError(f"{arguments.out_dir} exists; pass --overwrite to replace it")
    try:
        free_target(arguments.out_dir, arguments.overwrite)
    except TargetError as e:
        raise UsageError(str(e)) from e


def _show(arguments: argparse.Namespace) -> int:
    _need_jax()
    from rsrv_bundle.commands import printing

    _directories(arguments.directory)
    return printing.show(arguments.directory, json=arguments.json, compiled=arguments.compile)


def _diff(arguments: argparse.Namespace) -> int:
    from rsrv_bundle.commands import printing

    _directories(arguments.a, arguments.b)
    return printing.diff(arguments.a, arguments.b, json=arguments.json)


def _convert(arguments: argparse.Namespace) -> int:
    _need_jax()
    from rsrv_bundle.commands import printing

    _directories(arguments.directory)
    _free(arguments)
    return printing.convert(
        arguments.directory,
        arguments.out_dir,
        stablehlo=arguments.stablehlo_version,
        overwrite=arguments.overwrite,
    )


def _narrow(arguments: argparse.Namespace) -> int:
    _need_jax()
    from rsrv_bundle.commands import printing
    from rsrv_bundle.narrowing import KEEP

    if arguments.weights is None and arguments.compute is None:
        raise UsageError("give --weights, --compute, or both")
    _directories(arguments.directory)
    _free(arguments)
    return printing.narrow(
        arguments.directory,
        arguments.out_dir,
        weights=arguments.weights or KEEP,
        compute=arguments.compute,
        samples=_samples(arguments),
        tolerance=dict(arguments.tolerance),
        overwrite=arguments.overwrite,
    )


COMMANDS = {
    "export": _export,
    "check": _check,
    "show": _show,
    "diff": _diff,
    "convert": _convert,
    "narrow": _narrow,
}


if __name__ == "__main__":
    sys.exit(main())
