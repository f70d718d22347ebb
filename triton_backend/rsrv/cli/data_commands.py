"""The commands of a client: `rsrv infer` and `rsrv map` send files, and `rsrv doctor --url` tries shared memory."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rsrv.extras import install_command
from rsrv.progress import steps
from rsrv.text import os_error


def run(options: argparse.Namespace) -> int:
    """Carry out the command, and return the exit status."""
    prog = options.parser.prog
    try:
        from rsrv.client import Client, InputError, RequestError
    except ModuleNotFoundError as error:
        print(f"{prog}: {error.name} is not installed; run {install_command('client')}", file=sys.stderr)
        return 1
    try:
        headers = {}
        if token_file := getattr(options, "token_file", None):
            headers["authorization"] = f"Bearer {token_file.read_text().strip()}"
        timeout_s, authorities = getattr(options, "timeout", 60.0), getattr(options, "tls_ca", None)
        with Client(
            options.url, timeout_s=timeout_s, headers=headers, root_certificates=authorities
        ) as client:
            return {"infer": _infer, "map": _map, "doctor": _doctor}[options.command](client, options)
    except (InputError, RequestError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{prog}: {os_error(error)}", file=sys.stderr)
    return 1


def _doctor(client: Any, options: argparse.Namespace) -> int:
    """Print the transport of large requests from here to the server, and the reason for it."""
    transport = client.probe()
    if getattr(options, "json", False):
        print(json.dumps({"url": options.url, "transport": transport}))
    else:
        print(f"large requests from here to {options.url}: {transport}")
        if "is restricted" in transport:  # Triton's words for an API that needs a key
            print("  do:  start the server with `rsrv serve --client-shm`")
    return int("no connection" in transport or "no answer" in transport)


def _infer(client: Any, options: argparse.Namespace) -> int:
    """Send one request, and print or write its outputs."""
    signature = client.signature(options.model)
    inputs = {}
    for name, text in options.inputs:
        tensor = signature.inputs.get(signature.task.inputs.get(name, name))
        inputs[name] = _value(text, tensor is not None and tensor.datatype == "BYTES")
    parameters = {name: _scalar(text) for name, text in options.parameter}
    if signature.streams:
        _stream(client.stream(options.model, inputs, parameters=parameters), signature, options)
        return 0
    outputs = client.infer(options.model, inputs, parameters=parameters)
    if options.out is not None:
        _write(options.out, outputs)
    elif options.json:
        _print_json(outputs)
    else:
        _print(outputs)
        if signature.task.labels:
            print(f"label  {', '.join(outputs.labels())}")
    return 0


def _stream(answers: Iterable[dict[str, Any]], signature: Any, options: argparse.Namespace) -> None:
    """Print each answer when it arrives, or write all of them to a file. A text is printed as it is."""
    import numpy as np

    pieces: dict[str, list[Any]] = {}
    #: First output. A model that generates text returns the text in this output.
    first = next(iter(signature.outputs.values()))
    is_line_open = False
    try:
        for answer in answers:
            if options.out is not None:
                for name, array in answer.items():
                    pieces.setdefault(name, []).append(array)
                continue
            if options.json:
                _print_json(answer)
                continue
            if first.datatype == "BYTES" and first.name in answer:
                print("".join(_plain(answer.pop(first.name)).flat), end="", flush=True)
                is_line_open = True
            if answer:
                if is_line_open:
                    print()
                _print(answer)
                is_line_open = False
    finally:
        if is_line_open:
            print()
    if options.out is not None:
        _write(options.out, {name: np.concatenate(arrays) for name, arrays in pieces.items()})


def _print(outputs: dict[str, Any]) -> None:
    import numpy as np

    for name, array in outputs.items():
        shape = "x".join(map(str, array.shape))
        print(f"{name}  {_plain(array).dtype.name if array.dtype != object else 'strings'} {shape}")
        print(np.array2string(_plain(array), threshold=100), flush=True)


def _print_json(outputs: dict[str, Any]) -> None:
    print(json.dumps({name: _plain(array).tolist() for name, array in outputs.items()}), flush=True)


def _write(path: Path, outputs: dict[str, Any]) -> None:
    import numpy as np

    with path.open("wb") as file:
        np.savez(file, **{name: _plain(array) for name, array in outputs.items()})


def _scalar(text: str) -> bool | int | float | str:
    """Return the value of a parameter: a number, true or false, or else the text."""
    with suppress(ValueError):
        if isinstance(value := json.loads(text), (bool, int, float)):
            return value
    return text


def _value(text: str, is_text: bool) -> Any:
    """Return the value of an argument: a file's array or bytes, a text, or numbers in JSON."""
    import numpy as np

    path = Path(text)
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r", allow_pickle=False)
    if is_text:
        return path.read_bytes() if path.is_file() else text
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a file .npy nor numbers, such as [[1, 2], [3, 4]]") from None


def _plain(array: Any) -> Any:
    """Return an array with strings as texts. Bytes that are not UTF-8 are escaped."""
    import numpy as np

    if array.dtype == object:
        return np.array([value.decode(errors="backslashreplace") for value in array.flat], str).reshape(
            array.shape
        )
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _map(client: Any, options: argparse.Namespace) -> int:
    """Send all rows of a file, and write the answers to another one."""
    from rsrv.client import saving
    from rsrv.client.rows import columns_of

    signature = client.signature(options.model)
    outputs = saving.outputs_of(signature, options.out, options.output)
    columns = columns_of(signature, options.rows)
    assert columns is not None
    rows = len(next(iter(columns.values())))
    status = os.stat(options.rows)
    job = {
        "model": options.model,
        "signature": repr(signature),
        "input": [str(options.rows), status.st_size, status.st_mtime_ns],
        "outputs": [spec.name for spec in outputs],
    }
    partial_path = options.out.with_suffix(".partial")
    with saving.PartialFile(partial_path, job, outputs, resume=options.resume) as partial:
        left = rows - partial.rows
        results = client.map(
            options.model,
            columns,
            rows_per_request=options.rows_per_request,
            in_flight=options.in_flight,
            first_row=partial.rows,
        )
        started = time.monotonic()
        try:
            with steps(options.model, rows) as progress:
                progress.step(count=partial.rows)
                for answered in results.batches():
                    partial.append(answered)
                    progress.step(count=answered.stop - answered.start)
        except BaseException:
            print(
                f"{partial.rows} of {rows} rows are in {partial_path}; --resume continues with the remaining rows",
                file=sys.stderr,
            )
            raise
        saving.write(partial, options.out)
    seconds = time.monotonic() - started
    speed = f" at {left / seconds:.0f} rows/s" if left else ""
    print(
        f"{rows} rows in {options.out}: {left} sent in {seconds:.1f} s{speed}; transport: {client.transport}"
    )
    return 0
