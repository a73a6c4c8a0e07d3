"""One generation at a time: pages stand in line for the model, and each is told how many are before it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class Turns:
    """First come, first served. A page that leaves the line, waiting or not, lets the others move up."""

    def __init__(self) -> None:
        self._line: list[object] = []
        self._moved = asyncio.Event()

    @property
    def length(self) -> int:
        """Pages in line, the one whose turn it is included."""
        return len(self._line)

    @asynccontextmanager
    async def mine(self, tell: Callable[[int], Awaitable[None]]) -> AsyncIterator[None]:
        """Wait for the turn and hold it. `tell` is called with the number of pages before this one, when it changes."""
        place = object()
        self._line.append(place)
        try:
            while (before := self._line.index(place)) > 0:
                moved = self._moved
                await tell(before)
                await moved.wait()
            yield
        finally:
            self._line.remove(place)
            self._moved.set()
            self._moved = asyncio.Event()
