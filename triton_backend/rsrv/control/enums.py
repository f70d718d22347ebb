"""Members of the service's enums by the names that the protocol and rsrv.yaml have for them."""

from functools import cache
from typing import Any


def member(enum: Any, name: str | None) -> Any:
    """The member of a generated enum that is called so in the protocol and in rsrv.yaml: of Residency, 'device'.

    None, and what this version does not know, is UNSPECIFIED.
    """
    return 0 if name is None else _members(enum).get(name, 0)


def member_name(enum: Any, value: int) -> str:
    """The other way round. Raises ValueError for UNSPECIFIED and for what is not in it, naming what is."""
    for name, number in _members(enum).items():
        if number == value:
            return name
    raise ValueError(f"must be one of {', '.join(_members(enum))}")


@cache
def _members(enum: Any) -> dict[str, int]:
    """Names in the protobuf begin with the enum's own: RESIDENCY_DEVICE."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return {name.removeprefix(prefix).lower(): number for name, number in enum.items() if number}
