"""What is wrong with a YAML file: by key, as it stands in the file, and what to do about it."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from ruamel.yaml import YAML


class YamlError(Exception):
    """The text is not what it should be; the message says what it should be."""


#: longest value that is repeated in a message, in characters.
_LONGEST = 80


def parse_yaml(text: str) -> object:
    """What a YAML 1.2 text says. Raises YamlError: it is no YAML."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except RecursionError:
        raise YamlError("not YAML: it is nested too deeply") from None
    except Exception as error:  # noqa: BLE001  a date that is none is a ValueError, and there are more such
        raise YamlError(f"not YAML: {' '.join(str(error).split())}") from None


def read_yaml(text: str, of: str) -> dict[str, Any]:
    """The mapping in a YAML 1.2 text; {} if it is empty. `of` says of what, for the message.

    Raises:
        YamlError: it is no YAML, or no mapping.
    """
    raw = parse_yaml(text)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise YamlError(f"must be a mapping of {of}, not a {type(raw).__name__}")
    return {str(key): value for key, value in raw.items()}


def explain(error: Mapping[str, Any], root: type[BaseModel], raw: object) -> str:
    """One line about one of the `errors()` that validating `raw` as `root` gave: `key: problem`.

    The key is what the file says. Parts of pydantic's path that are not in the file, because a validator
    put a list around a single entry or a mapping around a list, are left out.
    """
    path = [part for part in error["loc"] if part != "[key]"]
    key = ".".join(_in_file(path, raw))
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key{nearest(str(path[-1]), _known(root, path[:-1]))}"
    if kind == "missing":
        return f"{key}: missing, and there is no default: give it"
    mapping = kind in ("dict_type", "model_type")
    message = "must be a mapping" if mapping else error["msg"].removeprefix("Value error, ")
    found = repr(error["input"])
    return f"{key}: {message} (found {found if len(found) <= _LONGEST else found[:_LONGEST] + '...'})"


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for who wrote an unknown word: the known one that is like it, or what is known."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return f"; known are {shown}" if shown else ""


def _in_file(path: Sequence[int | str], raw: object) -> Iterable[str]:
    for part in path:
        if isinstance(part, int) and not isinstance(raw, list) and raw is not None:
            # A list that is not there, unless it is a number that is a key.
            if not (isinstance(raw, Mapping) and part in raw):
                continue
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
    """The keys of the model at a path, found along the fields' annotations."""
    here: list[Any] = [root]
    for part in path:
        fields = [
            one.model_fields[part].annotation for one in here if part in getattr(one, "model_fields", ())
        ]
        # Anything else is a list or a mapping: all its entries are of one type, the last argument.
        here = [one for given in fields or [get_args(one)[-1] for one in here] for one in _members(given)]
    return [name for one in here for name in getattr(one, "model_fields", ())]


def _members(annotation: Any) -> list[Any]:
    """The types of a union that may hold keys; a type alone."""
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    return [one for one in get_args(annotation) if get_args(one) or hasattr(one, "model_fields")]
