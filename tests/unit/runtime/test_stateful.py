"""Models with state in a runtime: steps of sequences are sent over the socket to the scheduler and the executor."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from rsrv.runtime import host_copies
from rsrv.runtime.device import Array, DeviceError
from rsrv.runtime.sequences import LOST
from rsrv.settings import load_settings
from rsrv.stub.connection import Rejected
from rsrv.wire.frames import END, START, Kind, Status, pack_ids
from rsrv.wire.socket import send
from rsrv_bundle.spec import WhenFull
from tests.builders import add_to_sums, export_sums, write_meta
from tests.runtime_commands import command
from tests.sequence_client import SequenceClient
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartRuntime, double
from tests.unit.runtime.watchers import Operator
from tests.waiting import wait_until


class Client(SequenceClient):
    """A client of `export_sums`, whose connection is closed at the end of the test."""

    def __init__(self, runtime: Runtime, bundle: Path) -> None:
        super().__init__(runtime.open(), bundle)
        runtime.users.callback(self.connection.close)

    def ask(self, id: int, flags: int = 0, value: float = 1.0, **changes: int) -> int:
        return self.send(id, flags, np.full(3, value, np.float32), **changes)

    def sums(self, number: int) -> tuple[float, int]:
        """Return the sum and the number of steps of a sequence, from the answer to a request."""
        _, (total, steps) = self.answer(number)
        assert total[0] == total[1] == total[2]
        return float(total[0]) - 1, int(steps)

    def step(self, id: int, flags: int = 0, value: float = 1.0) -> tuple[float, int]:
        return self.sums(self.ask(id, flags, value))

    def refused(self, id: int, flags: int = 0, **changes: int) -> tuple[Status, str]:
        done = self.end(self.ask(id, flags, **changes))
        return done.status, done.text


def counts() -> dict[str, int]:
    """Return the number of sequences by state."""
    numbers: dict[str, int] = read_status(os.getpid())["models"]["sums"]["sequences"]
    return numbers


StartClient = Callable[..., Client]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("bundles")

    def bundle(when_full: WhenFull = "wait", idle_timeout_s: float = 60.0) -> Path:
        path = folder / f"{when_full}{idle_timeout_s}" / "sums"
        if not path.exists():
            export_sums(path, when_full=when_full, idle_timeout_s=idle_timeout_s)
        return path

    return bundle


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime(compute=compute)


def compute(inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    """Compute what the models of this module compute, with and without state."""
    return double(inputs, weights) if len(inputs) == 1 else add_to_sums(inputs, weights)


@pytest.fixture
def start_client(runtime: Runtime, bundles: Callable[..., Path]) -> StartClient:
    def start(*kind: object) -> Client:
        client = Client(runtime, bundles(*kind))
        assert client.stateful
        return client

    return start


def test_a_sequence_remembers_what_came_before(start_client: StartClient) -> None:
    """Each step continues its sequence. After its end a sequence is unknown, and a new start begins at zero."""
    client = start_client()
    assert [client.step(7, START), client.step(7), client.step(8, START, 5.0), client.step(7)] == [
        (1.0, 1), (2.0, 2), (5.0, 1), (3.0, 3),
    ]  # fmt: skip
    assert client.step(7, END, 4.0) == (7.0, 4)
    assert client.refused(7) == (Status.SEQUENCE_LOST, LOST)
    assert client.step(7, START) == (1.0, 1)
    assert client.step(8) == (6.0, 2)


def test_the_record_has_the_sequences_and_the_memory_of_their_state(start_client: StartClient) -> None:
    """The status has the number of sequences by state, and the memory of their states.

    On the device, states count as a part of the model's weights.
    """
    client = start_client("host")
    for id in range(1, 6):
        client.step(id, START)
    sums = read_status(os.getpid())["models"]["sums"]
    assert sums["sequences"] == {"waiting": 0, "idle": 3, "stepping": 0, "stored": 2}
    assert sums["generations"] == 0
    assert sums["state_bytes"] == 3 * (12 + 4)
    assert sums["device_bytes"] == sums["weight_bytes"] == 12 + sums["state_bytes"]


def test_steps_of_several_sequences_share_an_execution(runtime: Runtime, start_client: StartClient) -> None:
    """Steps of several sequences that wait for the device are executed together, each on its own state."""
    client = start_client()
    for id in (1, 2, 3):
        client.step(id, START, float(id))
    executed = len(runtime.device.executed)
    runtime.device.gate.clear()
    first = client.ask(1)
    runtime.device.gate.wait_until_held()
    others = [client.ask(id, 0, 10.0 * id) for id in (3, 2)]
    wait_until(lambda: read_status(os.getpid())["models"]["sums"]["queued"] == 2)
    runtime.device.gate.set()
    assert [client.sums(number) for number in (first, *others)] == [(2.0, 2), (33.0, 2), (22.0, 2)]
    assert runtime.device.executed[executed:] == [1, 3]


def test_a_start_waits_for_a_slot_until_it_is_cancelled_or_granted(start_client: StartClient) -> None:
    """With three slots, a fourth sequence begins when another one ends. A waiting start can be cancelled."""
    client = start_client()
    for id in (1, 2, 3):
        client.step(id, START)
    fourth, fifth, sixth = (client.ask(id, START, 4.0) for id in (4, 5, 6))
    send(client.connection.sock, pack_ids(Kind.CANCEL, [fourth]))
    assert client.end(fourth).status is Status.CANCELLED
    client.step(2, END)
    assert client.sums(fifth) == (4.0, 1)
    client.step(5, END)
    assert client.sums(sixth) == (4.0, 1)
    assert client.step(1) == (2.0, 2)


def test_a_start_that_waits_too_long_ends_at_its_deadline(start_client: StartClient) -> None:
    """A start that waits for a slot ends at its deadline, although the scheduler has not received it yet."""
    client = start_client()
    for id in (1, 2, 3):
        client.step(id, START)
    assert client.refused(4, START, deadline_ns=1)[0] is Status.DEADLINE


def test_idle_sequences_expire(start_client: StartClient) -> None:
    """If a sequence is idle for its timeout, a waiting start gets its slot, without another request."""
    client = start_client("wait", 0.2)
    for id in (1, 2, 3):
        client.step(id, START)
    assert client.sums(client.ask(4, START, 4.0)) == (4.0, 1)
    assert client.refused(1)[0] is Status.SEQUENCE_LOST


def test_a_failed_execution_ends_the_sequences(runtime: Runtime, start_client: StartClient) -> None:
    """A failed execution loses the state of all sequences of the model.

    Queued steps fail, and new sequences begin at zero.
    """
    client = start_client()
    for id in (1, 2):
        client.step(id, START)
    runtime.device.gate.clear()
    failing = client.ask(1)
    runtime.device.gate.wait_until_held()
    queued = client.ask(2)
    wait_until(lambda: read_status(os.getpid())["models"]["sums"]["queued"] == 1)
    runtime.device.fail_next("read", error=DeviceError("told to"))
    runtime.device.gate.set()
    completion = client.end(failing)
    assert (completion.status, "Its sequence has ended; start it again" in completion.text) == (
        Status.INTERNAL,
        True,
    )
    lost = client.end(queued)
    assert lost.status is Status.SEQUENCE_LOST
    assert "an execution of this model failed, and the state of all its sequences was lost" in lost.text
    history = command(os.getpid(), {"command": "history", "model": "sums"})
    assert "told to; the state of 2 sequences of the model was lost" in str(history)
    assert [client.refused(id)[0] for id in (1, 2)] == [Status.SEQUENCE_LOST] * 2
    assert [client.step(id, START) for id in (1, 2, 3)] == [(1.0, 1)] * 3


def test_a_closed_connection_gives_its_slots_back(start_client: StartClient) -> None:
    """When a connection closes, its sequences end, and their slots are free."""
    gone, client = start_client(), start_client()
    for id in (1, 2, 3):
        gone.step(id, START)
    waiting = client.ask(4, START)
    gone.connection.close()
    assert client.sums(waiting) == (1.0, 1)
    assert client.refused(1)[0] is Status.SEQUENCE_LOST


def test_sequences_end_by_themselves_while_a_model_drains(
    runtime: Runtime, start_client: StartClient
) -> None:
    """While a model drains, its sequences continue until they end. New sequences are refused."""
    client = start_client()
    operator = Operator(runtime)
    client.step(1, START)
    operator.pause("sums", "drain")
    assert client.refused(2, START)[0] is Status.PAUSED
    assert [client.step(1), client.step(1, END)] == [(2.0, 2), (3.0, 3)]
    operator.pause("sums", None)
    operator.close()
    assert client.step(2, START) == (1.0, 1)


@pytest.fixture
def start_five(
    start_runtime: StartRuntime,
    bundles: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Runtime, Client]]:
    """Return a function that starts a runtime with a client.

    The model has three slots of 16 bytes. The client starts five sequences, so two states are stored on the host. The runtime
    checks host memory often.
    """

    def start(settings: str = "") -> tuple[Runtime, Client]:
        monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
        runtime = start_runtime(load_settings(settings), compute=compute)
        client = Client(runtime, bundles("host"))
        for id in (1, 2, 3, 4, 5):
            client.step(id, START)
        return runtime, client

    return start


def test_state_leaves_a_host_that_is_short_of_memory(
    start_five: Callable[..., tuple[Runtime, Client]],
) -> None:
    """States on the host may not exceed `runtime.host_memory_bytes`.

    If they do, the sequence that was idle the longest ends.
    """
    _, client = start_five("runtime: {host_memory_bytes: 30}")
    wait_until(lambda: counts()["stored"] == 1)
    assert client.refused(1)[0] is Status.SEQUENCE_LOST
    assert [client.step(id) for id in (3, 4, 5)] == [(2.0, 2)] * 3


def test_state_leaves_a_full_host_while_models_leave_for_want_of_mappings(
    start_five: Callable[..., tuple[Runtime, Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States on the host are limited even while models fall back because memory mappings are few.

    Models that fall back for this reason free no memory for states.
    """
    monkeypatch.setattr("rsrv.runtime.weight_mover.spare_mappings", lambda: (0, 1000))
    monkeypatch.setattr("rsrv.runtime.registry.Registry.relieve", lambda *_: True)
    runtime, _ = start_five("runtime: {host_memory_bytes: 30}")
    wait_until(lambda: counts()["stored"] == 1)
    copies = runtime.loop._weights.copies
    wait_until(
        lambda: (
            copies.shortage is not None
            and copies.shortage.reason == "the runtime has few memory mappings left"
        )
    )


def test_state_stays_where_memory_is_not_plentiful_again(
    start_five: Callable[..., tuple[Runtime, Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end only while memory is scarce. Host copies, in contrast, are dropped until twice as much is free.

    If sequences also ended in that case, they would end for days while other processes use this memory.
    """
    spare, reads = 8 << 30, 0

    def read() -> int:
        nonlocal reads
        reads += 1
        return spare

    monkeypatch.setattr("rsrv.runtime.host_memory.total_memory", lambda: 16 << 30)
    monkeypatch.setattr("rsrv.runtime.weight_mover.spare_memory", read)
    runtime, client = start_five()
    spare = 512 << 20
    wait_until(lambda: counts()["stored"] == 0 and runtime.loop._weights.copies.is_short)

    spare, seen = 1536 << 20, reads
    wait_until(lambda: reads > seen + 2)
    for id in (6, 7):
        client.step(id, START)
    seen = reads
    wait_until(lambda: reads > seen + 10)

    assert counts()["stored"] == 2
    assert client.step(3) == (2.0, 2)


def test_a_meta_model_cannot_call_a_model_with_state(
    runtime: Runtime, bundles: Callable[..., Path], tmp_path: Path
) -> None:
    """A meta model cannot call a model with state, because its calls belong to no sequence. The registration is rejected."""
    meta = write_meta(tmp_path / "meta", "def run(inputs, call): ...", ["sums"])
    with pytest.raises(Rejected, match="'sums' keeps state for sequences, so it cannot be called"):
        runtime.connect().register({"model": "meta", "bundle": str(meta), "calls": {"sums": str(bundles())}})


def test_state_survives_depth(start_runtime: StartRuntime, bundles: Callable[..., Path]) -> None:
    """With two executions in flight, each execution uses the states that the previous one has computed."""
    runtime = start_runtime(load_settings("scheduler: {depth: 2}"), compute=add_to_sums, asynchronous=True)
    client = Client(runtime, bundles())
    for id in (1, 2, 3):
        client.step(id, START)
    for round in range(2, 30):
        numbers = [client.ask(id) for id in (1, 2, 3)]
        assert [client.sums(number) for number in numbers] == [(float(round), round)] * 3


def test_models_that_evict_each_other_keep_their_sequences(
    start_runtime: StartRuntime, bundles: Callable[..., Path], tmp_path: Path
) -> None:
    """With memory for one of two models, each step evicts the other model's pools. Each model finds its states again.

    The models differ only in their names, so they share their weights. They do not share their state.
    """
    settings = load_settings("runtime: {weight_budget_bytes: 70}")
    runtime = start_runtime(settings, compute=add_to_sums)
    for name in "ab":
        copytree(bundles("host"), tmp_path / name)
    clients = [Client(runtime, tmp_path / name) for name in "ab"]
    for client, value in zip(clients, (1.0, 100.0), strict=True):
        for id in range(1, 6):
            client.step(id, START, value * id)
    for round in range(2, 7):
        numbers = [
            (client, client.ask(id, 0, value * id), round * value * id)
            for id in range(1, 6)
            for client, value in zip(clients, (1.0, 100.0), strict=True)
        ]
        for client, number, total in numbers:
            assert client.sums(number) == (total, round)
    loads = [read_status(os.getpid())["models"][name]["loads"] for name in "ab"]
    assert min(loads) > 3, "they took turns on the device"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_thousand_sequences_leave_slots_and_memory_as_they_were(
    start_client: StartClient, runtime: Runtime
) -> None:
    """Ten thousand sequences end, end twice, are cancelled, or are abandoned with their connection.

    Then all slots are free, and the process has as much memory as before.
    """

    def thousand(number: int) -> None:
        client = start_client("host")
        for id in range(1 + 1000 * number, 1001 + 1000 * number):
            assert client.step(id, START, 2.0) == (2.0, 1)
            match id % 4:
                case 0:
                    assert client.step(id, END) == (3.0, 2)
                    assert client.refused(id, END)[0] is Status.SEQUENCE_LOST
                case 1:
                    waiting = client.ask(id)
                    client.connection.cancel([waiting])
                    client.end(waiting)
        client.connection.close()
        wait_until(lambda: not runtime.loop.stateful.sequences and not runtime.device.resident)

    thousand(0)
    before = _rss()
    for number in range(1, 10):
        thousand(number)
    assert _rss() - before < 8 << 20
    client = start_client("host")
    assert [client.step(id, START) for id in (1, 2, 3)] == [(1.0, 1)] * 3


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
