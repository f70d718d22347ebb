"""Answers of one stream in the order of its requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque

from hypothesis import given
from hypothesis import strategies as st

from rsrv_gateway.stream_order import HELD_BYTES, Answers, Place
from tests.unit.gateway.workers import looped


class Client:
    """What it was sent."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.writing = False
        self.answers = Answers(self.write)

    async def write(self, answer: bytes) -> None:
        assert not self.writing
        self.writing = True
        await asyncio.sleep(0)
        self.writing = False
        self.got.append(answer)


@looped
async def test_an_answer_that_came_too_soon() -> None:
    """It is written after the earlier one."""
    client = Client()
    first, second = client.answers.expect(), client.answers.expect()

    await client.answers.put(second, b"2")
    assert client.got == []
    await client.answers.put(first, b"1")
    assert client.got == [b"1", b"2"]


@looped
async def test_an_answer_that_will_not_come() -> None:
    """Once it is given up, the next ones are written."""
    client = Client()
    first, second, third = (client.answers.expect() for _ in range(3))
    await client.answers.put(third, b"3")
    await client.answers.put(second, b"")
    await client.answers.give_up([first])

    assert client.got == [b"", b"3"]


@looped
async def test_an_answer_without_a_place() -> None:
    """It is written at once."""
    client = Client()
    client.answers.expect()
    await client.answers.put(None, b"free")

    assert client.got == [b"free"]


@looped
async def test_too_much_is_held() -> None:
    """Who gave more than may be held is asked for no more until that is written; whose turn it is, never waits."""
    client = Client()
    first, second, third = (client.answers.expect() for _ in range(3))
    large = b"2" * (HELD_BYTES + 1)
    given_away = asyncio.create_task(client.answers.put(second, large))
    while second.written is None:
        await asyncio.sleep(0)
    other = asyncio.create_task(client.answers.put(third, b"3"))
    while third.written is None:
        await asyncio.sleep(0)
    assert not given_away.done()

    await client.answers.put(first, b"1")
    await asyncio.gather(given_away, other)
    assert client.got == [b"1", large, b"3"]


@given(
    owners=st.lists(st.integers(0, 3), max_size=30),
    given_up=st.sets(st.integers(0, 29)),
    size=st.sampled_from([1, HELD_BYTES // 3, HELD_BYTES + 1]),
    turns=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_any_number_of_givers(owners: list[int], given_up: set[int], size: int, turns: list[int]) -> None:
    """However fast each of several givers is, all that they give is written, in order, and nobody waits for ever."""

    async def run() -> None:
        client = Client()
        mine: dict[int, deque[tuple[int, Place]]] = defaultdict(deque)
        for number, owner in enumerate(owners):
            mine[owner].append((number, client.answers.expect()))

        async def give(owner: int) -> None:
            for number, place in mine[owner]:
                for _ in range(turns[owner]):
                    await asyncio.sleep(0)
                if number in given_up:
                    await client.answers.give_up([place])
                else:
                    await client.answers.put(place, bytes([number]) * size)

        await asyncio.gather(*map(give, range(4)))
        assert [each[0] for each in client.got] == [n for n in range(len(owners)) if n not in given_up]

    asyncio.run(asyncio.wait_for(run(), 30))
