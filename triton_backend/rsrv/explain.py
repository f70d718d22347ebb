"""Messages about errors in YAML files. A message has the key as it is in the file, the fault, and the remedy."""

from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from rsrv.text import nearest
from rsrv_bundle import yaml12


class YamlError(Exception):
    """The text is not the expected YAML. The message says what is expected."""


#: Maximum number of characters of a value in a message.
_MAX_VALUE = 80


def parse_yaml(text: str) -> object:
    """Return the value of a YAML 1.2 text. Raises YamlError."""
    try:
        return yaml12.parse(text)
    except ValueError as error:
        raise YamlError(str(error).removeprefix("is ")) from None


def read_yaml(text: str, of: str) -> dict[str, Any]:
    """Return the mapping in a YAML 1.2 text, or {} for an empty text. `of` names its entries in messages.

    Raises:
        YamlError: The text is not YAML, or not a mapping.
    """
    raw = parse_yaml(text)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise YamlError(f"must be a mapping of {of}, not a {type(raw).__name__}")
    return dict(raw)


def explain(error: Mapping[str, Any], root: type[BaseModel], raw: object) -> str:
    """Return a line `key: problem` for an error that pydantic reported when it validated `raw` as `root`.

    The key is the key in the file. A validator may have put a list around a single entry, or a mapping around a list. The parts
    of pydantic's path that the validator added are left out.
    """
    path = [part for part in error["loc"] if part != "[key]"]
    key = ".".join(_in_file(path, raw))
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key{nearest(str(path[-1]), _known(root, path[:-1]))}"
    if kind == "missing":
        return f"{key}: missing, and there is no default: give it"
    mapping = kind in ("dict_type", "model_type")
    # pydantic's message is, for example, "Input should be a valid integer, unable to parse string as an integer".
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = "must be a mapping" if mapping else message.partition(", unable to parse")[0]
    if not key:
        return str(message)  # The message is about several keys, and already names them.
    value = repr(error["input"])
    return f"{key}: {message} (found {value if len(value) <= _MAX_VALUE else value[:_MAX_VALUE] + '...'})"


def _in_file(path: Sequence[int | str], raw: object) -> Iterable[str]:
    for part in path:
        if isinstance(part, int) and not isinstance(raw, list) and raw is not None:
            continue  # Only a validator has made a list here.
        elif isinstance(part, str) and isinstance(raw, list):
            continue
        yield str(part)
        if isinstance(raw, Mapping):
            raw = raw.get(part)
        elif isinstance(raw, list) and isinstance(part, int) and part < len(raw):
            raw = raw[part]
        else:
            raw = None


def _known(root: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """Return the known keys at a path. The annotation of each field on the path leads to the next model."""
    here: list[Any] = [root]
    for part in path:
        fields = [
            kind.model_fields[part].annotation for kind in here if part in getattr(kind, "model_fields", ())
        ]
        # If no type has this field, the types are lists and mappings. The last argument of their annotation is the type of
        # their entries.
        here = [
            kind
            for annotation in fields or [get_args(member)[-1] for member in here]
            for kind in _members(annotation)
        ]
    return [name for kind in here for name in getattr(kind, "model_fields", ())]


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union that may have keys. If the annotation is no union, return the annotation itself."""
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    return [kind for kind in get_args(annotation) if get_args(kind) or hasattr(kind, "model_fields")]
