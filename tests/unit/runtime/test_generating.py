"""Generations over the runtime's socket: tokens as they come, shared executions, and every way to end."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rsrv.runtime.device import DeviceError
from rsrv.wire.frames import Completion, Status, request_tag
from rsrv.wire.generation import Generate, pack_generate
from rsrv.wire.socket import Closed, send
from tests.runtime_commands import command
from tests.status import read_status
from tests.unit.bundle.forge import seal
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.counting import BROKEN, CONTEXT, MAX_TOKENS, count, expected, export_counting
from tests.unit.runtime.watchers import Operator
from tests.waiting import PATIENCE_S, wait_until


class Client:
    """A stub's connection that is registered and begins generations."""

    def __init__(self, runtime: Runtime, bundle: Path) -> None:
        self.runtime = runtime
        self.connection = runtime.connect()
        self.connection.register({"model": "counting", "bundle": str(bundle)})
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self._ends: dict[int, Completion] = {}

    def ask(self, prompt: Sequence[int], **more: object) -> int:
        """Begin a generation; return its number."""
        (number,) = self.connection.next_ids(1)
        wait_until(lambda: self.connection.reads)
        send(self.connection.sock, pack_generate(Generate(number, prompt, **more)))  # type: ignore[arg-type]
        return number

    def receive(self) -> None:
        for done in self.connection.receive(PATIENCE_S):
            self._ends[done.request] = done
        for request, token in self.connection.take_tokens():
            assert request not in self._ends, "a token after the end"
            self.tokens[request].append(token)

    def end(self, number: int) -> tuple[Status, str]:
        while number not in self._ends:
            self.receive()
        done = self._ends.pop(number)
        return done.status, done.text

    def generate(self, prompt: Sequence[int], **more: object) -> tuple[list[int], str]:
        number = self.ask(prompt, **more)
        status, text = self.end(number)
        assert status is Status.OK, text
        return self.tokens[number], text

    def wait_for(self, number: int, tokens: int) -> None:
        while len(self.tokens[number]) < tokens:
            self.receive()

    @property
    def active(self) -> int:
        return self.runtime.loop.stateful.generation_counts["counting"].active


Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_counting(tmp_path_factory.mktemp("bundles") / "counting")


@pytest.fixture
def connect(start_runtime: StartRuntime, bundle: Path) -> Iterator[Connect]:
    """Yield a function that connects clients. At the end, the runtime may have no generation, sequence or request left."""
    runtimes: list[Runtime] = []

    def start(runtime: Runtime | None = None, path: Path = bundle) -> Client:
        runtimes.append(runtime or start_runtime(compute=count))
        return Client(runtimes[-1], path)

    yield start
    for runtime in runtimes:
        runtime.device.gate.set()
        assert runtime.alive
        runtime.users.close()
    for runtime in runtimes:
        wait_until(partial(_nothing_is_left, runtime))


@pytest.fixture
def client(connect: Connect) -> Client:
    return connect()


def _nothing_is_left(runtime: Runtime) -> bool:
    stateful = runtime.loop.stateful
    return not (runtime.loop.unanswered.pending or stateful.generations or stateful.sequences)


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3], [5] * 8, [5] * 9, [2] * 20])
def test_an_answer_is_the_models(client: Client, prompt: list[int]) -> None:
    """Prompts are shorter than a chunk, as long as a chunk, or longer. Each answer ends at the limit or at a stop token."""
    tokens, reason = client.generate(prompt)

    assert tokens == expected(prompt)
    assert reason == ("length" if len(tokens) == MAX_TOKENS else "stop")


def test_a_full_context_ends_an_answer(client: Client) -> None:
    """The longest prompt leaves room for one token."""
    assert client.generate([1] * (CONTEXT - 1), stop=[]) == (expected([1] * (CONTEXT - 1)), "length")


def test_generations_share_executions(client: Client) -> None:
    """Running generations share their executions, even if one begins later. Each answer depends on its own prompt only."""
    client.runtime.device.gate.clear()
    first = client.ask([1], max_tokens=30, stop=[])
    client.runtime.device.gate.wait_until_held()
    prompts = {first: [1], **{client.ask([n], max_tokens=30, stop=[]): [n] for n in (2, 3, 4)}}
    warm = len(client.runtime.device.executed)
    client.runtime.device.gate.set()
    for number in prompts:
        assert client.end(number) == (Status.OK, "length")

    for number, prompt in prompts.items():
        total, answer = sum(prompt), client.tokens[number]
        for token in answer:
            assert token == total % 13 + 1
            total += token
        assert len(answer) == 30
    # Each of 30 executions serves all four generations. A few executions may precede the start of the last
    # generation.
    assert len(client.runtime.device.executed) - warm <= 30 + 3


def test_generations_share_executions_of_a_device_that_works_ahead(
    start_runtime: StartRuntime, connect: Connect
) -> None:
    """Generations that begin at different times share executions, even if the device has two executions at a time."""
    client = connect(start_runtime(compute=count, asynchronous=True))
    numbers = []
    for n in range(1, 5):
        numbers.append(client.ask([n], max_tokens=35, stop=[]))
        client.wait_for(numbers[-1], 2)
    before = len(client.runtime.device.executed)
    assert [client.end(number)[0] for number in numbers] == [Status.OK] * 4

    # The last generation needs 33 more tokens, and the others fewer.
    assert len(client.runtime.device.executed) - before <= 33


def test_a_prompt_that_comes_while_another_request_waits_is_read_in_short_chunks(
    start_runtime: StartRuntime, connect: Connect, bundle: Path
) -> None:
    """While another request waits, a prompt is read in short chunks from the first one on.

    A long chunk reads more tokens per second, but takes 0.7 s.
    """
    first = start_runtime(compute=count)
    Client(first, bundle).connection.close()
    (key,) = first.device.costs
    first.stop()
    lengths = []

    def note(inputs: Any, weights: Any) -> Any:
        lengths.append(inputs[0].shape[1])
        return count(inputs, weights)

    second = start_runtime(compute=note)
    second.device.costs = {key: {(0, 1): 0.1, (0, 4): 0.1, (1, 1): 0.7, (1, 4): 0.7}}
    client = connect(second)
    other = held(client)
    number = client.ask([1] * 8, max_tokens=2)
    operate("ping")
    second.device.gate.set()

    assert client.end(number) == (Status.OK, "length")
    assert client.end(other) == (Status.OK, "length")
    assert set(lengths) == {1}


def test_more_generations_than_slots_wait_for_one(client: Client) -> None:
    """More generations than slots wait for a slot, and each gets its answer.

    A slot keeps nothing of its former generation.
    """
    numbers = {client.ask([n], max_tokens=5): [n] for n in range(1, 30)}

    for number, prompt in numbers.items():
        client.end(number)
        assert client.tokens[number] == expected(prompt, 5)
    counts, answers = read_status(os.getpid())["models"]["counting"], [client.tokens[n] for n in numbers]
    assert (counts["generations"], counts["tokens"]["prompt"]) == (0, 29)
    assert counts["tokens"]["answer"] == sum(map(len, answers))
    begun = sum(bool(answer) for answer in answers)
    assert sum(counts["first_token"]["counts"]) == begun
    sums = counts["generated"]
    assert (sums["answers"], sums["tokens_in"], sums["tokens_out"]) == (begun, begun, sum(map(len, answers)))
    assert (sums["first_token_s"], sums["token_s"]) == (
        counts["first_token"]["sum"],
        counts["between_tokens"]["sum"],
    )


def test_a_version_that_does_not_generate_shows_no_answers(client: Client, tmp_path: Path) -> None:
    """If a model's next version only keeps state, the status does not show the sums of the version that generated."""
    client.generate([1])
    following = export_counting(tmp_path / "counting")
    manifest = json.loads((following / "manifest.yaml").read_text())
    del manifest["generate"]
    (following / "manifest.yaml").write_text(json.dumps(manifest))
    other = client.runtime.connect()
    other.register({"model": "counting", "bundle": str(seal(following))})
    client.connection.close()

    wait_until(lambda: read_status(os.getpid())["models"]["counting"]["generated"] == {})


def test_values_without_sense_are_refused(client: Client) -> None:
    """A generation with an invalid value fails, and the error names the value. The connection stays open."""
    status, reason = client.end(client.ask([1] * CONTEXT))

    assert status is Status.INVALID
    assert "1 to 39" in reason
    assert client.generate([3])[0] == expected([3])


def test_logits_that_are_not_finite_end_one_generation(client: Client) -> None:
    """A generation with logits that are not finite fails. Another generation in the same executions is answered."""
    good, bad = client.ask([3], max_tokens=5), client.ask([1] * 9 + [BROKEN])

    status, text = client.end(bad)
    assert status is Status.INTERNAL
    assert "not finite" in text
    assert client.end(good)[0] is Status.OK
    assert client.tokens[good] == expected([3], 5)
    assert not client.tokens[bad]


def held(client: Client, prompt: Sequence[int] = (1,), steps: int = 2, **more: object) -> int:
    """Begin a generation, let the device execute `steps` steps, and hold the next one.

    Executions of other requests are held as well.
    """
    client.runtime.device.gate.clear(after=steps)
    number = client.ask(list(prompt), **{"max_tokens": 30, "stop": [], **more})
    client.runtime.device.gate.wait_until_held()
    return number


def operate(name: str, **fields: object) -> dict[str, Any]:
    return command(os.getpid(), {"command": name, **fields})


def pause(client: Client, mode: str | None) -> None:
    with Operator(client.runtime) as operator:
        assert operator.pause("counting", mode) == {}


def test_a_cancelled_generation_ends_with_its_step(client: Client) -> None:
    """A cancelled generation ends after the step that is executing."""
    number = held(client)
    client.connection.cancel([number])
    operate("ping")
    client.runtime.device.gate.set()

    assert client.end(number)[0] is Status.CANCELLED
    assert client.tokens[number] == expected([1], 2)


def test_a_generation_that_waits_for_a_slot_is_cancelled_at_once(client: Client) -> None:
    """A generation that waits for a slot is cancelled at once, because it has neither a step nor a state."""
    running = [held(client, steps=0), *(client.ask([n], max_tokens=2) for n in range(1, 4))]
    waiting = client.ask([9])
    client.connection.cancel([waiting])

    assert client.end(waiting)[0] is Status.CANCELLED
    client.runtime.device.gate.set()
    assert [client.end(number)[0] for number in running] == [Status.OK] * 4


def test_an_operator_aborts_a_generation_by_its_clients_id(client: Client) -> None:
    """An operator aborts a generation by its client's id. It ends after its step, and one with another id continues."""
    number = held(client, tag=request_tag("mine"))
    other = client.ask([2], tag=request_tag("other"))
    aborted = operate("abort", request="mine")
    client.runtime.device.gate.set()

    assert aborted == {"aborted": 1, "executing": 0}
    assert client.end(number) == (Status.CANCELLED, "the request was aborted")
    assert client.end(other)[0] is Status.OK


def test_an_operator_finds_a_slow_step_by_its_number(client: Client) -> None:
    """An operator finds the slowest step of a generation, and then the same step by its number, which begins with "step."."""
    client.generate([1, 2, 3])
    (slowest, *_) = operate("slowest", model="counting")["requests"]
    assert slowest["number"].startswith("step.")
    assert operate("find", request=slowest["number"])["requests"] == [slowest]


def test_a_held_generation_stands_still_until_its_deadline(client: Client) -> None:
    """A generation that an operator holds continues after the pause. One whose deadline passes during the pause fails."""
    number, late = held(client), client.ask([2], deadline_ns=time.monotonic_ns() + 200_000_000)
    pause(client, "hold")
    client.runtime.device.gate.set()
    status, _ = client.end(late)
    steps = len(client.runtime.device.executed)
    pause(client, None)

    assert status is Status.DEADLINE
    assert client.end(number) == (Status.OK, "length")
    assert len(client.runtime.device.executed) - steps >= 20
    assert len(client.tokens[number]) == 30


def test_a_deadline_ends_a_generation_within_a_step(client: Client) -> None:
    """When its deadline passes, a generation ends after the step that is executing.

    The client keeps the tokens until then.
    """
    number = held(client, deadline_ns=time.monotonic_ns() + 10**12)
    client.runtime.pass_time(2000.0)
    client.runtime.device.gate.set()

    assert client.end(number) == (
        Status.DEADLINE,
        "the deadline passed; 3 tokens of the answer were sent before",
    )
    assert len(client.tokens[number]) == 3


def test_generations_go_on_while_a_model_drains(client: Client) -> None:
    """While a model drains, its generations continue, and a new one is refused."""
    number = held(client)
    pause(client, "drain")
    late = client.ask([2])
    assert client.end(late)[0] is Status.PAUSED
    client.runtime.device.gate.set()

    assert client.end(number) == (Status.OK, "length")
    assert len(client.tokens[number]) == 30
    pause(client, None)


def test_a_model_that_rejects_ends_its_generations(client: Client) -> None:
    """If an operator rejects requests for a model, its generations end after the step that is executing."""
    number = held(client)
    pause(client, "reject")
    client.runtime.device.gate.set()

    assert client.end(number)[0] is Status.PAUSED
    assert len(client.tokens[number]) == 3
    pause(client, None)


def test_a_failed_execution_ends_its_generations(client: Client) -> None:
    """A failed execution ends its generations, because their state is lost. A new generation is served."""
    number = held(client)
    client.runtime.device.fail_next("launch", error=DeviceError("told to"))
    client.runtime.device.gate.set()

    text = "the model failed to execute; the server's log says why"
    assert client.end(number) == (Status.INTERNAL, text)
    assert client.generate([3])[0] == expected([3])


def test_a_closed_connection_ends_its_generations(client: Client, connect: Connect) -> None:
    """When a connection closes, its running and waiting generations end. Those of other connections continue."""
    other = connect(client.runtime)
    number = held(client, steps=1)
    for n in range(6):
        other.ask([n], max_tokens=30, stop=[])
    wait_until(lambda: len(client.runtime.loop.stateful.generations) == 7)
    other.connection.close()
    client.runtime.device.gate.set()

    assert client.end(number) == (Status.OK, "length")
    counts = client.runtime.loop.stateful.generation_counts["counting"]
    wait_until(lambda: counts.active == 0)


def test_a_client_that_reads_nothing_is_disconnected(
    client: Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not read its tokens is disconnected when too many wait, and its generations end."""
    monkeypatch.setattr("rsrv.runtime.transport._MAX_BACKLOG", 50)
    other = connect(client.runtime)

    def ask_on() -> None:
        for n in range(100_000):
            other.ask([n % 7 + 1], max_tokens=30, stop=[])
            if n % 10 == 9:
                wait_until(lambda: not client.runtime.loop.stateful.generations)

    with pytest.raises(Closed):
        ask_on()
    assert client.generate([3])[0] == expected([3])


def test_a_second_generation_of_one_number_breaks_the_protocol(client: Client, connect: Connect) -> None:
    """Two generations with the same number break the protocol, because their tokens could not be distinguished."""
    other = connect(client.runtime)
    client.runtime.device.gate.clear()
    for _ in range(2):
        send(other.connection.sock, pack_generate(Generate(7, [1])))
    with pytest.raises(Closed):
        other.end(7)


def test_generations_are_for_models_that_generate(start_runtime: StartRuntime, doubling: Path) -> None:
    """A stub that begins a generation on a model that does not generate loses its connection."""
    connection = start_runtime().connect()
    connection.register({"model": "doubling", "bundle": str(doubling)})
    send(connection.sock, pack_generate(Generate(1, [1])))

    with pytest.raises(Closed):
        connection.receive(PATIENCE_S)


def test_an_unloaded_version_ends_its_generations_last(
    client: Client, connect: Connect, tmp_path: Path
) -> None:
    """While generations of an old version continue, the new version serves.

    The old version leaves after the last of them.
    """
    number = held(client)
    new = export_counting(tmp_path / "new", slots=5)
    client.runtime.device.gate.set()
    newer = connect(client.runtime, new)

    assert newer.generate([3])[0] == expected([3])
    assert client.end(number) == (Status.OK, "length")


def test_when_full_refuses(start_runtime: StartRuntime, connect: Connect, tmp_path: Path) -> None:
    """With `when_full: refuse`, a generation without a free slot fails with QUEUE_FULL, and the error names the slots."""
    runtime = start_runtime(compute=count)
    client = connect(runtime, export_counting(tmp_path / "counting", when_full="refuse"))
    numbers = [held(client, steps=0), *(client.ask([n]) for n in range(3))]
    status, text = client.end(client.ask([2]))
    runtime.device.gate.set()

    assert status is Status.QUEUE_FULL
    assert "slots" in text
    assert all(client.end(number)[0] is Status.OK for number in numbers)
