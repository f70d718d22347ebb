"""The page "What exports" and its table, from the results of the zoo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tests.zoo.models import Entry

TEXT = """# What exports

This page is a reference: it shows which architectures of other packages `export_torch` exports. The architectures were chosen before they
were tried. They have random weights and small configurations. The answers of each export were compared with PyTorch's. `make zoo` runs the
architectures without a result, and writes this page. `ZOO="--only timm --limit 5"` runs fewer.

- *First try*: the code that a reader of [Exporting](exporting.md) writes.
- *After one change*: the same code with the change that an error or a page recommends.
- *Dynamic*: refused, because the sizes of the results depend on values.

{counts}

{errors}{waiting}

[The table of architectures](what-exports.csv) has the result of each architecture, and the change that it needed or the
reason why it was refused.
"""


def page(entries: Sequence[Entry], results: Sequence[Mapping[str, Any]], served: Mapping[str, float]) -> str:
    """Return the page "What exports". Architectures without a result are counted as not run.

    `served` has the largest relative error of Triton's answers for each served bundle.
    """
    by_name = {result["name"]: result for result in results}
    packages = sorted({entry.package for entry in entries})
    groups = {
        package: [
            (entry, _state(entry, by_name.get(entry.name))) for entry in entries if entry.package == package
        ]
        for package in packages
    }
    run = {
        package: group for package, group in groups.items() if any(state != "not run" for _, state in group)
    }
    counts = [_count(package, group, by_name) for package, group in run.items()]
    everything = [item for group in groups.values() for item in group]
    counts.append(_count("**all**", everything, {}))
    done = [result for result in by_name.values() if not result["failed"]]
    return TEXT.format(
        counts="\n".join([_HEAD, *counts]),
        errors=_errors(done) + _served(served),
        waiting=_waiting(sorted(groups.keys() - run.keys())),
    )


def table(entries: Sequence[Entry], results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of architectures that have results, with a row of titles first."""
    by_name = {result["name"]: result for result in results}
    return [
        ["package", "architecture", "result", "change or reason"],
        *(
            [entry.package, entry.name.removeprefix(f"{entry.package} "), state, _note(state, result)]
            for entry in sorted(entries, key=lambda entry: entry.package)
            if (result := by_name.get(entry.name)) and (state := _state(entry, result))
        ),
    ]


_HEAD = """| package | licence | listed | run | first try | after one change | refused | dynamic |
|---|---|---|---|---|---|---|---|"""


def _state(entry: Entry, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "not run"
    if result["failed"]:
        return "dynamic" if entry.dynamic and "values" in result["failed"] else "refused"
    return "after one change" if "first" in result else "first try"


def _count(package: str, group: Sequence[tuple[Entry, str]], by_name: Mapping[str, Any]) -> str:
    states = [state for _, state in group]
    entries = [by_name[entry.name] for entry, _ in group if "version" in by_name.get(entry.name, {})]
    facts: Mapping[str, Any] = entries[0] if entries else {}
    words = [f"{package} {facts.get('version', '')}".strip(), facts.get("licence", "")]
    run = len(states) - states.count("not run")
    numbers = [len(states), run] + [
        states.count(state) for state in ("first try", "after one change", "refused", "dynamic")
    ]
    return f"| {' | '.join([*words, *map(str, numbers)])} |"


def _errors(done: Sequence[Mapping[str, Any]]) -> str:
    if not done:
        return "Nothing was run."
    errors, seconds = (sorted(result[key] for result in done) for key in ("error", "cpu_s"))
    slowest = max(done, key=lambda result: float(result["cpu_s"]))
    worst = max(done, key=lambda result: float(result["error"]))
    return (
        f"No wrong answer was accepted. The largest error of an exported model, relative to its output, is {errors[-1]:.1e}"
        f" ({worst['name']}), and the median is {median(errors):.1e}. An export took {median(seconds):.0f} s of CPU time in the"
        f" median, and {seconds[-1]:.0f} s at most ({slowest['name']})."
    )


def _served(errors: Mapping[str, float]) -> str:
    if not errors:
        return ""
    worst = max(errors, key=lambda name: errors[name])
    return (
        f" {len(errors)} of them were served by Triton (`PYTHONPATH=tools python -m tests.zoo.served`), and their answers were within"
        f" {errors[worst]:.1e} of PyTorch's."
    )


def _waiting(packages: Sequence[str]) -> str:
    return f"\n\nListed, and not run yet: {', '.join(packages)}." if packages else ""


def _note(state: str, result: Mapping[str, Any]) -> str:
    if state == "after one change":
        return str(result["change"])
    return str(result["failed"]).partition("\n")[0]
