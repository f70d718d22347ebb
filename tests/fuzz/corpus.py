"""Bundles with errors. Their seeds reproduce them.

Each is a good bundle with one to three changes: to its manifest, weights, modules or hooks, or to its files in the file system.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rsrv_bundle import yaml12
from tests.fuzz import manifests
from tests.fuzz.manifests import VALUES, Files, Random
from tests.unit.bundle.forge import META, safetensors_bytes, sealed

_HOOKS = b"def preprocess(inputs):\n    return inputs\n\ndef postprocess(outputs):\n    return outputs\n"


def good_bundles(scratch: Path) -> list[Files]:
    """Return the bundles from which all others are made.

    They are a plain one, one with hooks, one with variants, one of format 2.0, a meta model, one with state, and one that
    generates.
    """
    # jax starts threads, so it runs in another process. This process forks children.
    subprocess.run([sys.executable, "-m", __name__, str(scratch)], check=True)
    first, variants = _read(scratch / "plain"), _read(scratch / "variants")
    old = first["manifest.yaml"].replace(b"shape: nc", b"shape: cn").replace(b"shape: na", b"shape: an")
    run = b"async def run(inputs, call):\n    return inputs\n"
    return [
        first,
        {**first, "model.py": _HOOKS, "vocabulary.txt": b"one\ntwo\n"},
        variants,
        {**first, "manifest.yaml": old.replace(b"format_version: 3", b"format_version: '2.0'")},
        {"manifest.yaml": json.dumps(META).encode(), "model.py": run},
        _read(scratch / "stateful"),
        _read(scratch / "generative"),
    ]


def _seal(files: Files) -> None:
    """Update the checksums of a bundle if it has some. With a wrong checksum, readers would not look at the changes."""
    with contextlib.suppress(ValueError, TypeError):  # The manifest may be unreadable.
        document = yaml12.load(files["manifest.yaml"])
        if "sha256" in document:
            summed = [name for name in files if name.endswith((".mlir", ".safetensors"))]
            sums = {name: hashlib.sha256(files[name]).hexdigest() for name in summed}
            files["manifest.yaml"] = sealed(files["manifest.yaml"], sums)


def _export(scratch: Path) -> None:
    import jax
    import jax.numpy as jnp

    from rsrv_bundle.export import export_bundle
    from rsrv_bundle.stateful import export_generative, export_stateful

    def f(params: Any, x: Any) -> dict[str, Any]:
        return {"y": jnp.tanh(x @ params["w"]).sum(-1, keepdims=True) + params["b"]}

    weights = {"w": np.ones((4, 3), np.float32), "b": np.ones((1,), np.float32)}
    inputs = {"x": np.zeros((1, 4), np.float32)}
    export_bundle(f, weights, inputs, batch_sizes=[1, 4], out_dir=scratch / "plain")
    export_bundle(
        lambda params, x: {"y": (x * params["b"]).sum((1, 2))},
        {"b": weights["b"]},
        {"x": np.zeros((1, 4, 6), np.float32)},
        batch_sizes=[2],
        axes={"x": "nhw"},
        input_shapes=[{"h": 4, "w": 6}, {"h": 8, "w": 2}],
        out_dir=scratch / "variants",
    )
    sums: Any = {"sum": jax.ShapeDtypeStruct((4,), jnp.float32)}
    export_stateful(
        lambda params, state, x: ({"y": state["sum"] + x}, {"sum": state["sum"] + x * params["b"]}),
        sums,
        {"b": weights["b"]},
        inputs,
        slots=4,
        batch_sizes=[1, 4],
        out_dir=scratch / "stateful",
    )

    def logits(params: Any, state: Any, position: Any, tokens: Any, lengths: Any) -> Any:
        counted = jnp.arange(tokens.shape[1]) < lengths[:, None]
        total = state["sum"] + (jax.nn.one_hot(tokens, 4) * counted[:, :, None]).sum(1)
        return total * params["b"], {"sum": total}

    export_generative(
        logits,
        sums,
        {"b": weights["b"]},
        slots=4,
        context=16,
        max_tokens=4,
        stop=[3],
        chunks=[1, 4],
        batch_sizes=[2],
        tokenizer=_tokenizer(scratch),
        out_dir=scratch / "generative",
    )


def _tokenizer(scratch: Path) -> Path:
    file = scratch / "tokenizer.json"
    file.write_text("{}")
    return file


def _read(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def write_mutant(seed: int, good: Sequence[Files], parent: Path) -> Path:
    """Make the bundle of this seed in `parent`. Return its directory."""
    rng = Random(seed)
    files = dict(rng.choice(good))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(_OF_CONTENT)(rng, files)
    if rng.random() < 0.7:
        _seal(files)
    directory = parent / (rng.choice(_NAMES) if rng.random() < 0.05 else "mutant")
    directory.mkdir()
    for name, content in files.items():
        with contextlib.suppress(OSError, ValueError):  # A file cannot have this name.
            (directory / name).write_bytes(content)
    if rng.random() < 0.25:
        rng.choice(_OF_FILES)(rng, directory)
    return directory


def write_module_mutant(seed: int, good: Sequence[Files], parent: Path) -> Path:
    """Make a bundle of this seed in which only a module is damaged. Return its directory."""
    rng = Random(seed)
    files = dict(rng.choice([files for files in good if "model.b1.mlir" in files]))
    files["model.b1.mlir"] = _damaged(rng, files["model.b1.mlir"])
    _seal(files)
    directory = parent / "mutant"
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


_NAMES = (
    "with space",
    "new\nline",
    "-dash",
    "ü",
    "a" * 255,
    "..x",
    "x.",
    "rsrv.yaml",
    "%s{0}",
    "$(id)",
    "..",
)[:-1]

# --- weights ----------------------------------------------------------------------------------------------


def _weights_header(rng: Random, files: Files) -> None:
    """Make one wrong change in the header of the weights."""
    header, buffer = _weights(files)
    entries = [name for name in header if name != "__metadata__"]
    if entries:
        entry = header[rng.choice(entries)]
        match rng.randrange(6):
            case 0:
                entry["dtype"] = rng.choice(
                    ("F64", "I8", "BOOL", "F4", "C64", "f32", "", 7, None, [], "F8_E4M3")
                )
            case 1:
                entry["shape"] = rng.choice(
                    (
                        [],
                        [0],
                        [-1],
                        [2**62, 4],
                        [2**64],
                        [1] * 100_000,
                        "4",
                        None,
                        [1.5],
                        [True],
                        [4, 3, 1],
                        [10**30],
                        [[4]],
                    )
                )
            case 2:
                begin, end = entry["data_offsets"]
                entry["data_offsets"] = rng.choice(
                    (
                        [begin, end + 4],
                        [begin + 4, end],
                        [end, begin],
                        [-4, end],
                        [begin, 2**63],
                        [2**64, 2**64 + 48],
                    )
                )
            case 3:
                header[rng.choice(("w", "", "\0", "x" * 5000, "\n", "__metadata__", "é"))] = dict(entry)
            case 4:
                del header[rng.choice(entries)]
            case _:
                entry[rng.choice(("x", "dtype ", ""))] = rng.choice(VALUES)
    files["weights.safetensors"] = safetensors_bytes(header, buffer)


def _weights_metadata(rng: Random, files: Files) -> None:
    """Damage the metadata, which contain the order of the arguments."""
    header, buffer = _weights(files)
    deep = "[" * 100_000 + "]" * 100_000
    header["__metadata__"] = rng.choice(
        (
            None, [], "x", {}, {"argument_order": "[]"}, {"argument_order": '["w", "w"]'}, {"argument_order": '["nobody"]'},
            {"argument_order": "["}, {"argument_order": deep}, {"argument_order": '["b", "w"]'}, {"argument_order": 5},
            {"argument_order": "NaN"}, {"argument_order": json.dumps([str(i) for i in range(50_000)])}, {"argument_order": "[1" + "0" * 5000 + "]"},
        )
    )  # fmt: skip
    files["weights.safetensors"] = safetensors_bytes(header, buffer)


def _weights_bytes(rng: Random, files: Files) -> None:
    """Damage the file of weights."""
    raw = files.get("weights.safetensors", b"")
    match rng.randrange(8):
        case 0:
            raw = raw[: rng.randrange(len(raw) + 1)]
        case 1:
            raw = (
                struct.pack(
                    "<Q",
                    rng.choice((0, 1, 7, len(raw), max(8, len(raw)) - 8, 2**32, 2**63, 2**64 - 1, 10**8)),
                )
                + raw[8:]
            )
        case 2:
            raw += bytes(rng.choice((1, 4096)))
        case 3:
            raw = safetensors_bytes(
                rng.choice(("{" * 90_000, '{"a":' * 50_000, "[]", "null", "{}", "", '{"a":1e999}', "{\xff"))
            )
        case 4:
            raw = safetensors_bytes('{"a":' + "[" + "[],".join([""] * rng.choice((1000, 2_000_000))) + "0]}")
        case 5:
            zero = {
                f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for i in range(rng.choice((100, 20_000)))
            }
            raw = safetensors_bytes({**zero, "__metadata__": {"argument_order": json.dumps(list(zero))}})
        case 6:
            header, buffer = _weights(files)
            text = json.dumps(header)
            raw = safetensors_bytes(text[:-1] + ", " + text[1:], buffer)  # Each key is there twice.
        case _:
            raw = _damaged(rng, raw)
    files["weights.safetensors"] = raw


def _weights(files: Files) -> tuple[dict[str, Any], bytes]:
    raw = files.get("weights.safetensors", b"")
    try:
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        assert all(
            isinstance(entry, dict) and "data_offsets" in entry
            for name, entry in header.items()
            if name != "__metadata__"
        )
        return header, raw[8 + length :]
    except Exception:  # noqa: BLE001 - an earlier change may have left anything
        return {}, b""


# --- modules, hooks, and other files ----------------------------------------------------------------------


def _module(rng: Random, files: Files) -> None:
    """Damage, exchange, replace or rename a module."""
    modules = [name for name in files if name.endswith(".mlir")]
    if not modules:
        return
    name = rng.choice(modules)
    match rng.randrange(8):
        case 0:
            files[name] = files[rng.choice(modules)]
        case 1:
            files[rng.choice(_MODULE_NAMES)] = files.pop(name)
        case 2:
            files[name] = rng.choice(
                (
                    b"",
                    b"module {}",
                    b"ML\xefR",
                    files["manifest.yaml"],
                    bytes(100_000),
                    b"ML\xefR\x0dStableHLO_v1.9.0\0",
                )
            )
        case 3:
            files[name] = files[name].replace(b"StableHLO_v1", b"StableHLO_v9")
        case _:
            files[name] = _damaged(rng, files[name])


_MODULE_NAMES = (
    "model.mlir", "model.b0.mlir", "model.b01.mlir", "model.b9999999999.mlir", "model.b4294967296.mlir", "model.v0.mlir", "model.b٣.mlir",
    "model.v99999.b1.mlir", "model.v-1.mlir", "model..mlir", "model.b1.MLIR", "model.b1.mlir\n", "model.jl", "x" * 255, "\udcff.mlir",
)  # fmt: skip


def _damaged(rng: Random, raw: bytes) -> bytes:
    """Change some bytes."""
    damaged = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 10))):
        if len(damaged) < 2:
            break
        at = rng.randrange(len(damaged))
        match rng.randrange(5):
            case 0:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                damaged[at] = rng.choice((0, 1, 3, 0x7F, 0xFF))
            case 2:
                damaged[at : at + rng.choice((1, 8, 64))] = b""
            case 3:
                damaged[at:at] = damaged[at : at + 16] * rng.choice((1, 20))
            case _:
                other = rng.randrange(len(damaged))
                damaged[at : at + 16] = damaged[other : other + 16]
    return bytes(damaged)


def _hooks(rng: Random, files: Files) -> None:
    """Write Python that is broken or huge, or remove it."""
    count = rng.choice((500, 20_000))
    files["model.py"] = rng.choice(
        (
            b"", b"def preprocess(", b"def preprocess(): ...", b"def other(inputs): ...", b"\0", b"\xff\xfe", b"# coding: utf-7\n+AGE-",
            b"x = " + b"(" * count, b"x = " + b"-" * count + b"1", b"x = 1" + b" + 1" * count, b"x = a" + b".b" * count,
            b"def preprocess(inputs, x=1" + b" + 1" * count + b", y=2, *, z): ...",
            b"if x: pass\n" + b"elif x: pass\n" * count, b"".join(b" " * i + b"if x:\n" for i in range(120)) + b" " * 120 + b"y = 1",
            b"x = [" + b"1," * count + b"]", b"def preprocess(" + b",".join(b"a%d" % i for i in range(count)) + b"): ...",
            b"preprocess = postprocess = run = lambda *a: a\n", b"import os as run\n", b"class preprocess: ...", b"x = " + b"f'{" * 200,
        )
    )  # fmt: skip
    if rng.random() < 0.2:
        del files["model.py"]


_OF_CONTENT: tuple[Callable[[Random, Files], None], ...] = (
    manifests.value, manifests.value, manifests.value, manifests.key, manifests.key, manifests.many, manifests.text, manifests.text,
    manifests.bomb, _weights_header, _weights_header, _weights_metadata, _weights_bytes, _module, _module, _module, _hooks,
)  # fmt: skip


# --- the file system --------------------------------------------------------------------------------------


def _some_file(rng: Random, directory: Path) -> Path:
    names = sorted(path.name for path in directory.iterdir())
    return directory / rng.choice(
        (*names, "extra", "model.mlir", "weights.safetensors", "model.py", "manifest.yaml")
    )


def _special(rng: Random, directory: Path) -> None:
    """Replace a file by something that is not a file, or add many folders."""
    path = _some_file(rng, directory)
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):  # Making a device node may not be allowed.
        match rng.randrange(9):
            case 0:
                os.mkfifo(path)
            case 1:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.bind(str(path))
            case 2:
                os.mknod(path, 0o20600, os.makedev(1, 5))  # /dev/zero.
            case 3:
                path.mkdir()
            case 4:
                path.symlink_to(
                    rng.choice(
                        ("/dev/zero", "/etc/passwd", "/proc/self/mem", "..", ".", path.name, "nowhere")
                    )
                )
            case 5:
                path.symlink_to(directory / "manifest.yaml")
            case 6:
                deep = directory / "deep"
                for _ in range(rng.choice((40, 600))):
                    deep /= "d"
                deep.mkdir(parents=True)
            case 7:
                for i in range(rng.choice((50, 12_000))):
                    (directory / f"file{i}").touch()
            case _:
                (directory / "folders").mkdir()
                for i in range(rng.choice((50, 12_000))):
                    (directory / "folders" / str(i)).mkdir()


def _sparse(rng: Random, directory: Path) -> None:
    """Make a file huge and sparse."""
    path = _some_file(rng, directory)
    with contextlib.suppress(OSError), path.open("ab") as file:
        size = rng.choice((2**31 + 5, 2**40, 2**43))
        if path.name == "weights.safetensors" and rng.random() < 0.7:
            # Write a header that fits a weight of this size.
            file.truncate(0)
            header = {
                "__metadata__": {"argument_order": '["w"]'},
                "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
            }
            file.write(safetensors_bytes(header))
            size += file.tell()
        os.truncate(path, size)


_OF_FILES: tuple[Callable[[Random, Path], None], ...] = (_special, _special, _special, _sparse)


if __name__ == "__main__":
    from tests.builders import compiled_before

    with compiled_before():
        _export(Path(sys.argv[1]))
