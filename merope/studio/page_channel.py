"""What a page is told: messages as JSON, pictures as bytes, in the order in which they were sent."""

import asyncio
import json
import struct

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

GENERATED, TRUE = 0, 1  # kinds of pictures
PICTURE_HEAD = struct.Struct(">BBI")  # kind, reel (0: the drive), frame; a JPEG follows


class PageChannel:
    """A page that is gone needs nothing: what is sent to it is lost, and `is_lost` says so."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket, self._sending = socket, asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._state: tuple[str, int] | None = None
        self.is_lost = False

    async def heard(self) -> str:
        """The next message of the page."""
        return await self._socket.receive_text()

    async def tell_state(self, state: str, before: int = 0) -> None:
        if self._state != (state, before):
            self._state = (state, before)
            await self.tell(say="state", state=state, before=before)

    async def tell(self, **message: object) -> None:
        await self._send(json.dumps(message, allow_nan=False))

    async def send_picture(self, kind: int, reel: int, frame: int, picture: bytes) -> None:
        await self._send(PICTURE_HEAD.pack(kind, reel, frame) + picture)

    def tell_from_thread(self, **message: object) -> None:
        asyncio.run_coroutine_threadsafe(self.tell(**message), self._loop)

    def send_picture_from_thread(self, kind: int, reel: int, frame: int, picture: bytes) -> None:
        asyncio.run_coroutine_threadsafe(self.send_picture(kind, reel, frame, picture), self._loop)

    async def _send(self, content: str | bytes) -> None:
        async with self._sending:
            if self._socket.application_state is not WebSocketState.CONNECTED:
                return
            try:
                if isinstance(content, str):
                    await self._socket.send_text(content)
                else:
                    await self._socket.send_bytes(content)
            except (WebSocketDisconnect, RuntimeError, OSError):
                self.is_lost = True
