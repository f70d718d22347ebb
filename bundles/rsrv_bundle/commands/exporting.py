"""What `rsrv-bundle export` does."""

from __future__ import annotations

import argparse
import sys
import traceback

from rsrv_bundle.commands.input_texts import parse_inputs
from rsrv_bundle.commands.kinds import KINDS
from rsrv_bundle.commands.sources import LoadError, load
from rsrv_bundle.errors import BundleError, TargetError, os_error
from rsrv_bundle.writer import free_target


def export(arguments: argparse.Namespace) -> int:
    """Writes the bundle and prints a line, or one per problem; returns the exit status, as `cli.main`."""
    [(kind, target)] = [(kind, text) for kind in KINDS if (text := getattr(arguments, kind)) is not None]
    try:
        inputs = parse_inputs(arguments.input, arguments.input_shape, batched=bool(arguments.batch_sizes))
        source = load(kind, target)
        if arguments.input and source.examples:
            raise ValueError(f"--input: {target} gives example inputs; leave one of the two out")
        if not arguments.input and not source.examples:
            raise ValueError(f"--input: {target} gives no example inputs; say what the inputs are")
        if arguments.hooks is not None and not arguments.hooks.is_file():
            raise ValueError(f"--hooks {arguments.hooks}: is no file")
        if arguments.out_dir.exists() and not arguments.overwrite:
            raise ValueError(f"{arguments.out_dir} exists; pass --overwrite to replace it")
        free_target(arguments.out_dir, arguments.overwrite)
    except LoadError as e:
        if e.__cause__ is not None:
            traceback.print_exception(e.__cause__)
        return _trouble(str(e))
    except (ValueError, TargetError) as e:
        return _trouble(str(e))
    try:
        bundle = source.export(
            source.examples or inputs.examples,
            batch_sizes=arguments.batch_sizes,
            out_dir=arguments.out_dir,
            batch_axis=0 if arguments.batch_sizes else None,
            axes=inputs.axes,
            input_shapes=inputs.input_shapes,
            output_names=arguments.output_names.split(",") if arguments.output_names else None,
            hooks=arguments.hooks,
            description=arguments.description,
            platform=arguments.platform,
            tolerance=dict(arguments.tolerance),
            working_tree_patch=arguments.working_tree_patch,
            overwrite=arguments.overwrite,
        )
    except BundleError as e:
        for problem in e.problems:
            print(f"{target}: {problem}", file=sys.stderr)
        return 1
    except OSError as e:
        return _trouble(os_error(e))
    except Exception:  # noqa: BLE001 - the model's own, and where it happened says more than any word here
        traceback.print_exc()
        print(f"{target}: cannot be traced; the last lines above say why", file=sys.stderr)
        return 1
    error = bundle.manifest.numerics.get("max_rel_error")
    close = "not run here" if error is None else f"at most {error:.3g} from the model"
    print(
        f"ok {arguments.out_dir}: {len(bundle.modules)} modules, {len(bundle.weights)} weights,"
        f" {bundle.weight_bytes} bytes, {close}"
    )
    return 0


def _trouble(message: str) -> int:
    print(f"rsrv-bundle: {message}", file=sys.stderr)
    return 2
