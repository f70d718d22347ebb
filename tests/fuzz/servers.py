"""A real server and a gateway in front of it get bad and honest requests. Both survive, and answer the honest requests right."""

from __future__ import annotations

import contextlib
import io
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import psutil
import tritonclient.grpc

from rsrv.settings import Front
from rsrv.wire.socket import Closed
from rsrv_gen import cli as rsrv_gen
from tests.chaos import bundles
from tests.chaos.figures import RIGHT, Record
from tests.chaos.house import INTERNAL
from tests.chaos.load import Connection, clients, load
from tests.chaos.questions import QUESTIONS
from tests.e2e import bundles as test_bundles
from tests.e2e import stateful
from tests.e2e.gateways import entry, running_gateway
from tests.e2e.harness import crashed_by_a_cancellation, is_alive, running_triton
from tests.fuzz.noise import Noise
from tests.fuzz.requests import MODELS, STATEFUL, STRINGS, Attack, make
from tests.fuzz.sending import PATIENCE, Answer, Ports, Sender
from tests.fuzz.watched import Verdict
from tests.status import read_status

#: Number of bad requests between two checks of the servers, and number of threads that send them.
_BATCH, _TOGETHER = 16, 4
#: Seconds between two requests of an honest client.
_PAUSE = 0.1
#: Largest message in bytes that the gateway accepts. Some bad requests are larger.
_MESSAGE = 1 << 20
#: Settings with the address of a collector that does not exist, so that trace contexts of clients are read.
_SETTINGS = "traces: {endpoint: 'http://127.0.0.1:9'}\n"
#: Flags of tritonserver from docs/security.md and docs/monitoring.md.
_FLAGS = (
    "--http-restricted-api=logging,trace:fuzz=nobody-knows",
    "--grpc-restricted-protocol=logging,trace:fuzz=nobody-knows",
    "--http-header-forward-pattern=(?i)traceparent",
    "--grpc-header-forward-pattern=(?i)traceparent",
)


def check_requests(seeds: Sequence[int], scratch: Path, *, front: Front = "python") -> Iterator[Verdict]:
    """Send a request for every seed, and print how honest requests ended.

    `front`: the front of the models that can have either front; the other models have the Python front. After the death of a
    process, or if a request is not answered, new servers are started for the next requests.
    """
    attacks = map(make, seeds)
    batch = list(itertools.islice(attacks, _BATCH))
    if batch:
        _generate(scratch, front)
    for number in itertools.count():
        if not batch:
            return
        folder = scratch / f"life{number}"
        folder.mkdir()
        with _Life(scratch / "gen", folder) as life:
            while batch and not life.over:
                verdicts, untried = life.strike(batch)
                batch = untried + list(itertools.islice(attacks, _BATCH - len(untried)))
                yield from verdicts
            yield from life.end()


def _generate(scratch: Path, front: Front) -> None:
    made = bundles.ensure()
    (scratch / "bundles").mkdir()
    for name in (*MODELS, *INTERNAL):
        (scratch / "bundles" / name).symlink_to(made[name])
    for name in STATEFUL:
        folder = stateful.ensure() if name == "sums" else stateful.ensure_brief()
        (scratch / "bundles" / name).symlink_to(folder / name)
    (scratch / "bundles" / STRINGS).symlink_to(test_bundles.ensure() / STRINGS)
    config = scratch / "rsrv.yaml"
    config.write_text(f"{_SETTINGS}stub: {{front: {front}}}\n")
    with contextlib.redirect_stdout(io.StringIO()):
        arguments = [str(scratch / "bundles"), "-o", str(scratch / "gen"), "--config", str(config)]
        assert rsrv_gen.main(arguments) == 0
    for name in ("exact", "elastic"):
        has_native = 'backend: "rsrv"' in (scratch / "gen" / name / "config.pbtxt").read_text()
        assert has_native == (front == "native")


class _Sent(NamedTuple):
    """A bad request with its outcome and its times, in seconds of the monotonic clock."""

    attack: Attack
    answer: Answer
    began: float
    ended: float

    def verdict(self) -> Verdict:
        detail = f"{self.described}: {self.answer.said[:300]}"
        return Verdict(self.attack.seed, self.answer.outcome, detail, self.ended - self.began)

    @property
    def described(self) -> str:
        where = "the gateway" if self.attack.gateway else "the server"
        return f"{'+'.join(self.attack.pieces)} to {where}'s {self.attack.protocol}"

    @property
    def lost(self) -> bool:
        """True if the outcome is one that a dead server causes."""
        unavailable = self.answer.said.startswith(("503", "UNAVAILABLE"))
        return self.answer.outcome in ("unanswered", "hang") or unavailable


class _Life:
    """A server with its gateway and honest clients. It is used until a process dies. It is a context manager."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self._stack = ExitStack()
        #: True if a process died or a request was not answered. Later requests then need other servers.
        self.over = False
        with self._stack:
            self._server = self._stack.enter_context(
                running_triton(repository, folder / "server.log", extra_args=_FLAGS, expected=None)
            )
            gateway = self._gateway = self._stack.enter_context(
                running_gateway(folder, [entry(self._server, "a")], max_message_bytes=_MESSAGE)
            )
            urls = [
                (self._server.server.grpc_url, self._server.server.http_url),
                (f"127.0.0.1:{gateway.grpc_port}", f"127.0.0.1:{gateway.http_port}"),
            ]
            honest = [client for model in MODELS for client in clients(model, grpc=1, http=1, pause=_PAUSE)]
            self._loads = [
                self._stack.enter_context(load(*both, honest, seed)) for seed, both in enumerate(urls)
            ]
            for group in self._loads:
                group.wait_warm()
            self._seen = [0 for _ in self._loads]
            self._witnesses = [Connection("grpc", grpc_url) for grpc_url, _ in urls]
            for witness in self._witnesses:
                self._stack.callback(witness.close)
            direct = Ports(self._server.http_port, self._server.grpc_port)
            through = Ports(gateway.http_port, gateway.grpc_port)
            self._sender = self._stack.enter_context(Sender(direct, through))
            self._pool = self._stack.enter_context(ThreadPoolExecutor(_TOGETHER))
            self._noise = Noise([self._server.log_path, folder / "gateway.log"])
            self._pids = self._processes()
            self._sent = 0
            self._before = "none"
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def strike(self, attacks: Sequence[Attack]) -> tuple[list[Verdict], list[Attack]]:
        """Send bad requests, and check the servers. Return the outcomes, and the requests that found no server."""
        sent = list(self._pool.map(self._send, attacks))
        self._sent += len(sent)
        if dead := self._dead():
            self.over = True
            return self._blame(sent, dead)
        first, last = attacks[0].seed, attacks[-1].seed
        self._before = f"seeds {first} to {last}"
        # If a request was not answered, others may also wait until the time limit.
        self.over = any(request.answer.outcome == "hang" for request in sent)
        problems = [("noise", problem) for problem in self._noise.told()]
        if not self.over:
            problems += [("harm", problem) for problem in self._harmed()]
        bad = [Verdict(first, outcome, f"during {self._before}: {problem}") for outcome, problem in problems]
        return [request.verdict() for request in sent] + bad, []

    def end(self) -> list[Verdict]:
        """Stop the honest clients, and print the totals. Return their last failures."""
        if self.over:
            return []
        for group in self._loads:
            group.stop()
        records = [record for group in self._loads for record in group.records]
        print(
            f"requests: {sum(record.outcome == RIGHT for record in records)} of {len(records)} honest requests among"
            f" {self._sent} bad ones were answered right; {self._noise}",
            flush=True,
        )
        return [Verdict(-1, "harm", f"at the end: {problem}") for problem in self._new_failures()]

    def _send(self, attack: Attack) -> _Sent:
        began = time.monotonic()
        answer = self._sender.send(attack)
        return _Sent(attack, answer, began, time.monotonic())

    def _blame(self, sent: Sequence[_Sent], dead: str) -> tuple[list[Verdict], list[Attack]]:
        """Blame the requests in flight when a process died.

        Return their verdicts, and the requests after the death, which were not tried.
        """
        if crashed_by_a_cancellation(self._server):
            return [], []  # A rare fault of Triton ended the server.
        died = min((request.ended for request in sent if request.lost), default=inf)
        tried = [request for request in sent if request.began <= died]
        blamed = [request for request in tried if request.lost or request.answer.outcome == "closed"] or tried
        verdicts = [
            Verdict(
                request.attack.seed,
                "crash",
                f"{dead} (before: {self._before}): {request.described}",
                request.ended - request.began,
            )
            if request in blamed
            else request.verdict()
            for request in tried
        ]
        return verdicts, [request.attack for request in sent if request.began > died]

    def _processes(self) -> dict[int, str]:
        """Return the pids of the processes that must survive, with their roles."""
        names = dict.fromkeys(self._server.stub_pids(), "a stub") | {self._server.pid: "tritonserver"}
        runtime = psutil.Process(read_status(self._server.pid)["pid"])
        gateway = psutil.Process(self._gateway.pid)
        for name, process in (("the runtime", runtime), ("the gateway", gateway)):
            names[process.pid] = name
            # The process that inspects modules may end, because it runs only while models are built.
            lasting = (
                child for child in process.children() if "rsrv_bundle.inspection" not in child.cmdline()
            )
            names |= {child.pid: f"a child of {name}" for child in lasting}
        return names

    def _dead(self) -> str:
        """Return a text about processes that died or are new, or an empty text."""
        gone = [what for pid, what in self._pids.items() if not is_alive(pid)]
        with contextlib.suppress(OSError, Closed, psutil.Error):
            if not gone and (new := set(self._processes()) - set(self._pids)):
                return f"{len(new)} processes are new"
        return f"died: {', '.join(dict.fromkeys(gone))}" if gone else ""

    def _harmed(self) -> list[str]:
        problems = self._new_failures()
        for where, witness in zip(("the server", "the gateway"), self._witnesses, strict=True):
            for model in MODELS:
                outcome, text = witness.ask(model, QUESTIONS[model](np.random.default_rng(self._sent)))
                if outcome != RIGHT:
                    problems.append(f"{where}: {model}: {outcome} {text}")
        problems += self._forgotten()
        if not self._server.server.is_ready() or self._gateway.get("/readyz")[0] != 200:
            problems.append("not ready")
        return problems

    def _forgotten(self) -> list[str]:
        """Send a sequence, strings and a generation after the bad requests. Return texts about wrong answers."""
        problems = []
        with tritonclient.grpc.InferenceServerClient(self._server.server.grpc_url) as client:
            tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
            sums = []
            for step in range(3):
                flags = {"sequence_start": step == 0, "sequence_end": step == 2}
                answer = client.infer(
                    "sums", [tensor], sequence_id=1000 + self._sent, client_timeout=PATIENCE, **flags
                )
                sums.append(float(answer.as_numpy("y")[0, 0]))
            texts = tritonclient.grpc.InferInput("text", [2, 1], "BYTES")
            texts.set_data_from_numpy(np.array([[b"four"], [b""]], object))
            labels = client.infer(STRINGS, [texts], client_timeout=PATIENCE).as_numpy("label")
            if labels.ravel().tolist() != [b"4 bytes", b"0 bytes"]:
                problems.append(f"strings have the lengths {labels}")
        if sums != [1, 2, 3]:
            problems.append(f"a sequence of ones has the sums {sums}")
        answer = stateful.generate(self._server, "brief", text_input="hello", max_tokens=20)
        if answer.get("text_output") != stateful.told(b"hello", 20):
            problems.append(f"a generation gets {answer}")
        return problems

    def _new_failures(self) -> list[str]:
        """Return the failures of the honest clients since the last call."""
        failed: list[Record] = []
        for index, group in enumerate(self._loads):
            records = group.records[self._seen[index] :]
            self._seen[index] += len(records)
            failed += [record for record in records if record.outcome != RIGHT]
        return [f"{record.model}/{record.protocol}: {record.outcome} {record.said}" for record in failed]
