"""Parser of `manifest.yaml`. It checks every rule that needs no other file of the bundle, except for the existence of model.py.

Format versions:

- 3 is our format. Shapes are row-major, and `sha256` has the checksums of the weights and of every module.
- 2.0 is ReactantServer's format. Its shapes have the fastest axis first, so this parser reverses the letters.

`rsrv_bundle.keys` lists the keys of both formats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rsrv_bundle import dtypes, yaml12
from rsrv_bundle.compatibility import Feature, refusals
from rsrv_bundle.errors import Problems
from rsrv_bundle.keys import TENSOR_SECTIONS, known_keys
from rsrv_bundle.padding import parse_pad
from rsrv_bundle.spec import Kind, Manifest, TensorSpec
from rsrv_bundle.state_sections import check_state, parse_generate, parse_state
from rsrv_bundle.task_section import parse_task
from rsrv_bundle.tensors import MAX_EXTENT, is_positive, parse_tensors

FILE = "manifest.yaml"
#: Format version of written bundles.
CURRENT = 3

_VERSIONS = {"2": "2.0", "2.0": "2.0", "3": "3", "3.0": "3"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A thousand tensors are more than any model needs, and few enough for comparing each pair.
_MAX_TENSORS = 1000
_MAX_VARIANTS = 1000
_MAX_SIZES = 1000
_MAX_CALLS = 1000
_MAX_SUMS = 1000


def parse_manifest(data: bytes, *, name: str, has_hooks: bool, problems: Problems) -> Manifest | None:
    """Parse a manifest. Every broken rule is added to `problems`.

    `name` is the bundle's name. `has_hooks` is True if there is a `model.py` beside the manifest, because some rules depend on it.
    Return None if the text is not a mapping or has no usable version. Otherwise, return the readable part, which is complete only if
    `problems` is empty.
    """
    try:
        document = yaml12.load(data)
    except ValueError as e:
        problems.add(FILE, "", str(e))
        return None
    if not isinstance(document, dict):
        problems.add(FILE, "", "must be a mapping of keys to values")
        return None
    version = _version(document, problems)
    if version is None:
        return None
    return _Parser(document, version, name, has_hooks, problems).parse()


def _version(document: Mapping[str, Any], problems: Problems) -> str | None:
    if "format_version" not in document:
        problems.add(FILE, "format_version", f"is missing; write format_version: {CURRENT}")
        return None
    text = str(document["format_version"])
    version = _VERSIONS.get(text)
    if version is None:
        problems.add(FILE, "format_version", f"'{text}' is not supported; this reader knows 2.0 and 3")
    return version


class _Parser:
    """Parser of one manifest."""

    def __init__(
        self, document: Mapping[str, Any], version: str, name: str, has_hooks: bool, problems: Problems
    ) -> None:
        self.problems = problems
        self.document = known_keys(document, version, self.bad)
        self.version = version
        #: False in format 2.0. Keys that ReactantServer ignores may then have any value.
        self.strict = version != "2.0"
        self.name = name
        self.has_hooks = has_hooks

    def bad(self, key: str, rule: str) -> None:
        self.problems.add(FILE, key, rule)

    def parse(self) -> Manifest:
        kind = self.kind()
        self.text("name")
        sections = {key: self.tensors(key) for key in TENSOR_SECTIONS}
        inputs = sections["executable_inputs"] or ()
        outputs = sections["executable_outputs"] or ()
        calls, external = self.meta(kind)
        manifest = Manifest(
            format_version=self.version,
            description=self.description(),
            kind=kind,
            inputs=inputs,
            outputs=outputs,
            client_inputs=sections["client_inputs"],
            client_outputs=sections["client_outputs"],
            compiled_batch_sizes=self.batch_sizes(),
            input_shapes=self.input_shapes(inputs, kind),
            meta_calls=calls,
            meta_external=external,
            meta_restartable=self.restartable(kind),
            internal=self.internal(kind),
            provenance=self.mapping("provenance", lenient=not self.strict),
            numerics=self.numerics(),
            sha256=self.sha256(),
        )
        manifest = replace(manifest, features=self.features(manifest))
        for key, rule in refusals(manifest.features):
            self.bad(key, rule)
        self.executable_rules(manifest)
        self.client_rules(manifest)
        return self.with_options(manifest)

    def features(self, manifest: Manifest) -> frozenset[Feature]:
        """Return all features of the bundle, including combinations that are refused."""
        document, meta = self.document, manifest.kind == "meta"
        clients = (*(manifest.client_inputs or ()), *(manifest.client_outputs or ()))
        strings = any(spec.dtype == dtypes.BYTES for spec in clients)
        if isinstance(generates := document.get("generate"), dict):
            strings |= generates.get("tokenizer") is not None
        present = {
            Feature.META: meta,
            Feature.HOOKS: self.has_hooks and not meta,
            Feature.STRINGS: strings,
            Feature.VARIANTS: document.get("input_shapes") is not None,
            Feature.PADDING: document.get("pad") is not None,
            Feature.STATE: document.get("state") is not None and generates is None,
            Feature.GENERATION: generates is not None,
            Feature.TASK: document.get("task") is not None,
            Feature.INTERNAL: manifest.internal or (self.strict and document.get("internal") is True),
        }
        return frozenset(feature for feature, has in present.items() if has)

    def with_options(self, manifest: Manifest) -> Manifest:
        """Return the manifest with its sections `state`, `generate`, `task` and `pad`."""
        if (state := self.document.get("state")) is not None:
            manifest = replace(manifest, state=parse_state(state, self.bad))
            check_state(manifest, self.bad)
        if (generate := self.document.get("generate")) is not None:
            if state is None:
                self.bad("generate", "needs the section state: a generation is a sequence with a slot")
            spec = parse_generate(generate, manifest, self.bad)
            manifest = replace(manifest, generate=spec)
        if (task := self.document.get("task")) is not None:
            manifest = replace(manifest, task=parse_task(task, manifest, self.bad))
        if (pad := self.document.get("pad")) is not None:
            manifest = replace(manifest, pad=parse_pad(pad, manifest, self.bad))
        return manifest

    # Values of one key.

    def too_many(self, key: str, values: Sequence[Any], most: int) -> bool:
        if len(values) > most:
            self.bad(key, f"has {len(values)} entries; {most} are allowed")
        return len(values) > most

    def text(self, key: str) -> str:
        value = self.document.get(key, "")
        if not isinstance(value, str):
            self.bad(key, "must be text; put it in quotes")
            return ""
        return value

    def description(self) -> str:
        value = self.document.get("description")
        if isinstance(value, dict | list):
            self.bad("description", "must be text")
        return "" if value is None else str(value)

    def kind(self) -> Kind:
        value = self.document.get("kind", "model")
        if value == "meta":
            return "meta"
        if value != "model":
            self.bad("kind", f"must be 'model' or 'meta', not {value!r:.40}")
        return "model"

    def mapping(self, key: str, *, lenient: bool) -> Mapping[str, Any]:
        value = self.document.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            if not lenient:
                self.bad(key, "must be a mapping")
            return {}
        return value

    def numerics(self) -> Mapping[str, float | Mapping[str, float]]:
        errors: dict[str, float | Mapping[str, float]] = {}
        for key, value in self.mapping("numerics", lenient=False).items():
            where = f"numerics.{key}"
            if isinstance(value, dict):
                numbers = {inner: self.number(f"{where}.{inner}", number) for inner, number in value.items()}
                errors[key] = {inner: number for inner, number in numbers.items() if number is not None}
            elif (number := self.number(where, value)) is not None:
                errors[key] = number
        return errors

    def number(self, key: str, value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.bad(key, "must be a number")
            return None
        return float(value)

    def sha256(self) -> Mapping[str, str]:
        sums = self.mapping("sha256", lenient=False)
        if self.too_many("sha256", list(sums), _MAX_SUMS):
            return {}
        for name, value in sums.items():
            if not isinstance(value, str) or _SHA256.fullmatch(value) is None:
                self.bad(f"sha256.{name}", "must be text of 64 digits, 0 to 9 and a to f; put it in quotes")
        return sums

    def tensors(self, section: str) -> tuple[TensorSpec, ...] | None:
        value = self.document.get(section)
        if value is None:
            return None
        if not isinstance(value, list):
            self.bad(section, "must be a list of tensors")
            return ()
        if self.too_many(section, value, _MAX_TENSORS):
            return ()
        specs = parse_tensors(value, section, self.bad, reverse=not self.strict)
        for name, count in Counter(spec.name for spec in specs).items():
            if count > 1:
                self.bad(f"{section}.{name}", "names must be unique in a section; rename one of the tensors")
        return specs

    def batch_sizes(self) -> tuple[int, ...]:
        batching = self.document.get("batching")
        if batching is None:
            return ()
        if not isinstance(batching, dict):
            self.bad("batching", "must be a mapping")
            return ()
        key = "batching.compiled_batch_sizes"
        sizes = batching.get("compiled_batch_sizes")
        if sizes is None:
            return ()
        if not isinstance(sizes, list):
            self.bad(key, "must be a list of batch sizes")
            return ()
        if self.too_many(key, sizes, _MAX_SIZES):
            return ()
        for size in sizes:
            if not is_positive(size):
                self.bad(key, f"batch sizes are whole numbers from 1 to {MAX_EXTENT}, not {size!r:.40}")
        return tuple(sorted({size for size in sizes if is_positive(size)}))

    def meta(self, kind: Kind) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parse a meta model's callees: models of rsrv, and other models of Triton."""
        meta = self.document.get("meta")
        if kind != "meta":
            if meta is not None and self.strict:
                self.bad("meta", "only a bundle of kind 'meta' has it; add kind: meta or remove it")
            return (), ()
        if not isinstance(meta, dict) or not isinstance(meta.get("calls"), list):
            self.bad("meta.calls", "a meta model needs the list of the models it calls; it may be empty")
            return (), ()
        calls = self.model_names("meta.calls", meta["calls"])
        external = self.model_names("meta.external", meta.get("external"))
        for name in external:
            if name in calls:
                rule = f"'{name}' is also in meta.calls; list models of rsrv in meta.calls, and all other models in meta.external"
                self.bad("meta.external", rule)
        return calls, external

    def restartable(self, kind: Kind) -> bool:
        meta = self.document.get("meta")
        if kind != "meta" or not isinstance(meta, dict):
            return False
        value = meta.get("restartable", False)
        if not isinstance(value, bool):
            self.bad("meta.restartable", f"must be true or false, not {value!r:.40}")
        return value is True

    def model_names(self, key: str, value: Any) -> tuple[str, ...]:
        """Parse names of other models. No name may occur twice."""
        if value is None:
            return ()
        if not isinstance(value, list):
            self.bad(key, "must be a list of model names")
            return ()
        if self.too_many(key, value, _MAX_CALLS):
            return ()
        for name in value:
            if not isinstance(name, str) or not name:
                self.bad(key, f"entries are model names, not {name!r:.40}")
        counts = Counter(name for name in value if isinstance(name, str) and name)
        for name, count in counts.items():
            if count > 1:
                self.bad(key, f"'{name}' is listed {count} times; list each model once")
        if self.name in counts:
            self.bad(key, f"'{self.name}' must not call itself")
        return tuple(counts)

    def internal(self, kind: Kind) -> bool:
        value = self.document.get("internal")
        # In format 2.0, the value may be anything, because ReactantServer does not know this key.
        if self.strict and value is not None and not isinstance(value, bool):
            self.bad("internal", f"must be true or false, not {value!r:.40}")
        return kind == "model" and value is True

    # The section input_shapes, which has one set of sizes for each variant.

    def input_shapes(self, inputs: tuple[TensorSpec, ...], kind: Kind) -> tuple[tuple[int, ...], ...]:
        block = self.document.get("input_shapes")
        letters = [spec.letters[axis] for spec in inputs for axis in spec.variable_axes]
        if block is None:
            if letters and kind == "model":
                rule = f"an executable input has axes of size -1 ({', '.join(sorted(set(letters)))})"
                self.bad("input_shapes", f"{rule}, so the sizes that are compiled must be listed")
            return ()
        if kind == "meta":
            return ()
        if not isinstance(block, list):
            self.bad("input_shapes", "must be a list of mappings from axis letter to size")
            return ()
        if not letters:
            self.bad("input_shapes", "no executable input has an axis of size -1; remove it or mark the axes")
            return ()
        if self.too_many("input_shapes", block, _MAX_VARIANTS):
            return ()
        if not block:
            self.bad("input_shapes", "must list at least one set of sizes")
        variants: list[tuple[int, ...]] = []
        for i, entry in enumerate(block):
            sizes = self.variant(f"input_shapes[{i}]", entry, letters)
            if sizes is None:
                continue
            if sizes in variants:
                self.bad(f"input_shapes[{i}]", "repeats the sizes of an earlier entry; remove it")
            variants.append(sizes)
        return tuple(variants)

    def variant(self, key: str, entry: Any, letters: list[str]) -> tuple[int, ...] | None:
        if not isinstance(entry, dict):
            self.bad(key, "must be a mapping from axis letter to size")
            return None
        good = True
        for letter, size in entry.items():
            if len(letter) != 1 or not (letter.isascii() and letter.isalpha()):
                self.bad(key, f"'{letter}' is not one ASCII letter")
            elif letter not in letters:
                self.bad(key, f"gives a size for '{letter}', which is not an axis of size -1")
            elif not is_positive(size):
                self.bad(
                    f"{key}.{letter}", f"sizes are whole numbers from 1 to {MAX_EXTENT}, not {size!r:.40}"
                )
            else:
                continue
            good = False
        for letter in dict.fromkeys(letters):
            if letter not in entry:
                self.bad(key, f"gives no size for the variable axis '{letter}'")
                good = False
        return tuple(entry[letter] for letter in letters) if good else None

    # Rules over several keys.

    def executable_rules(self, manifest: Manifest) -> None:
        if manifest.kind == "model":
            for key in ("executable_inputs", "executable_outputs"):
                if self.document.get(key) is None:
                    self.bad(key, "is missing; list what the compiled modules take and return")
            if self.document.get("executable_outputs") == []:
                self.bad("executable_outputs", "must list at least one tensor")
        unbatched = [spec.name for spec in manifest.inputs if spec.batch_axis is None]
        if unbatched and len(unbatched) != len(manifest.inputs):
            rule = "mixes batched and unbatched executable inputs; these have no batch axis"
            self.bad("executable_inputs", f"{rule}: {', '.join(unbatched)}")

    def client_rules(self, manifest: Manifest) -> None:
        if manifest.kind == "meta":
            if not self.has_hooks:
                self.bad("kind", "a meta model needs a model.py")
            for key, specs in (
                ("client_inputs", manifest.client_inputs),
                ("client_outputs", manifest.client_outputs),
            ):
                if not specs:
                    self.bad(key, "a meta model must list what its clients send and get")
        elif not self.has_hooks:
            for key in ("client_inputs", "client_outputs"):
                if self.document.get(key) is not None:
                    self.bad(
                        key, "only hooks can change what clients see; add a model.py or remove this section"
                    )
        for spec in manifest.client_inputs or ():
            if spec.dtype == dtypes.BYTES and spec.variable_axes:
                self.bad(
                    f"client_inputs.{spec.name}",
                    "an axis of strings needs a size: Triton reads strings one by one, so a request with millions of"
                    " strings would delay other requests",
                )
        for section, specs in (("inputs", manifest.wire_inputs), ("outputs", manifest.wire_outputs)):
            has_section = self.document.get(f"client_{section}") is not None
            for spec in specs:
                if dtypes.kserve_name(spec.dtype) is None:
                    self.bad(
                        f"{'client' if has_section else 'executable'}_{section}.{spec.name}",
                        f"the element type {spec.dtype} cannot be sent to clients; convert it in a hook"
                        " or in the model",
                    )
