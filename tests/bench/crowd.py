"""Clients in a separate process. They check every answer, and continue after a failed request.

`python -m tests.bench.crowd` asks all models of a file of questions. Some models are more popular than others, and the popularity
may change over time. The process prints `asking` when each client has an answer of each model. At its end, it writes a file with
all later requests: their starts and ends, by a clock that all processes of the machine share, and their outcomes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

from tests.bench.load import BenchFailed
from tests.bench.places import ROOT
from tests.bench.verify import check

Array = npt.NDArray[Any]

OK, WRONG = "OK", "WRONG"
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
#: Time limit of a request, and shortest pause of a client after a failed request. Both are seconds.
_DEADLINE, _PAUSE = 20.0, 0.01


def popularity(models: int, exponent: float) -> Array:
    """Return each model's share of the requests, starting with the most popular model.

    The shares follow Zipf's law, 1 / rank ** exponent.
    """
    shares = np.arange(1, models + 1, dtype=np.float64) ** -exponent
    return np.asarray(shares / shares.sum())


@dataclass(frozen=True)
class Questions:
    """Rows to send and the right answers for each model, starting with the most popular model. All arrays are [questions, width]."""

    sent: Mapping[str, Array]
    wanted: Mapping[str, Array]

    def save(self, file: Path) -> None:
        arrays: Mapping[str, Any] = {
            f"{kind} {name}": array
            for kind, arrays in (("sent", self.sent), ("wanted", self.wanted))
            for name, array in arrays.items()
        }
        np.savez(file, **arrays)

    @classmethod
    def load(cls, file: Path) -> Questions:
        with np.load(file) as stored:
            kinds = {
                kind: {key.partition(" ")[2]: stored[key] for key in stored.files if key.startswith(kind)}
                for kind in ("sent", "wanted")
            }
        return cls(kinds["sent"], kinds["wanted"])


@dataclass(frozen=True)
class Requests:
    """The outcomes of all requests. Arrays have one element for each request. Times are seconds of time.monotonic()."""

    began: Array
    ended: Array
    #: Name of the gRPC status, or WRONG.
    code: Array

    def failed(self) -> Counter[str]:
        """Return the numbers of failures by code. Wrong answers are not included."""
        bad = self.code[(self.code != OK) & (self.code != WRONG)]
        return Counter(map(str, bad))

    @property
    def wrong(self) -> int:
        return int((self.code == WRONG).sum())

    def between(self, begin: float, end: float) -> Requests:
        """Return the requests that ended in this interval."""
        inside = (self.ended >= begin) & (self.ended < end)
        return Requests(self.began[inside], self.ended[inside], self.code[inside])

    def p99_ms(self) -> float:
        """Return the 99th percentile of the answered requests, or NaN if there are none."""
        answered = self.code == OK
        taken = (self.ended - self.began)[answered]
        return float(np.percentile(taken, 99) * 1e3) if taken.size else float("nan")


@dataclass
class Asking:
    """The clients that `asking` runs. After the end of its block, `requests` has the outcomes of their requests."""

    process: subprocess.Popen[str]
    requests: Requests | None = None


@contextmanager
def asking(
    url: str,
    questions: Path,
    *,
    clients: int,
    seconds: float,
    exponent: float = 1.1,
    turn_s: float = inf,
    pause_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Asking]:
    """Run clients for `seconds` during the block. Raises BenchFailed.

    The models' popularity follows Zipf's law with this exponent. Every `turn_s` seconds, the popularity moves to the next models.
    A client pauses for `pause_s` after an answer.
    """
    output = questions.with_name("asked.npz")
    output.unlink(missing_ok=True)
    numbers = (clients, seconds, exponent, turn_s, pause_s, seed)
    words = [url, str(questions), *map(str, numbers), str(output)]
    command = [sys.executable, "-m", "tests.bench.crowd", *words]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "asking\n":
            raise BenchFailed(f"the clients did not start:\n{process.communicate()[1][-2000:]}")
        running = Asking(process)
        yield running
        _, complaint = process.communicate(timeout=seconds + 2 * _DEADLINE)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise BenchFailed(f"the clients exited with status {process.returncode}:\n{complaint[-2000:]}")
    with np.load(output) as stored:
        running.requests = Requests(stored["began"], stored["ended"], stored["code"])


def main(arguments: Sequence[str]) -> None:
    """Run the clients in this process."""
    url, file, clients, seconds, exponent, turn_s, pause_s, seed, output = arguments
    questions = Questions.load(Path(file))
    crowd = _Crowd(url, questions, float(exponent), float(turn_s), float(pause_s), int(seed))
    records = asyncio.run(crowd.run(int(clients), float(seconds)))
    began, ended, code = zip(*records, strict=True)
    np.savez(output, began=np.array(began), ended=np.array(ended), code=np.array(code))


class _Crowd:
    def __init__(
        self, url: str, questions: Questions, exponent: float, turn_s: float, pause_s: float, seed: int
    ) -> None:
        self._url = url
        self._questions = questions
        self._models = list(questions.sent)
        self._shares = np.cumsum(popularity(len(self._models), exponent))
        self._turn_s = turn_s
        self._pause_s = pause_s
        self._seed = seed
        #: Requests by model. They are made before the measurement.
        self._requests = {
            model: [_request(model, row) for row in rows] for model, rows in questions.sent.items()
        }
        self._begin = time.monotonic()

    async def run(self, clients: int, seconds: float) -> list[tuple[float, float, str]]:
        calls = [self._call(number) for number in range(clients)]
        for call in calls:
            for model in self._models:
                if await self._ask(call, model, 0) != OK:
                    raise BenchFailed(f"{model} does not answer, or its answers are wrong")
        print("asking", flush=True)
        self._begin = time.monotonic()
        end = self._begin + seconds
        by_client = await asyncio.gather(*[self._client(n, call, end) for n, call in enumerate(calls)])
        return [record for client in by_client for record in client]

    def _call(self, number: int) -> Any:
        # Channels with equal options share one connection. The number makes the options of each channel different.
        channel = grpc.aio.insecure_channel(self._url, options=[("rsrv.client", number)])
        return channel.unary_unary(_METHOD)

    async def _client(self, number: int, call: Any, end: float) -> list[tuple[float, float, str]]:
        rng = np.random.default_rng([self._seed, number])
        records = []
        while (began := time.monotonic()) < end:
            rank = int(np.searchsorted(self._shares, rng.random()))
            turn = int((began - self._begin) / self._turn_s)
            model = self._models[(rank + turn) % len(self._models)]
            code = await self._ask(call, model, int(rng.integers(len(self._requests[model]))))
            records.append((began, time.monotonic(), code))
            await asyncio.sleep(self._pause_s if code == OK else max(self._pause_s, _PAUSE))
        return records

    async def _ask(self, call: Any, model: str, number: int) -> str:
        try:
            data = await call(self._requests[model][number], timeout=_DEADLINE)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        answer = service_pb2.ModelInferResponse.FromString(data)
        expected = self._questions.wanted[model][number : number + 1]
        try:
            check(model, np.frombuffer(answer.raw_output_contents[0], np.float32)[None], expected)
        except BenchFailed:
            return WRONG
        return OK


def _request(model: str, row: Array) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, len(row)])
    request.raw_input_contents.append(np.ascontiguousarray(row, np.float32).tobytes())
    return bytes(request.SerializeToString())


if __name__ == "__main__":
    main(sys.argv[1:])
