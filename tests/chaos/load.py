"""Clients that ask continuously, check every answer, and report the outcome of each request.

`python -m tests.chaos.load GRPC_URL HTTP_URL SEED CLIENTS...` runs them in another process, so that their cost is not counted as
the server's. The process writes a line of JSON for each request. It ends at the end of its input.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.chaos.figures import RIGHT, STRIKE, UNANSWERED, WRONG, Record
from tests.chaos.questions import QUESTIONS, Question
from tests.e2e.calls import Array, output_names, tensors
from tests.e2e.harness import ROOT
from tests.waiting import wait_until

#: Seconds that a client waits for an answer.
PATIENCE = 15.0
_LIBRARIES: Mapping[str, ModuleType] = {"grpc": tritonclient.grpc, "http": tritonclient.http}
#: Names of Triton's error codes, by HTTP status.
_CODES = {"400": "INVALID_ARGUMENT", "404": "NOT_FOUND", "500": "INTERNAL", "503": "UNAVAILABLE"}


class Client(NamedTuple):
    """A client that sends one request after the other. It pauses for `pause` seconds between a request's end and the next request."""

    model: str
    protocol: str
    pause: float
    #: Seconds that the client waits for an answer.
    patience: float = PATIENCE

    def __str__(self) -> str:
        return f"{self.model}/{self.protocol}/{self.pause:g}/{self.patience:g}"

    @classmethod
    def parse(cls, text: str) -> Client:
        model, protocol, pause, patience = text.split("/")
        return cls(model, protocol, float(pause), float(patience))


def clients(
    model: str, *, grpc: int = 0, http: int = 0, pause: float, patience: float = PATIENCE
) -> list[Client]:
    return [Client(model, "grpc", pause, patience)] * grpc + [Client(model, "http", pause, patience)] * http


class Connection:
    """A client's connection. After a failure, it is opened again. Only one thread may use it."""

    def __init__(self, protocol: str, url: str, patience: float = PATIENCE) -> None:
        self._protocol = protocol
        self._url = url
        self._patience = patience
        self._library = _LIBRARIES[protocol]
        self._client: Any = None

    def ask(self, model: str, question: Question) -> tuple[str, str]:
        """Send a request. Return its outcome, and the text of its error."""
        if self._client is None:
            waits = {"network_timeout": self._patience} if self._protocol == "http" else {}
            self._client = self._library.InferenceServerClient(self._url, **waits)
        options = {"client_timeout": self._patience} if self._protocol == "grpc" else {}
        try:
            answer = self._client.infer(model, tensors(self._library, question.inputs), **options)
            names = output_names(answer)
            return _compared({name: answer.as_numpy(name) for name in names}, question.wanted), ""
        except InferenceServerException as error:
            outcome, detail = _refused(error)
            if outcome in (UNANSWERED, BROKEN):
                self.close()
            return outcome, detail
        except TimeoutError as error:
            self.close()
            return UNANSWERED, repr(error)
        except Exception as error:  # noqa: BLE001 - the HTTP library's own, of many kinds
            self.close()
            return BROKEN, repr(error)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                client.close()


def ask_at_once(
    url: str, model: str, questions: Sequence[Question], patience: float = PATIENCE
) -> list[Record]:
    """Send all questions over gRPC without waiting for answers. Return records with the name `model`."""
    records: list[Record] = []
    answered = threading.Semaphore(0)
    with tritonclient.grpc.InferenceServerClient(url) as client:
        for question in questions:

            def note(
                result: Any, error: Any, question: Question = question, sent: float = time.monotonic()
            ) -> None:
                if error is None:
                    names = output_names(result)
                    outcome, detail = _compared({n: result.as_numpy(n) for n in names}, question.wanted), ""
                else:
                    outcome, detail = _refused(error)
                detail = f"{question.model}: {detail}"[:200]
                records.append(Record(model, STRIKE, sent, time.monotonic(), outcome, detail))
                answered.release()

            inputs = tensors(tritonclient.grpc, question.inputs)
            client.async_infer(question.model, inputs, note, client_timeout=patience)
        for _ in questions:
            assert answered.acquire(timeout=patience + PATIENCE), (
                "a request got neither an answer nor its deadline's error"
            )
    return records


def _refused(error: InferenceServerException) -> tuple[str, str]:
    return _code(str(error.status()), str(error.message())), str(error.message())


#: Outcome of a request whose connection broke or could not be opened.
BROKEN = "no connection"


def _code(status: str, message: str) -> str:
    """Return the name of an error: Triton's code, followed by rsrv's code if the text has one."""
    status = status.removeprefix("StatusCode.")
    if status == "DEADLINE_EXCEEDED":
        return UNANSWERED
    code = _CODES.get(status, status)
    if message.startswith("[rsrv:"):
        return f"{code} {message[6:].partition(']')[0]}"
    if code == "UNAVAILABLE" and ("failed to connect" in message or "Socket closed" in message):
        return BROKEN
    return code


def _compared(got: Mapping[str, Array], expected: Mapping[str, Array]) -> str:
    same = set(got) == set(expected) and all(
        got[name].dtype == array.dtype and got[name].shape == array.shape and (got[name] == array).all()
        for name, array in expected.items()
    )
    return RIGHT if same else WRONG


# --- the process of the clients -----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    grpc_url, http_url, seed, *texts = arguments
    urls = {"grpc": grpc_url, "http": http_url}
    stop = threading.Event()
    lock = threading.Lock()

    def work(number: int, client: Client) -> None:
        rng = np.random.default_rng([int(seed), number])
        connection = Connection(client.protocol, urls[client.protocol], client.patience)
        while not stop.wait(client.pause):
            question = QUESTIONS[client.model](rng)
            sent = time.monotonic()
            outcome, detail = connection.ask(question.model or client.model, question)
            if question.model and outcome != RIGHT:
                detail = f"{question.model}: {detail}"
            record = Record(client.model, client.protocol, sent, time.monotonic(), outcome, detail[:200])
            with lock:
                print(json.dumps(record), flush=True)
            if outcome != RIGHT:
                # Like a real client, do not continue at once after an error.
                stop.wait(0.02)
        connection.close()

    threads = [threading.Thread(target=work, args=(n, Client.parse(text))) for n, text in enumerate(texts)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


# --- in the process that runs the tests ---------------------------------------------------------------------------


class Load:
    """A running load, and its records so far."""

    def __init__(self, process: subprocess.Popen[str], clients: Sequence[Client]) -> None:
        self._process = process
        self.models = frozenset(client.model for client in clients)
        self._patience = max(client.patience for client in clients)
        self.records: list[Record] = []
        self._beside: list[threading.Thread] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.records.append(Record(*json.loads(line)))

    def right_since(self, moment: float) -> set[str]:
        """Return the models whose last record since this moment is a right answer."""
        last: dict[str, Record] = {}
        for record in list(self.records):
            if record.ended > moment:
                last[record.model] = record
        return {name for name, record in last.items() if record.outcome == RIGHT}

    def beside(self, thread: threading.Thread) -> None:
        """Remember a running thread that may call `note`. `stop` waits for it."""
        self._beside.append(thread)

    def note(self, record: Record) -> None:
        """Add the record of a request that the load did not send, so that the request is judged with the load."""
        self.records.append(record)

    def wait_warm(self) -> None:
        began = time.monotonic()

        def warm() -> bool:
            assert self._process.poll() is None, "the clients ended"
            return self.right_since(began) >= self.models

        wait_until(warm, 60, what="right answers of all models")

    def stop(self) -> None:
        """Stop the load. Return when the last request has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE + self._patience)
        for thread in (self._reader, *self._beside):
            thread.join()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def load(grpc_url: str, http_url: str, load_clients: Sequence[Client], seed: int) -> Iterator[Load]:
    """Run clients during the block."""
    command = [
        sys.executable,
        "-m",
        "tests.chaos.load",
        grpc_url,
        http_url,
        str(seed),
        *map(str, load_clients),
    ]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    made = Load(process, load_clients)
    try:
        yield made
    finally:
        made.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
