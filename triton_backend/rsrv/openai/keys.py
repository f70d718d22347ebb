"""The file of keys: who may call which models. It has only the keys' SHA-256."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from rsrv.explain import YamlError, read_yaml
from rsrv.settings_fleet import Section
from rsrv.text import os_error


class KeysError(ValueError):
    """The file of keys cannot be used. The message says why."""


class KeySection(Section):
    """One key."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    #: Names of models, or patterns with * and ?.
    models: list[str] = Field(["*"])
    #: Priority of the owner's requests, from 1 for the most urgent; None for the server's default, 5.
    priority: Annotated[int, Field(ge=1, le=65534)] | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key. Without keys, everybody is the same nameless caller."""

    name: str = ""
    models: tuple[str, ...] = ("*",)
    priority: int | None = None

    def may_call(self, model: str) -> bool:
        return any(fnmatchcase(model, pattern) for pattern in self.models)


#: Callers by the SHA-256 of their keys.
Keys = Mapping[bytes, Caller]
_FILE = TypeAdapter(dict[str, KeySection])


def read_keys(path: Path) -> Keys:
    """Return the keys in a file. Raises KeysError."""
    try:
        owners = _FILE.validate_python(read_yaml(path.read_text(encoding="utf-8"), "names"))
    except OSError as error:
        raise KeysError(os_error(error)) from None
    except (YamlError, UnicodeDecodeError) as error:
        raise KeysError(f"{path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        # Leave out the value, because it may be a key that was pasted in place of its SHA-256.
        raise KeysError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not owners:
        raise KeysError(f"{path} has no key")
    keys = {
        bytes.fromhex(owner.sha256): Caller(name, tuple(owner.models), owner.priority)
        for name, owner in owners.items()
    }
    if len(keys) < len(owners):
        raise KeysError(f"{path}: two names have the same key")
    return keys


def find_caller(keys: Keys, authorization: str) -> Caller | None:
    """Return the owner of the key in the header `authorization`, or None. The search takes the same time for every key."""
    scheme, _, key = authorization.partition(" ")
    digest = sha256(key.strip().encode(errors="surrogateescape")).digest()
    matches = [caller for known, caller in keys.items() if hmac.compare_digest(known, digest)]
    return matches[0] if matches and scheme.lower() == "bearer" else None
