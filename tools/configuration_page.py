"""Make the tables of docs/configuration.md with every setting of rsrv.yaml, and the names of settings that the chart knows.

    python tools/configuration_page.py     # rewrites the page, and the chart's values.schema.json

The tables are in the page between `<!-- settings -->` and `<!-- end settings -->`. A test compares the page with the schema.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rsrv.settings import ModelSection, Settings
from rsrv.settings_changes import effect
from rsrv.settings_fleet import GatewaySection, WorkerPorts
from scheduler_page import DOCS, rewrite, table

PAGE = DOCS / "configuration.md"
CHART_SCHEMA = DOCS.parent / "deploy/helm/rsrv/values.schema.json"


#: Page that explains the settings of each section.
PAGES = {
    "scheduler": "scheduler.md",
    "runtime": "scheduler.md#the-budget",
    "stub": "hooks.md#limits",
    "meta": "hooks.md#meta-models",
    "lifecycle": "operating.md#when-bundles-change",
    "control": "control-service.md",
    "gateway": "gateway.md",
    "metrics": "monitoring.md#prometheus",
    "logs": "monitoring.md#the-log",
    "traces": "monitoring.md#traces",
}


def settings() -> str:
    """Return the text of all sections. Each has a headline, a subject, and a table of its keys."""
    sections: dict[str, Any] = {name: info.annotation for name, info in Settings.model_fields.items()}
    sections["models"] = ModelSection
    del sections["aliases"]
    aliases = f"## aliases\n\n{Settings.model_fields['aliases'].description} [More](aliases.md)."
    return "\n\n".join(
        [*(_section(name, f"## {name}", section) for name, section in sections.items()), aliases]
    )


def _section(name: str, title: str, section: type[BaseModel]) -> str:
    """Return a section's keys, with the keys of its entries if it has a list or mapping."""
    more = f" [More]({PAGES[name]})." if name in PAGES else ""
    entries = [
        _section("", f"### {key}: {'an entry' if inner is not field.annotation else 'its keys'}", inner)
        for key, field in section.model_fields.items()
        for inner in (*get_args(field.annotation), field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel) and name != "models"
        if inner is not WorkerPorts
    ]
    subject = f"{section.__doc__}{more}{_changes(name, section)}"
    return "\n\n".join([title, subject, table(_rows(section)), *entries])


def _changes(name: str, section: type[BaseModel]) -> str:
    """Return sentences that name the keys of a section whose changes need a restart.

    A key inside a list or a mapping is not named, because it needs the same restart as the section's key for the whole list or
    mapping.
    """
    by_effect: dict[str, list[str]] = {}
    for key in section.model_fields if name and name != "gateway" else ():
        by_effect.setdefault(effect(name, key), []).append(f"`{key}`")
    by_effect.pop("at once", None)
    events = {"restart": "`rsrv restart`", "server": "a restart of the server"}
    sentences = []
    for effect_, keys in by_effect.items():
        changes = "All changes" if len(keys) == len(section.model_fields) else f"Changes of {', '.join(keys)}"
        sentences.append(f" {changes} take effect after {events[effect_]}.")
    return "".join(sentences)


def _rows(section: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    yield "key", "values, **default**", "meaning"
    for key, field in section.model_fields.items():
        yield f"`{key}`", _values(field), field.description or ""


def _default(field: FieldInfo) -> str | None:
    """Return the default in words, or None for the keys of a mapping."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    match value:
        case None:
            return "`null`"
        case bool():
            return f"`{str(value).lower()}`"
        case BaseModel():
            return None
        case float() if value == inf:
            return "`never`"
        case _:
            return f"`{value}`"


def _values(field: FieldInfo) -> str:
    """Return the kind of a key's values, with their bounds and the default."""
    first, *further = (kind for text in _kinds(field.annotation) for kind in text.split(", "))
    kinds = [first + "".join(map(_bound, field.metadata)), *further]
    default = _default(field)
    if default is None:
        return ", ".join(kinds)
    if default in kinds:
        return ", ".join(f"**{kind}**" if kind == default else kind for kind in kinds)
    return f"{', '.join(kinds)}: **{default}**"


def _bound(bound: object) -> str:
    match bound:
        case Ge(ge=value):
            sign = "≥"
        case Gt(gt=value):
            sign = ">"
        case Le(le=value):
            sign = "≤"
        case Lt(lt=value):
            sign = "<"
        case _:
            return ""
    return f" {sign}{value:g}" if isinstance(value, float) else f" {sign}{value}"


_NAMES = {
    int: "integer",
    float: "number",
    bool: "`true`, `false`",
    str: "text",
    Path: "path",
    type(None): "`null`",
}


def _kinds(kind: Any) -> Iterator[str]:
    """Return the kinds of values in words."""
    origin = get_origin(kind)
    if origin is Literal:
        yield from (f"`{value}`" for value in get_args(kind))
    elif origin is Annotated:
        base, *metadata = get_args(kind)
        bounds = (bound for each in metadata for bound in getattr(each, "metadata", [each]))
        first, *further = _kinds(base)
        yield ", ".join(["".join((first, *map(_bound, bounds))), *further])
    elif origin in (Union, types.UnionType):
        for argument in get_args(kind):
            yield from _kinds(argument)
    elif origin is list:
        (item,) = get_args(kind)
        yield f"list ({' or '.join(_kinds(item))})"
    elif origin is dict:
        yield "mapping from names"
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield "mapping"
    else:
        yield _NAMES[kind]


def chart_schema(text: str) -> str:
    """Return the chart's schema with the names of all settings. Their values are checked by the servers."""
    own = _names(Settings)
    own["properties"]["models"] = {"type": "object", "additionalProperties": _names(ModelSection)}
    own["properties"]["aliases"] = {"type": "object"}
    # Accept the section gateway here, because the chart's templates refuse it with a hint.
    own["properties"] |= {"gateway": {}}
    gateway = _names(GatewaySection)
    gateway["properties"] |= {"models": {}, "replicas": {}}
    for name, schema in (("settings", own), ("gatewaySettings", gateway)):
        line = f'    "{name}": {json.dumps(schema)},'
        # The names of settings need no escapes.
        text = re.sub(rf'^    "{name}": \{{(?!"\$ref).*\}},$', line, text, count=1, flags=re.MULTILINE)
    return text


def _names(section: type[BaseModel]) -> dict[str, Any]:
    """Return a JSON schema of the section's keys, nested sections included."""
    names: dict[str, Any] = {}
    for key, field in section.model_fields.items():
        kind: Any = field.annotation
        names[key] = _names(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
    return {"type": "object", "additionalProperties": False, "properties": names}


def main() -> None:
    """Rewrite the page's tables, and the names of settings in the chart's schema."""
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), {"settings": settings()}), encoding="utf-8")
    CHART_SCHEMA.write_text(chart_schema(CHART_SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
