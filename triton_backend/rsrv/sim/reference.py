"""The reference of scenario keys in docs/tuning.md, from the models that read them.

`python -m rsrv.sim.reference` prints it; a test compares.
"""

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rsrv.sim.schema import (
    Arrivals,
    Bursts,
    ClosedLoop,
    DeviceKeys,
    File,
    GatewayKeys,
    ModelKeys,
    Poisson,
    RequestKeys,
    TraceKeys,
    Zipf,
)

#: title of a table, and the mapping whose keys it lists.
_TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", File),
    ("`device`", DeviceKeys),
    ("`gateway`", GatewayKeys),
    ("`models.NAME`", ModelKeys),
    ("`arrivals`", Arrivals),
    ("`arrivals.requests[]`", RequestKeys),
    ("`arrivals.poisson`", Poisson),
    ("`arrivals.zipf`", Zipf),
    ("`arrivals.bursts`", Bursts),
    ("`arrivals.closed`", ClosedLoop),
    ("`arrivals.trace`", TraceKeys),
)


def reference() -> str:
    """Return Markdown: one table for each mapping of a scenario."""
    return "\n".join(line for title, model in _TABLES for line in _table(title, model))


def _table(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"### {title}\n"
    yield f"{' '.join((model.__doc__ or '').split())}\n"
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for key, field in model.model_fields.items():
        meaning = " ".join((field.description or "").replace("|", "\\|").split())
        yield f"| `{key}` | {_default(field)} | {meaning} |"
    yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory or field.default in (None, []) or isinstance(field.default, BaseModel):
        return ""
    if isinstance(field.default, bool | str):
        return str(field.default).lower()
    return f"{field.default:g}"


if __name__ == "__main__":
    print(reference())
