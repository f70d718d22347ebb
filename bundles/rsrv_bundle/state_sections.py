"""Parsers of the sections `state` and `generate` of a manifest. They check every rule for the text of these sections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, get_args

from rsrv_bundle import dtypes
from rsrv_bundle.keys import GENERATE
from rsrv_bundle.spec import GenerateSpec, Manifest, StateSpec, StateTensor, WhenFull
from rsrv_bundle.tensors import MAX_EXTENT, MAX_NAME, Report, is_positive

#: For each tensor of a generation: its element type, its sizes after the batch axis, and both in words.
_ROLES: Final[Mapping[str, tuple[str, tuple[int, ...], str]]] = {
    "tokens": ("i32", (-1,), "an executable input, i32 [n, t] with t of size -1"),
    "lengths": ("i32", (), "an executable input, i32 [n]"),
    "sampling": ("f32", (4,), "an executable input, f32 [n, 4]"),
    "token": ("i32", (), "an executable output, i32 [n]"),
}
MAX_SLOTS = 65_536
_IDLE_TIMEOUT_S = 60.0
_MAX_IDLE_TIMEOUT_S = 7 * 86_400.0
# These limits are higher than any model needs. numpy allows at most 64 axes, and one of them is the axis of the slots.
_MAX_TENSORS, _MAX_AXES, _MAX_STOPS = 1000, 32, 1000
_MAX_TEMPLATE = 16_384


def parse_state(section: Any, bad: Report) -> StateSpec | None:
    """Parse the section `state`. `bad(key, rule)` is called for each broken rule. Return None if too little can be read."""
    if not isinstance(section, dict):
        bad("state", "must be a mapping with slots and tensors")
        return None
    slots = section.get("slots")
    if not is_positive(slots) or slots > MAX_SLOTS:
        bad("state.slots", f"must be a whole number from 1 to {MAX_SLOTS}, not {slots!r:.40}")
        slots = 1
    timeout = section.get("idle_timeout_s", _IDLE_TIMEOUT_S)
    if not _is_number(timeout) or not 0 < timeout <= _MAX_IDLE_TIMEOUT_S:
        rule = f"must be a number of seconds above 0, at most {_MAX_IDLE_TIMEOUT_S:g}, not {timeout!r:.40}"
        bad("state.idle_timeout_s", rule)
        timeout = _IDLE_TIMEOUT_S
    full: Any = section.get("when_full", "wait")
    if full not in get_args(WhenFull):
        bad("state.when_full", f"must be {', '.join(get_args(WhenFull))}, not {full!r:.40}")
        full = "wait"
    entries = section.get("tensors")
    if not isinstance(entries, list) or not 0 < len(entries) <= _MAX_TENSORS:
        bad("state.tensors", f"must list 1 to {_MAX_TENSORS} tensors, each with name, dtype and dims")
        return None
    tensors = [_tensor(entry, f"state.tensors[{i}]", slots, bad) for i, entry in enumerate(entries)]
    for name, count in Counter(tensor.name for tensor in tensors if tensor).items():
        if count > 1:
            bad(f"state.tensors.{name}", "names must be unique; rename one of the tensors")
    return StateSpec(slots, tuple(tensor for tensor in tensors if tensor), float(timeout), full)


def _tensor(entry: Any, key: str, slots: int, bad: Report) -> StateTensor | None:
    if not isinstance(entry, dict):
        bad(key, "must be a mapping with name, dtype and dims")
        return None
    name, dtype, dims = entry.get("name"), entry.get("dtype"), entry.get("dims")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        bad(key, f"needs a name of 1 to {MAX_NAME} printable characters")
        return None
    key = f"state.tensors.{name}"
    if not isinstance(dtype, str) or dtype not in dtypes.TOKENS:
        problem = "dtype is missing" if dtype is None else f"unknown dtype {dtype!r:.40}"
        bad(key, f"{problem}; {dtypes.unknown(dtype if isinstance(dtype, str) else '')}")
        return None
    if not isinstance(dims, list) or len(dims) > _MAX_AXES or not all(map(is_positive, dims)):
        bad(
            key,
            f"dims must list the sizes of one slot's axes, at most {_MAX_AXES}, each from 1 to {MAX_EXTENT}",
        )
        return None
    if math.prod(dims) * slots * dtypes.itemsize(dtype) > 2**63 - 1:
        bad(key, "its dims and the slots multiply to more bytes than 64 bits can count")
        return None
    return StateTensor(name, dtype, tuple(dims))


def check_state(manifest: Manifest, bad: Report) -> None:
    """Report features that a manifest with state may not have."""
    if manifest.kind == "meta":
        return
    if not manifest.inputs:
        bad("executable_inputs", "a model with state needs an input, whose rows are sequences")
    for section, specs in (
        ("executable_inputs", manifest.inputs),
        ("executable_outputs", manifest.outputs),
        ("client_inputs", manifest.client_inputs or ()),
        ("client_outputs", manifest.client_outputs or ()),
    ):
        for spec in specs:
            if spec.batch_axis != 0:
                rule = "with state, each tensor has the batch axis first: a row is one sequence"
                bad(f"{section}.{spec.name}", rule)


def parse_generate(section: Any, manifest: Manifest, bad: Report) -> GenerateSpec | None:
    """Parse the section `generate` of a manifest that is otherwise complete."""
    if not isinstance(section, dict):
        bad("generate", "must be a mapping with context and max_tokens")
        return None
    names = {role: _role(role, section.get(role, role), manifest, bad) for role in _ROLES}
    unnamed = {spec.name for spec in manifest.inputs} - set(names.values())
    if unnamed:
        bad(
            "generate",
            f"there are no values for the inputs {', '.join(sorted(unnamed))}; a step has three inputs",
        )
    chunks = manifest.chunks
    if chunks and 1 not in chunks:
        bad("input_shapes", "a generation needs the chunk of 1 token, for its steps")
    context = section.get("context")
    if not is_positive(context):
        bad("generate.context", f"must be a whole number from 1 to {MAX_EXTENT}, not {context!r:.40}")
        context = MAX_EXTENT
    elif context < max(chunks, default=1):
        bad("generate.context", f"{context} is less than the longest chunk, {max(chunks)} tokens")
    most = section.get("max_tokens")
    if not is_positive(most) or most > context:
        bad("generate.max_tokens", f"must be a whole number from 1 to the context, not {most!r:.40}")
        most = 1
    tokenizer, template = _texts(section, bad)
    return GenerateSpec(
        **names,
        context=context,
        stop=_stop(section.get("stop", []), bad),
        max_tokens=most,
        tokenizer=tokenizer,
        template=template,
        chat=_chat(section.get("chat"), tokenizer, bad),
    )


def _role(role: str, name: Any, manifest: Manifest, bad: Report) -> str:
    """Check that a generation's tensor exists and fits its role. Return its name."""
    specs = manifest.outputs if role == "token" else manifest.inputs
    spec = next((spec for spec in specs if spec.name == name), None)
    dtype, behind_batch, rule = _ROLES[role]
    if spec is None or (spec.dtype, spec.batch_axis, spec.dims[1:]) != (dtype, 0, behind_batch):
        bad(f"generate.{role}", f"{name!r:.40} must be {rule}")
    return str(name)


def _stop(stop: Any, bad: Report) -> tuple[int, ...]:
    whole = isinstance(stop, list) and len(stop) <= _MAX_STOPS
    if not whole or not all(is_positive(token) or (token == 0 and token is not False) for token in stop):
        bad(
            "generate.stop",
            f"must list token ids, whole numbers from 0 to {MAX_EXTENT}, at most {_MAX_STOPS}",
        )
        return ()
    return tuple(dict.fromkeys(map(int, stop)))


def _texts(section: Mapping[str, Any], bad: Report) -> tuple[str | None, str]:
    tokenizer, template = section.get("tokenizer"), section.get("template", "{text}")
    if tokenizer is not None and (not isinstance(tokenizer, str) or not tokenizer):
        bad("generate.tokenizer", "must be the name of a file of the bundle")
        tokenizer = None
    elif tokenizer is None and "template" in section:
        bad("generate.template", "needs a tokenizer: without one, clients send tokens")
    if not isinstance(template, str) or len(template) > _MAX_TEMPLATE or template.count("{text}") != 1:
        rule = f"must be text of at most {_MAX_TEMPLATE} characters with one {{text}}, where the client's text goes"
        bad("generate.template", rule)
        template = "{text}"
    return tokenizer, template


def _chat(chat: Any, tokenizer: str | None, bad: Report) -> dict[str, str]:
    if chat is None:
        return {}
    texts = isinstance(chat, dict) and all(
        isinstance(text, str) and isinstance(name, str) for name, text in chat.items()
    )
    if not texts or not chat.get("template") or tokenizer is None:
        bad("generate.chat", "must be a mapping of texts with the Jinja `template`, and needs a tokenizer")
        return {}
    return dict(chat)


def sections_of(state: StateSpec | None, generate: GenerateSpec | None) -> dict[str, dict[str, Any]]:
    """Return the sections `state` and `generate`, if they exist, in the form of a manifest."""
    sections: dict[str, dict[str, Any]] = {}
    if state is not None:
        sections["state"] = {
            "slots": state.slots,
            "tensors": [{"name": t.name, "dtype": t.dtype, "dims": list(t.dims)} for t in state.tensors],
            "idle_timeout_s": state.idle_timeout_s,
            "when_full": state.when_full,
        }
    if generate is not None:
        keys = GENERATE if generate.tokenizer else (*_ROLES, "context", "stop", "max_tokens")
        sections["generate"] = {key: getattr(generate, key) for key in keys} | {"stop": list(generate.stop)}
        if not generate.chat:
            sections["generate"].pop("chat", None)
    return sections


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
