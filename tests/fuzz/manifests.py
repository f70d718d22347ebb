"""Changes to a manifest. Most leave it readable, and some make it expand to much data."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from rsrv_bundle import yaml12

#: Content of a bundle's files, by name.
Files = dict[str, bytes]
Random = random.Random

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, 1e308, -0.0,
    "", "n", "b", "nn", "nc", "2.0", "3", "-1", "f32", "f8_e4m3", "meta", "model", "x" * 300, "x" * 100_000, "a\nb", "\0",
    "../../etc/passwd", "/etc/passwd", "é", "\u202e", "2026-01-01", "@hex@", "@inf@", "@octal@", "@surrogate@", "@tag@",
    [], {}, [[]], [None], {"": None}, {"a": {"b": {}}}, [1] * 3000, ["m"] * 2, {"c": 3}, {"n": 1}, {"h": 4, "w": 6},
)  # fmt: skip
_RAW = {
    '"@hex@"': "0x" + "f" * 6000,
    '"@octal@"': "0o" + "7" * 9000,
    '"@inf@"': ".inf",
    '"@surrogate@"': r'"\ud800"',
    '"@tag@"': "!!binary aGk=",
}


def value(rng: Random, files: Files) -> None:
    """Replace one value at a random place by another value."""
    document = _document(files)
    place = _place(rng, document)
    if place is not None:
        holder, key = place
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    _dump(document, files)


def key(rng: Random, files: Files) -> None:
    """Remove, add or rename one key at a random place."""
    document = _document(files)
    place = _place(rng, document)
    if place is not None:
        holder, key = place
        value = holder[key]
        if rng.random() < 0.6:
            del holder[key]
        if isinstance(holder, dict):
            known = (
                "client_inputs",
                "client_outputs",
                "input_shapes",
                "meta",
                "internal",
                "public",
                "kind",
                "numerics",
                "state",
                "generate",
            )
            holder[rng.choice((f"{key}s", "", "\0", "n", "dims", *known))] = copy.deepcopy(
                rng.choice((value, *VALUES))
            )
        else:
            holder.insert(0, copy.deepcopy(rng.choice((value, *VALUES))))
    _dump(document, files)


def many(rng: Random, files: Files) -> None:
    """Make one list or mapping very long."""
    document = _document(files)
    count = rng.choice((300, 5000, 60_000))
    entry = {"name": "x", "dtype": "f32", "shape": "nc", "dims": {"c": 1}}
    section = rng.choice(("executable_inputs", "executable_outputs", "client_inputs"))
    match rng.randrange(7):
        case 0:
            document[section] = [{**entry, "name": f"x{i}"} for i in range(count // 10)]
        case 1:
            document["input_shapes"] = [{"h": i + 1, "w": i + 1} for i in range(count)]
        case 2:
            document["batching"] = {"compiled_batch_sizes": list(range(1, count))}
        case 3:
            document["meta"] = {
                "calls": [f"m{i}" for i in range(count)],
                "external": [f"m{i}" for i in range(count)],
            }
        case 4:
            document |= {f"{section[:-1]}{i}": i for i in range(count)}
        case 5:
            tensors = [{"name": f"x{i}", "dtype": "f32", "dims": [1]} for i in range(count)]
            document["state"] = {"slots": 65_536, "tensors": tensors}
            document["generate"] = {"context": 1, "max_tokens": 1, "stop": list(range(count))}
        case _:
            document["provenance"] = {str(i): [i] for i in range(count)}
    _dump(document, files)


def _document(files: Files) -> dict[str, Any]:
    try:
        document = yaml12.load(files["manifest.yaml"])
    except ValueError:  # An earlier change may have made the manifest unreadable.
        document = None
    return document if isinstance(document, dict) else {}


def _place(rng: Random, document: Any) -> tuple[Any, Any] | None:
    """Return a random list or mapping of the document, and one of its keys."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        keys = (
            list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        )
        for key in keys:
            places.append((value, key))
            collect(value[key])

    collect(document)
    return rng.choice(places) if places else None


def _dump(document: Any, files: Files) -> None:
    text = json.dumps(document, default=str)  # JSON is also YAML.
    for marker, raw in _RAW.items():
        text = text.replace(marker, raw)
    files["manifest.yaml"] = text.encode()


def text(rng: Random, files: Files) -> None:
    """Insert special syntax of YAML at a random place in the text."""
    text = files["manifest.yaml"]
    at = rng.randrange(len(text) + 1)
    piece = rng.choice(
        (
            b"&a ", b"*a", b"<<: *a\n", b"? ", b"- " * 60, b"\t", b"--- ", b"...\n", b"%YAML 1.1\n", b"!!python/object:os.x ",
            b"!!set {a}", b"!<tag:x> ", b"\0", b"\xff", b"\xef\xbb\xbf", b"{" * 150, b"[" * 3000, b"'", b'"', b"# ", b"|\n", b">9\n",
            b'"\\x', b'"\\ud800"', b": : :", b"@", b"`", b"y", b"\r", "\u2028\u0085".encode(), b"\n" * 5000, b" " * 5000,
        )
    )  # fmt: skip
    match rng.randrange(4):
        case 0:
            files["manifest.yaml"] = text[:at]
        case 1:
            files["manifest.yaml"] = text.decode(errors="replace").encode(
                rng.choice(("utf-16", "utf-32", "latin-1")), "replace"
            )
        case _:
            files["manifest.yaml"] = text[:at] + piece + text[at:]


def bomb(rng: Random, files: Files) -> None:
    """Write a short text that expands to much data in its reader."""
    levels = rng.choice((8, 14, 40))
    count = rng.choice((2_000, 20_000, 90_000))
    bombs = (
        "\n".join(
            ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
            + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
        ),
        "\n".join(
            ["a0: &a0 {x: 1, y: 2}"]
            + [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}, *a{i - 1}]}}" for i in range(1, levels)]
        ),
        "a: &a {" + ", ".join(f"k{i}: 1" for i in range(count // 20)) + "}\n" + "".join(f"c{i}: {{<<: *a}}\n" for i in range(count // 20)),
        "a: &a [*a, *a, *a]",
        "a: " + "[" * levels * 4 + "]" * levels * 4,
        "".join(" " * i + "a:\n" for i in range(levels * 10)),
        "a: " + "{b: " * levels * 4,
        "? " * levels,
        "a: [" + "a, " * count + "]",
        "".join(f"k{i}: v\n" for i in range(count)),
        "- a\n" * count,
        "a: " + "x\n " * count,
        "a: !" + "x" * count,
        "a: 0x" + "f" * count,
        "a: 1" + "_1" * count,
        "".join(f"- &a{i} x\n" for i in range(count)),
        "a: 'x" + "''" * count,
        "a: \"" + "\\u0041" * count + '"',
    )  # fmt: skip
    text = files["manifest.yaml"].decode(errors="replace")
    bomb = rng.choice(bombs)
    files["manifest.yaml"] = (f"{bomb}\n" if rng.random() < 0.5 else f"{text}\n{bomb}\n").encode()
