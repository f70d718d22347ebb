"""`rsrv-bundle show`, `diff`, `convert` and `narrow`: run the commands, and print their results and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from rsrv.text import amount, one_line, os_error
from rsrv_bundle.commands import showing
from rsrv_bundle.commands.describing import describe
from rsrv_bundle.commands.differing import (
    Tensor,
    WeightDifferences,
    file_differences,
    manifest_differences,
    relate,
    weights_of,
)
from rsrv_bundle.errors import BundleError, TargetError
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import known_version
from rsrv_bundle.reader import read_bundle


def show(directory: str, *, json: bool, compiled: bool) -> int:
    """Print a page about a bundle. Return the exit status, as `cli.main` does."""

    def work() -> int:
        with closing(Inspector()) as inspector, _about(directory):
            description = describe(read_bundle(directory), inspector, "compiled" if compiled else "stablehlo")
        print(showing.as_json(description) if json else showing.page(description), end="")
        return 0

    return _reported(work, broken=1)


def diff(a: str, b: str, *, json: bool) -> int:
    """Print the differences and shared tensors of two bundles. Return 0 if they are equal, 1 if not, 2 on an error.

    json: print a JSON object instead. `a` and `b` have the directory and the sha256 of a bundle. `same` is True if the bundles
    are equal. `differences` and `weights` are lists of lines. `bytes` has the sizes of both bundles' weights.
    """

    def work() -> int:
        with _about(a):
            first = read_bundle(a)
        with _about(b):
            second = read_bundle(b)
        lines = [*manifest_differences(first.manifest, second.manifest), *file_differences(first, second)]
        weights = weights_of(first), weights_of(second)
        related = relate(*weights)
        same = first.digest == second.digest
        if json:
            differences = {
                "a": {"directory": a, "sha256": first.digest},
                "b": {"directory": b, "sha256": second.digest},
                "same": same,
                "differences": lines,
                "weights": weight_lines(related),
                "bytes": {"total": related.total, "common": related.common, "distinct": related.distinct},
            }
            print(showing.as_json(differences), end="")
            return 0 if same else 1
        print(f"A {a}: sha256 {first.digest[:12]}")
        print(f"B {b}: sha256 {second.digest[:12]}")
        for line in (*lines, *weight_lines(related)):
            print(one_line(line))
        orders = [[tensor[:2] for tensor in side] for side in weights]
        if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
            print("weights: the arguments are in another order")
        print(
            f"weights: {amount(related.total)} together, {amount(related.common)} are in both; a server with both"
            f" stores {amount(related.distinct)}"
        )
        if same:
            print("the same")
            return 0
        if not lines and orders[0] == orders[1]:
            print("the same content, written differently")
        return 1

    return _reported(work, broken=2)


def weight_lines(related: WeightDifferences) -> list[str]:
    """Return a line for each tensor.

    The line begins with `=` if both bundles have the tensor, `~` if it changed, `-` if only A has it, and `+` if only B has it.
    """
    lines = []
    for tensor, names in related.shared:
        names_in_b = "" if tensor[0] in names else f", in B {', '.join(names)}"
        lines.append(f"= {_text(tensor)}{names_in_b}")
    for tensor, other_tensor in related.changed:
        in_b = "" if tensor[1][1:] == other_tensor[1][1:] else f", in B {_text(other_tensor)}"
        lines.append(f"~ {_text(tensor)}{in_b}")
    lines += [f"- {_text(tensor)}" for tensor in related.only_a]
    lines += [f"+ {_text(tensor)}" for tensor in related.only_b]
    return lines


def _text(tensor: Tensor) -> str:
    name, key, nbytes = tensor
    return f"{name}: {key.dtype} {list(key.shape)}, {amount(nbytes)}"


def convert(directory: str, out_dir: str, *, stablehlo: str | None, overwrite: bool) -> int:
    """Write a bundle in format 3, and print a line. Return the exit status, as `cli.main` does."""

    def work() -> int:
        from rsrv_bundle.commands.converting import convert as write

        try:
            version = known_version(stablehlo)
        except ValueError as e:
            print(f"rsrv-bundle: --stablehlo-version: {e}", file=sys.stderr)
            return 2
        with closing(Inspector()) as inspector, _about(directory):
            old = read_bundle(directory, digest=False)
            new = write(directory, out_dir, stablehlo=version, overwrite=overwrite, read_signature=inspector)
        summary = f"{len(new.modules)} modules of StableHLO {version}, whose answers are the same bit by bit"
        print(
            f"{out_dir}: format {new.manifest.format_version}, from {old.manifest.format_version}; "
            f"{summary if new.modules else 'no modules'}; sha256 {new.digest[:12]}"
        )
        return 0

    return _reported(work, broken=1)


def narrow(
    directory: str,
    out_dir: str,
    *,
    weights: str,
    compute: str | None,
    samples: Mapping[str, Any] | None,
    tolerance: Mapping[str, float],
    overwrite: bool,
) -> int:
    """Write a bundle with narrow weights, and print the changes. Return the exit status, as `cli.main` does."""

    def work() -> int:
        from rsrv_bundle.commands.samples import rows_of
        from rsrv_bundle.narrow import narrow_bundle

        with closing(Inspector()) as inspector, _about(directory):
            report = narrow_bundle(
                directory,
                out_dir,
                weights=weights,
                compute=compute,
                samples=lambda bundle: {} if samples is None else rows_of(bundle, samples),
                tolerance=tolerance,
                overwrite=overwrite,
                read_signature=inspector,
            )
        print(f"ok {out_dir}: {report}")
        return 0

    return _reported(work, broken=1)


def _reported(work: Callable[[], int], *, broken: int) -> int:
    """Call `work`, and print its error. Return the exit status, which is `broken` for a problem of a bundle."""
    try:
        return work()
    except (InspectorError, TargetError) as e:
        print(f"rsrv-bundle: {e}", file=sys.stderr)
    except BundleError as e:
        for problem in e.problems:
            print(problem, file=sys.stderr)
        return broken
    except OSError as e:
        print(f"rsrv-bundle: {os_error(e)}", file=sys.stderr)
    return 2


@contextmanager
def _about(directory: str) -> Iterator[None]:
    """Put the name of the directory in front of each problem of a BundleError."""
    try:
        yield
    except TargetError:
        raise
    except BundleError as e:
        raise BundleError(f"{directory}: {problem}" for problem in e.problems) from e
