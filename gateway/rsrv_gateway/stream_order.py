"""The answers of one stream in the order of their requests, as tritonserver writes them.

Only models that answer each request once can be waited for: answers of all others go on as they come.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

#: bytes of answers that may wait for earlier ones before no more are read of who has given them
HELD_BYTES = 4 << 20


class Place:
    """Of a request, among those of its stream."""

    __slots__ = ("answer", "over", "written")

    def __init__(self) -> None:
        #: while it is held
        self.answer: bytes | None = None
        #: whether there is nothing more to wait for
        self.over = False
        #: set when the answer is no longer held, if anybody waits for that
        self.written: asyncio.Future[None] | None = None


class Answers:
    """One event loop owns them; any number of tasks may put answers at the same time."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """`write` is never called before its last call has returned."""
        self._write = write
        self._writing = asyncio.Lock()
        #: of all requests that have to be answered in order, and are not
        self._places: deque[Place] = deque()
        self._held = 0

    def expect(self) -> Place:
        """For a request that comes after all others."""
        place = Place()
        self._places.append(place)
        return place

    async def put(self, place: Place | None, answer: bytes) -> None:
        """Writes it when it is its turn; None: at once.

        Returns when the giver may be asked for more: at once, or, where too much is held, when this one is written. Who
        gives in the order of the requests never waits for itself: nothing of the one whose turn it is, is held.
        """
        if place is None:
            async with self._writing:
                await self._write(answer)
            return
        place.answer, place.over = answer, True
        self._held += len(answer)
        await self._flush()
        if place.answer is not None and self._held > HELD_BYTES:
            place.written = asyncio.get_running_loop().create_future()
            await place.written

    async def give_up(self, places: Iterable[Place | None]) -> None:
        """No answer of these is waited for any more."""
        for place in places:
            if place is not None:
                place.over = True
        await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            while self._places and self._places[0].over:
                place = self._places.popleft()
                answer, place.answer = place.answer, None
                if answer is not None:
                    self._held -= len(answer)
                    await self._write(answer)
                if place.written is not None:
                    place.written.set_result(None)
