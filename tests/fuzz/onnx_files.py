"""Every ONNX file, however bad, is traced or is refused with a text, within limits of time and memory.

A file may name huge sizes, so its tensors must not be made before it is checked.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from rsrv_bundle import BundleError
from tests.fuzz.watched import Verdict, watch

# jax starts threads, so modules that import jax are imported in the child process.

#: Limits in seconds and bytes for a file.
SECONDS = 15.0
NBYTES = 600 << 20
#: Sizes that break arithmetic, or that ask for much memory or for none.
_SIZES = (0, 1, -1, 2, 255, 2**16, 2**31, 2**40, 2**62, -(2**63))


def check_onnx(seeds: Sequence[int], scratch: Path) -> Iterator[Verdict]:
    """Damage a file for every seed, and trace it."""
    good: list[bytes] = []

    def case(seed: int) -> str:
        import jax

        from rsrv_bundle.onnx_import.evaluate import Evaluator
        from rsrv_bundle.onnx_import.model import read_model

        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            if not good:
                good.extend(_good(Path(folder)))
            path = Path(folder, "m.onnx")
            path.write_bytes(_damaged(random.Random(seed), good))
            try:
                with jax.enable_x64(True):
                    model = read_model(path)
                    evaluator = Evaluator(model)
                    jax.eval_shape(lambda inputs: evaluator(evaluator.weights, **inputs), _structs(model))
            except BundleError:
                return "refused"
            return "traced"

    yield from watch(case, seeds, seconds=SECONDS, nbytes=NBYTES)


def _good(folder: Path) -> list[bytes]:
    from tests.onnx_files import encoder, graph, write
    from tests.unit.bundle.test_onnx_operators import CASES

    files = [encoder(folder / "m.onnx").read_bytes()]
    for made, inputs, constants in CASES.values():
        shapes = {name: (array.dtype, array.shape) for name, array in inputs.items()}
        proto = graph([made], shapes, {}, constants)
        proto.output.extend(onnx.ValueInfoProto(name=output) for output in made.output if output)
        files.append(write(folder / "m.onnx", proto).read_bytes())
    return files


def _structs(model: Any) -> dict[str, Any]:
    import jax

    return {
        value.name: jax.ShapeDtypeStruct(
            tuple(size if isinstance(size, int) and size < 64 else 3 for size in value.dims or ()),
            value.dtype,
        )
        for value in model.inputs
    }


def _damaged(rng: random.Random, good: Sequence[bytes]) -> bytes:
    content = bytearray(rng.choice(good))
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(content))
            match rng.randrange(3):
                case 0:
                    content[at] = rng.randrange(256)
                case 1:
                    del content[at : at + rng.randrange(1, 40)]
                case _:
                    content[at:at] = content[at : at + rng.randrange(1, 40)]
            if not content:
                break
        return bytes(content)
    model = onnx.load_model_from_string(bytes(content))
    for _ in range(rng.choice((1, 1, 2, 4))):
        _break(rng, model.graph)
    return bytes(model.SerializeToString())


def _break(rng: random.Random, graph: Any) -> None:
    """Change values of a node or a graph, and keep the encoding of the file right."""
    node = rng.choice(graph.node)
    names = [name for entry in graph.node for name in (*entry.input, *entry.output)]
    match rng.randrange(6):
        case 0 if node.attribute:
            attribute = rng.choice(node.attribute)
            attribute.i = rng.choice(_SIZES)
            attribute.ints[:] = [rng.choice(_SIZES) for _ in attribute.ints]
        case 1 if graph.initializer:
            tensor = rng.choice(graph.initializer)
            tensor.dims[:] = [rng.choice(_SIZES) for _ in range(rng.randrange(4))]
        case 2 if graph.initializer:
            tensor = rng.choice(graph.initializer)
            tensor.raw_data = rng.randbytes(len(tensor.raw_data))
        case 3 if node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice(names)
        case 4:
            node.op_type = rng.choice(
                ("Loop", "Expand", "Tile", "Range", "ConstantOfShape", "Resize", "Pad", "Reshape", "Gather")
            )
        case _ if graph.input:
            dims = rng.choice(graph.input).type.tensor_type.shape.dim
            for dim in dims:
                dim.dim_value = rng.choice(_SIZES)
