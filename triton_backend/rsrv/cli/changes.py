"""Changes of settings on the command line. A change has the form KEY=VALUE, as in rsrv.yaml, and sets a field of a message."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from rsrv.cli.client import CommandLineError
from rsrv.control.grpc_service import members, word
from rsrv.text import nearest


def key_and_value(text: str) -> tuple[str, str]:
    """Return the parts of KEY=VALUE. Raises CommandLineError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise CommandLineError(f"{text!r} is not KEY=VALUE")
    return key, value


def set_field(message: Message, key: str, value: str) -> None:
    """Set a field of an enum, a number or a truth value. Raises CommandLineError."""
    fields = message.DESCRIPTOR.fields_by_name
    if (field := fields.get(key)) is None:
        raise CommandLineError(f"unknown key {key!r}{nearest(key, fields)}")
    known: Mapping[str, Any] = {}
    try:
        if field.enum_type is not None:
            known = members(field.enum_type)
            setattr(message, key, known[value.lower()])
        elif field.cpp_type == field.CPPTYPE_BOOL:
            setattr(message, key, {"true": True, "false": False}[value])
        else:
            setattr(message, key, (float if field.cpp_type == field.CPPTYPE_DOUBLE else int)(value))
    except (KeyError, ValueError):
        raise CommandLineError(f"{key} cannot be {value!r}{nearest(value, known)}") from None


def shown(field: FieldDescriptor, value: Any) -> str:
    """Return the value of a field as it is written in rsrv.yaml. The field has an enum, a number or a truth value."""
    if field.enum_type is not None:
        return word(field.enum_type, value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
