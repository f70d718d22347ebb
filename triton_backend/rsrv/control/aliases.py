"""Aliases as messages and as JSON: their models, shares, and counts of the requests that named the alias. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rsrv.control.v1 import control_pb2 as pb
from rsrv.text import percent

if TYPE_CHECKING:
    # Do not import these at run time, because the command line uses this module without the libraries that `rsrv.settings` needs.
    from rsrv.control.records import RuntimeRecords
    from rsrv.settings import Shares

#: Statuses of responses that are not errors.
_NO_ERRORS = ("ok", "cancelled")


def alias_messages(
    aliases: Mapping[str, Shares], failures: Mapping[str, str], devices: Iterable[RuntimeRecords] = ()
) -> list[pb.Alias]:
    """Return the messages of the aliases, sorted by name.

    Args:
        aliases: Shares of each alias.
        failures: Failures of models and aliases, by name.
        devices: Records of each device's runtime.
    """
    records = [*devices]

    def behind(model: str) -> list[pb.ModelRecord]:
        return [record.models[model] for record in records if model in record.models]

    return [
        pb.Alias(
            name=name,
            failure=failures.get(f"aliases.{name}") or failures.get(name, ""),
            targets=[
                pb.AliasTarget(
                    model=model,
                    shadow=weight == "shadow",
                    weight=0 if weight == "shadow" else weight,
                    responses=_sum(name, (record.aliases for record in behind(model))),
                    copies=_sum(name, (record.shadows for record in behind(model))),
                )
                for model, weight in shares.items()
            ],
        )
        for name, shares in sorted(aliases.items())
    ]


def _sum(alias: str, devices: Iterable[Mapping[str, pb.Counts]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for device in devices:
        if alias in device:
            total.update(device[alias].counts)
    return total


def alias_picture(alias: pb.Alias) -> dict[str, Any]:
    """Return an alias as JSON. The counters restart at 0 when a runtime is replaced."""
    return {
        "name": alias.name,
        "failure": alias.failure,
        "targets": [
            {
                "model": target.model,
                "share": share(alias, target),
                "answered": answered(target),
                "errors": errors(target),
                "copies": copies(target),
            }
            for target in alias.targets
        ],
    }


def share(alias: pb.Alias, target: pb.AliasTarget) -> str:
    """Return the share of an alias's requests that a target gets, as text."""
    if target.shadow:
        return "shadow"
    return percent(target.weight / sum(target.weight for target in alias.targets))


def answered(target: pb.AliasTarget) -> int:
    return int(target.responses.get("ok", 0))


def errors(target: pb.AliasTarget) -> int:
    return sum(count for status, count in target.responses.items() if status not in _NO_ERRORS)


def copies(target: pb.AliasTarget) -> str:
    """Return a text with the number of request copies that a shadow got, by outcome. Empty if there were no copies."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(target.copies.items()) if count)
