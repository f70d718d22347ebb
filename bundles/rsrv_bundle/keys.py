"""The keys of `manifest.yaml`, by format version. Every version's keys are listed here and nowhere else. Pure.

In format 3, an unknown key is refused, and the error names it. So a server that is too old for a key refuses the bundle. A new
key therefore needs no new format version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rsrv.text import nearest

TENSOR_SECTIONS: Final = ("executable_inputs", "executable_outputs", "client_inputs", "client_outputs")

GENERATE: Final = (
    *("tokens", "lengths", "sampling", "token", "context", "stop", "max_tokens"),
    *("tokenizer", "template", "chat"),
)

_MOST_ENTRIES, _MOST_UNKNOWN = 1000, 20
#: Keys of format 2.0, which is ReactantServer's format, and three of our own keys that such bundles may also have: `internal`,
#: `meta.external` and `meta.restartable`.
_FORMAT_2: Final[Mapping[str, tuple[str, ...]]] = {
    "": (
        *("format_version", "name", "description", "kind", "meta", "internal"),
        *TENSOR_SECTIONS,
        *("batching", "input_shapes", "provenance"),
    ),
    "meta": ("calls", "external", "restartable"),
}
#: Keys of each section. The name of a section ends with [] if it stands for each entry of a list. The key * stands for any key.
_FORMAT_3: Final[Mapping[str, tuple[str, ...]]] = {
    **_FORMAT_2,
    "": (*_FORMAT_2[""], "numerics", "sha256", "state", "generate", "task", "pad"),
    "batching": ("compiled_batch_sizes",),
    **dict.fromkeys((f"{section}[]" for section in TENSOR_SECTIONS), ("name", "dtype", "shape", "dims")),
    "state": ("slots", "tensors", "idle_timeout_s", "when_full"),
    "state.tensors[]": ("name", "dtype", "dims"),
    "generate": GENERATE,
    "task": ("kind", "inputs", "outputs", "labels", "dimensions"),
    "pad.*": ("values", "mask"),
}


def known_keys(document: Mapping[str, Any], version: str, bad: Callable[[str, str], None]) -> dict[str, Any]:
    """Check the keys of a manifest, and return the manifest.

    In format 3, `bad(key, rule)` is called for each unknown key. In format 2.0, unknown top-level keys are removed from the
    result.
    """
    if version != "2.0":
        for section, known in _FORMAT_3.items():
            for where, mapping in _mappings(document, section.split(".") if section else (), ""):
                for key in [key for key in mapping if key not in known][:_MOST_UNKNOWN]:
                    bad(_inner(where, key), f"unknown key{nearest(key, known)}")
        return dict(document)
    return {key: value for key, value in document.items() if key in _FORMAT_2[""]}


def _mappings(value: Any, steps: Sequence[str], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the mappings of a section, each with its place in the manifest."""
    if not isinstance(value, dict):
        return
    if not steps:
        yield where, value
        return
    name = steps[0].removesuffix("[]")
    for key in value if name == "*" else value.keys() & {name}:
        entry, place = value[key], _inner(where, key)
        if name == steps[0]:
            yield from _mappings(entry, steps[1:], place)
        elif isinstance(entry, list):
            for i, item in enumerate(entry[:_MOST_ENTRIES]):
                yield from _mappings(item, steps[1:], f"{place}[{i}]")


def _inner(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
