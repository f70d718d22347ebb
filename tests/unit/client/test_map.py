"""A data set through the client: each row is answered once, in order, with bounded memory, whatever the server does."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from rsrv.client import AsyncClient, Client, InputError, Outputs, RequestError
from rsrv.client.retries import Code
from rsrv.client.transport import AttemptFailed
from tests.unit.client.fake_server import CONFIG, FakeServer
from tests.waiting import PATIENCE_S

TEXTS = {**CONFIG, "input": [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}]}
FULL = AttemptFailed(Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] full; retry after 0 ms")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    made = FakeServer()
    monkeypatch.setattr("rsrv.client.client.connect", lambda *_: made)
    return made


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client("localhost:1") as made:
        yield made
    assert server.closed


@pytest.mark.parametrize("seed", range(10))
def test_each_row_is_answered_once_and_in_order(server: FakeServer, client: Client, seed: int) -> None:
    """Although answers come in any order and a third of the attempts fails, each row gets its own answer, in the order of the rows."""
    chance = random.Random(seed)

    async def before(_: int, values: list[Any]) -> None:
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        if chance.random() < 1 / 3:
            raise FULL

    server.before = before
    rows = np.arange(1001)
    assert [(i, int(row["y"][0])) for i, row in client.map("m", rows)] == [(i, 2 * i) for i in range(1001)]
    server.requests.clear()
    results = [(i, int(row["y"][0])) for i, row in client.map("m", rows, ordered=False)]
    assert sorted(results) == [(i, 2 * i) for i in range(1001)]
    assert len({tuple(request) for request in server.requests}) == 251


@pytest.mark.parametrize(
    "rows",
    [
        list(range(10)),
        iter(range(10)),
        ({"x": i} for i in range(10)),
        {"x": list(range(10))},
        np.arange(10)[:, None],
        pd.DataFrame({"x": range(10)}),
    ],
    ids=["list", "iterator", "mappings", "columns", "array", "frame"],
)
def test_rows_come_in_many_forms(client: Client, rows: Any) -> None:
    """Lists, iterators, columns, arrays and data frames with the same rows give the same answers."""
    np.testing.assert_array_equal(client.map("m", rows).arrays()["y"], 2 * np.arange(10)[:, None])


def test_texts_files_and_pictures_are_rows(server: FakeServer, client: Client, tmp_path: Path) -> None:
    """A model that takes strings gets texts as UTF-8, files as their bytes, and pictures as PNG."""
    server.configuration = TEXTS
    (tmp_path / "a.jpg").write_bytes(b"12345")
    rows = ["häuser", b"\0\1", tmp_path / "a.jpg", Image.new("RGB", (3, 3))]
    answers = [int(row["y"][0]) for _, row in client.map("m", rows)]
    assert answers[:3] == [7, 2, 5]
    assert server.requests[0][3].startswith(b"\x89PNG")
    assert [int(row["y"][0]) for _, row in client.map("m", {"text": rows[3:]})] == answers[3:]


def test_a_request_has_as_many_files_as_their_bytes_allow(
    server: FakeServer, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a request counts the contents of files, and not their paths."""
    monkeypatch.setattr("rsrv.client.rows.REQUEST_BYTES", 1000)
    server.configuration = TEXTS
    for number in range(4):
        (tmp_path / str(number)).write_bytes(bytes(500))
    assert client.map("m", tmp_path).arrays()["y"].reshape(-1).tolist() == [500] * 4
    assert sorted(map(len, server.requests)) == [2, 2]


def test_a_task_names_inputs_outputs_and_labels(server: FakeServer, client: Client) -> None:
    """The roles of a task are valid names of the model's tensors. `labels` returns the label of each row's highest score."""
    task = {
        "kind": "text-classification",
        "inputs": {"text": "x"},
        "outputs": {"scores": "y"},
        "labels": ["no", "yes"],
    }
    tensor = {"name": "x", "data_type": "TYPE_INT64", "dims": [2]}
    server.configuration = {
        **CONFIG,
        "input": [tensor],
        "parameters": {"task": {"string_value": json.dumps(task)}},
    }
    answer = client.infer("m", text=[[1, 2], [4, 3]])
    assert answer["scores"].tolist() == [[2, 4], [8, 6]]
    assert answer.labels() == ["yes", "no"]
    with pytest.raises(KeyError, match="entities"):
        answer["entities"]
    assert [row.labels() for _, row in client.map("m", {"text": [[1, 2], [4, 3]]})] == [["yes"], ["no"]]


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".parquet"])
def test_a_file_is_a_data_set(client: Client, tmp_path: Path, suffix: str) -> None:
    """The path of a file is accepted in place of the rows in the file."""
    path = tmp_path / f"rows{suffix}"
    if suffix == ".npy":
        np.save(path, np.arange(10))
    elif suffix == ".npz":
        np.savez(path, x=np.arange(10))
    else:
        pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
        pd.DataFrame({"x": range(10)}).to_parquet(path)
    np.testing.assert_array_equal(client.map("m", path).arrays()["y"], 2 * np.arange(10)[:, None])


def test_lines_and_the_files_of_a_folder_are_rows(server: FakeServer, client: Client, tmp_path: Path) -> None:
    """In a .txt file, each line is a row, including a last line without a newline.

    In a folder, each file is a row, in the order of names.
    """
    server.configuration = TEXTS
    (tmp_path / "lines.txt").write_text("a\nb\fcd\r\n\n")
    (tmp_path / "open.txt").write_text("a\nbc")
    (tmp_path / "folder").mkdir()
    for name, size in (("b", 5), ("a", 4)):
        (tmp_path / "folder" / name).write_bytes(b"x" * size)
    for rows, expected in (("lines.txt", [1, 4, 0]), ("open.txt", [1, 2]), ("folder", [4, 5])):
        assert client.map("m", tmp_path / rows).arrays()["y"].reshape(-1).tolist() == expected


def test_rows_of_several_lengths_share_no_request(server: FakeServer, client: Client) -> None:
    """Successive rows of one shape share a request. A row of another shape begins a new request."""
    server.configuration = {**CONFIG, "input": [{"name": "x", "data_type": "TYPE_INT64", "dims": [-1]}]}
    answers = [row["y"].tolist() for _, row in client.map("m", [[1, 2], [3, 4], [5], [6, 7]])]
    assert answers == [[2, 4], [6, 8], [10], [12, 14]]
    assert [len(request) for request in server.requests] == [4, 1, 2]


def test_a_model_without_an_axis_of_rows_gets_a_row_per_request(server: FakeServer, client: Client) -> None:
    """If a model has no batch axis, each row is a request of its own, and the answers are stacked."""
    server.configuration = {**CONFIG, "max_batch_size": 0}
    assert client.map("m", np.arange(3)[:, None]).arrays()["y"].tolist() == [[0], [2], [4]]


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([1, 2, "three"], "row 2: input x: expected int64"),
        ({"x": np.zeros((5, 1), np.float32)}, "rows 0 to 3: input x: expected int64, got float32"),
        ([{"y": 1}], "row 0: m has no input 'y'"),
        (Path("rows.csv"), "rows.csv: expected a file .npy, .npz, .txt or .parquet, or a folder"),
    ],
)
def test_wrong_rows_are_named(client: Client, rows: Any, error: str) -> None:
    """The error says which rows do not fit, and why."""
    with pytest.raises(InputError, match=error):
        list(client.map("m", rows))


def test_rows_before_the_first_one_are_left_out(server: FakeServer, client: Client) -> None:
    """`first_row` skips the rows before it if the rows are given in columns. With an iterable of rows, it is refused."""
    rows = np.arange(11)
    assert [number for number, _ in client.map("m", rows, first_row=5)] == [5, 6, 7, 8, 9, 10]
    assert server.requests == [[5, 6, 7, 8], [9, 10]]
    with pytest.raises(InputError, match="needs rows in columns"):
        client.map("m", iter(rows), first_row=1).arrays()


def test_rows_of_sequences_are_refused(server: FakeServer, client: Client) -> None:
    """A model with state is refused, because its rows would depend on each other."""
    server.configuration = {**CONFIG, "sequence_batching": {}}
    with pytest.raises(InputError, match="keeps state"):
        list(client.map("m", [1]))


def test_another_requests_failure_does_not_make_a_served_model_unknown(server: FakeServer) -> None:
    """A restarting server does not know the model for a while.

    The client retries a request in that time, even if another request for the model fails.
    """

    async def before(number: int, values: list[Any]) -> None:
        if values == [7]:
            raise AttemptFailed(Code.INTERNAL, "a hook raised")
        if number < 4:
            raise AttemptFailed(Code.NOT_FOUND, "Request for unknown model: 'm' is not found")

    server.before = before

    async def scenario() -> None:
        async with AsyncClient("localhost:1") as client:
            failed, answer = await asyncio.gather(
                client.infer("m", x=[7]), client.infer("m", x=[8]), return_exceptions=True
            )
            assert isinstance(failed, RequestError)
            assert isinstance(answer, dict)
            assert answer["y"].tolist() == [[16]]

    asyncio.run(scenario())


def test_attempts_share_one_deadline_and_one_copy(server: FakeServer, client: Client) -> None:
    """Each attempt of a request has less time than the attempt before, and all attempts send data that was encoded once."""

    async def before(number: int, _: list[Any]) -> None:
        if number < 4:
            raise FULL

    server.before = before
    assert client.infer("m", x=[4], timeout_s=200)["y"].tolist() == [[8]]
    assert server.encoded == 1
    assert len(server.timeouts) == 4
    assert 200 > server.timeouts[0] > server.timeouts[1] > server.timeouts[2] > server.timeouts[3] > 0


def test_a_failure_names_its_rows_and_cancels_the_rest(server: FakeServer, client: Client) -> None:
    """The first failure that cannot be retried ends the data set, names its rows, and cancels all requests in flight."""

    async def before(_: int, values: list[Any]) -> None:
        if 9 in values:
            raise AttemptFailed(Code.INTERNAL, "a hook raised")
        await asyncio.Event().wait()

    server.before = before
    with pytest.raises(RequestError, match="rows 8 to 11: m: a hook raised") as error:
        list(client.map("m", np.arange(1000)))
    assert error.value.rows == (8, 12)
    assert server.in_flight == 0


def test_the_first_row_that_is_late_bounds_the_others(server: FakeServer) -> None:
    """While the first answer is missing, a bounded number of later rows is sent. All rows are answered in the end."""

    async def scenario() -> None:
        release = asyncio.Event()
        stalled = asyncio.Event()

        async def before(number: int, values: list[Any]) -> None:
            if 0 in values:
                await release.wait()
            elif len(server.requests) >= 4 * 2:
                stalled.set()

        server.before = before
        read = count()
        async with AsyncClient("localhost:1") as client:
            results = client.map("m", ({"x": next(read)} for _ in range(4000)), in_flight=2)
            first = asyncio.ensure_future(anext(results.batches()))
            await stalled.wait()
            for _ in range(1000):
                await asyncio.sleep(0)
            assert len(server.requests) < 20
            assert server.most_in_flight == 2
            release.set()
            assert (await first).start == 0
            assert [answered.start async for answered in results.batches()] == list(range(4, 4000, 4))

    asyncio.run(scenario())


def test_the_bytes_of_waiting_answers_are_bounded(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first answer is missing, few later rows are sent if their answers are large."""
    monkeypatch.setattr("rsrv.client.client.HELD_BYTES", 5 * 4 * 8)

    async def scenario() -> None:
        release = asyncio.Event()

        async def before(_: int, values: list[Any]) -> None:
            if 0 in values:
                await release.wait()

        server.before = before
        async with AsyncClient("localhost:1") as client:
            answers = client.map("m", np.arange(400), in_flight=20).batches()
            first = asyncio.ensure_future(anext(answers))
            for _ in range(1000):
                await asyncio.sleep(0)
            assert len(server.requests) == 5
            release.set()
            starts = [(await first).start] + [answered.start async for answered in answers]
        assert starts == list(range(0, 400, 4))

    asyncio.run(scenario())


def test_unordered_answers_wait_for_no_other_answer(server: FakeServer) -> None:
    """With ordered=False, later answers are returned while the first one is missing, and the client stores few of them."""

    async def scenario() -> None:
        release = asyncio.Event()

        async def before(_: int, values: list[Any]) -> None:
            if 0 in values:
                await release.wait()

        server.before = before
        read = count()
        starts = []
        async with AsyncClient("localhost:1") as client, asyncio.timeout(PATIENCE_S):
            rows = ({"x": next(read)} for _ in range(4000))
            async for answered in client.map("m", rows, in_flight=3, ordered=False).batches():
                starts.append(answered.start)
                if len(starts) % 100 == 0:
                    gc.collect()
                    assert sum(isinstance(thing, Outputs) for thing in gc.get_objects()) < 10
                    assert len(server.requests) < len(starts) + 10
                if len(starts) == 999:
                    release.set()
        assert starts.pop() == 0
        assert sorted(starts) == [*range(4, 4000, 4)]

    asyncio.run(scenario())


def test_a_slow_source_holds_back_no_answer(client: Client) -> None:
    """If the source of rows is slow, the caller gets answers before the source has the next row."""
    answered = threading.Event()

    def rows() -> Iterator[int]:
        yield from range(4)
        assert answered.wait(PATIENCE_S)
        yield 4

    numbers = []
    for number, _ in client.map("m", rows()):
        answered.set()
        numbers.append(number)
    assert numbers == [0, 1, 2, 3, 4]


def test_answers_come_before_the_error_of_their_source(server: FakeServer) -> None:
    """If the source of rows fails while a request is in flight, the caller first gets the answers to the rows that were sent."""

    async def scenario() -> None:
        failed = asyncio.Event()

        async def before(_: int, values: list[Any]) -> None:
            if 0 in values:
                await failed.wait()
                for _ in range(10):
                    await asyncio.sleep(0)

        async def rows() -> AsyncIterator[int]:
            for row in range(8):
                yield row
            failed.set()
            raise OSError("the disk is gone")

        server.before = before
        async with AsyncClient("localhost:1") as client:
            answers = aiter(client.map("m", rows()))
            assert [int((await anext(answers))[1]["y"][0]) for _ in range(8)] == [2 * row for row in range(8)]
            with pytest.raises(OSError, match="the disk is gone"):
                await anext(answers)

    asyncio.run(scenario())


def test_an_asynchronous_source_is_a_data_set(server: FakeServer) -> None:
    """Rows of an asynchronous source are read on the client's own loop, and answers arrive while the source waits."""

    async def scenario() -> None:
        answered = asyncio.Event()

        async def rows() -> AsyncIterator[int]:
            for row in range(4):
                yield row
            async with asyncio.timeout(PATIENCE_S):
                await answered.wait()
            yield 4

        async with AsyncClient("localhost:1") as client:
            values = []
            async for _, row in client.map("m", rows()):
                answered.set()
                values.append(int(row["y"][0]))
        assert values == [0, 2, 4, 6, 8]
        assert server.requests == [[0, 1, 2, 3], [4]]

    asyncio.run(scenario())


def test_a_reader_that_stops_leaves_nothing_in_flight(server: FakeServer, client: Client) -> None:
    """If the caller stops reading answers, the requests in flight are cancelled."""

    async def before(number: int, values: list[Any]) -> None:
        if number > 1:
            await asyncio.Event().wait()

    server.before = before
    for number, _ in client.map("m", iter(range(1000))):
        assert number == 0
        break
    assert server.in_flight == 0


def test_ctrl_c_ends_a_data_set(server: FakeServer, client: Client) -> None:
    """After Ctrl-C, KeyboardInterrupt reaches the caller, and no request stays in flight."""

    async def before(number: int, _: list[Any]) -> None:
        if number == 4:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.Event().wait()

    server.before = before
    with pytest.raises(KeyboardInterrupt):
        next(client.map("m", iter(range(1000))).batches())
    assert server.in_flight == 0


def test_a_client_that_is_closed_ends_the_calls_of_other_threads(server: FakeServer) -> None:
    """If the client is closed while another thread's call waits for its next attempt, the call ends."""
    client, called = Client("localhost:1"), threading.Event()

    async def before(number: int, _: list[Any]) -> None:
        called.set()
        raise AttemptFailed(Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] full; retry after 30000 ms")

    server.before = before
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.infer, "m", x=np.zeros((1, 1), np.int64))
        called.wait()
        client.close()
        with pytest.raises(CancelledError):
            call.result(60)


def test_no_request_in_flight_is_refused(client: Client) -> None:
    """in_flight=0 is refused, because no row would ever be sent."""
    with pytest.raises(InputError, match="in_flight is 0, but must be at least 1"):
        client.map("m", range(10), in_flight=0).arrays()
