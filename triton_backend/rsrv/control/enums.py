"""Members of the service's enums by the names that the protocol and rsrv.yaml have for them."""

from typing import Any


def member(enum: Any, name: str | None) -> Any:
    """The member of a generated enum that is called so in the protocol and in rsrv.yaml: of Residency, 'device'.

    None, and what this version does not know, is UNSPECIFIED.
    """
    prefix = _prefix(enum)
    return dict(enum.items()).get(f"{prefix}{(name or '').upper()}", 0)


def member_name(enum: Any, value: int) -> str:
    """The other way round. Raises ValueError for UNSPECIFIED and for what is not in it, naming what is."""
    prefix = _prefix(enum)
    names = {number: name.removeprefix(prefix).lower() for name, number in enum.items() if number}
    if value not in names:
        raise ValueError(f"must be one of {', '.join(names.values())}")
    return str(names[value])


def _prefix(enum: Any) -> str:
    """Members of an enum begin with its name."""
    return str(enum.Name(0)).removesuffix("UNSPECIFIED")
