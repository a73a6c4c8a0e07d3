"""One open page: what it asks for, one thing after the other, and what it is told while the model works."""

import asyncio
import json
import struct
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from torch import Tensor

from merope.errors import invalid
from merope.studio.drawn_path import DrawnPoint, drawn_path
from merope.studio.steering import Controls
from merope.studio.street_drive import Block, StreetDrive
from merope.studio.street_take import Take, judge, make_take
from merope.studio.street_view import StreetView, jpeg, on_the_ground
from merope.studio.studio_model import StoppedError

if TYPE_CHECKING:
    from merope.studio.web_app import Studio

GENERATED, TRUE = 0, 1  # kinds of pictures
PICTURE_HEAD = struct.Struct(">BBI")  # kind, reel (0: the drive), frame; a JPEG follows
MOST_JOBS = 8  # that wait for one page
LONGEST_DRAWN_S = 120.0
MOST_TAKES = 4  # that a page keeps side by side

Result = TypeVar("Result")
Job = Callable[[], Awaitable[None]]


class PageSession:
    """Lives as long as the page's connection. Its folder and all its work end with it."""

    def __init__(self, studio: "Studio", socket: WebSocket, name: str, folder: Path) -> None:
        self.studio, self.name, self.folder = studio, name, folder
        self._socket, self._sending = socket, asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[Job] = deque()
        self._wake = asyncio.Event()
        self._stop = False
        self._state: tuple[str, int] | None = None
        self._looks: set[asyncio.Task[None]] = set()
        self.drive: StreetDrive | None = None
        self.takes: dict[int, Take] = {}
        self.dropped: Tensor | None = None  # [T, 4, 4]
        self._next_reel = 1
        self._held, self._tapped, self._is_paused = Controls(), Controls(), False

    async def run(self) -> None:
        """Until the page is closed."""
        await self.tell(**self.studio.hello(), say="hello", session=self.name)
        work = asyncio.create_task(self._work())
        try:
            while True:
                await self._heard(await self._socket.receive_text())
        except (WebSocketDisconnect, KeyError):  # KeyError: Starlette's, for a message of bytes
            pass
        finally:
            self._stop = True
            for task in (work, *self._looks):
                task.cancel()
            await asyncio.gather(work, *self._looks, return_exceptions=True)

    async def _heard(self, text: str) -> None:
        try:
            message = json.loads(text)
            if not isinstance(message, dict) or not isinstance(message.get("do"), str):
                raise invalid("message", 'an object with "do"', text[:80], "reload the page")
            self._obey(message)
        except (ValueError, RecursionError) as error:
            await self.tell(say="refused", text=str(error))
        self._wake.set()

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "begin":
                view = self.studio.view(message)
                self._stop = self.drive is not None  # whatever is being made is of no use any more
                self._add_job(lambda: self._begin(view))
            case "steer":
                self._held = Controls(message.get("speed_m_s", 0.0), message.get("yaw_rate_deg_s", 0.0))
                if message.get("pressed"):
                    self._tapped = self._held
            case "pause":
                self._is_paused = bool(message.get("paused"))
            case "undo":
                self._add_job(self._undo)
            case "trace":
                traced = self.studio.traced(self._asked_path(message))
                self._later(lambda: self.tell(say="traced", **traced))
            case "take":
                view, path = self.studio.view(message), self._asked_path(message)
                self._add_job(lambda: self._take(view, path))
            case "stop":
                self._stop, self._held, self._tapped = True, Controls(), Controls()
                self._jobs.clear()
            case other:
                raise invalid("do", "something that the server knows", repr(other[:40]), "reload the page")

    def _asked_path(self, message: dict[str, Any]) -> Tensor:  # [T, 4, 4]
        """The path that a page has drawn, or the one that was dropped on it."""
        if message.get("dropped"):
            if self.dropped is None:
                raise invalid("path", "drawn or dropped on the page", "none", "drop a pose file, or draw one")
            return self.dropped
        points = message.get("points")
        if not isinstance(points, list) or not all(isinstance(one, list) and len(one) == 3 for one in points):
            raise invalid(
                "points", "metres to the right, ahead, and a speed, for each", repr(points)[:80], "draw again"
            )
        rate_hz = self.studio.model.clips.frame_rate_hz
        return drawn_path([DrawnPoint(*one) for one in points], rate_hz, round(LONGEST_DRAWN_S * rate_hz))

    async def _take(self, view: StreetView, path: Tensor) -> None:
        """Make a take into the next of a few places, and then say how well it followed."""
        reel = self._next_reel
        self._next_reel = reel % MOST_TAKES + 1
        video = self.folder / f"take-{reel}.mp4"
        take = await self.in_turn(lambda: make_take(self.studio.model, view, path, video, self.on_step))
        self.takes[reel] = take
        count = len(take.frames)
        rows = [where.row() for where in on_the_ground(take.world_from_camera, list(range(count)))]
        lens = {"kind": view.choice.kind, "fov_deg": view.choice.fov_deg}
        notes = view.notes(take.world_from_camera)
        await self.tell(say="take", reel=reel, path=rows, given=take.given, world=view.number, lens=lens, notes=notes)
        encoded = await self._in(self.studio.view_thread, lambda: [jpeg(frame) for frame in take.frames])
        for number, picture in enumerate(encoded):
            await self.send_picture(GENERATED, reel, number, picture)
        self._later(lambda: self._judge(reel, take))

    async def _judge(self, reel: int, take: Take) -> None:
        verdict = await self._in(self.studio.view_thread, lambda: judge(take))
        if self.takes.get(reel) is not take:
            return  # another take is in its place
        encoded = await self._in(self.studio.view_thread, lambda: [jpeg(frame) for frame in verdict.true])
        for number, picture in enumerate(encoded):
            await self.send_picture(TRUE, reel, number, picture)
        await self.tell(
            say="judged",
            reel=reel,
            found=[where.row() for where in verdict.found],
            off_m={frame: round(value, 3) for frame, value in verdict.off_m.items()},
            rot_deg=verdict.rot_deg,
            metric_tr_percent=verdict.metric_tr_percent,
            psnr_db=round(verdict.psnr_db, 2),
            left_frame=verdict.left_frame,
        )

    def _add_job(self, job: Job) -> None:
        if len(self._jobs) >= MOST_JOBS:
            raise invalid("requests", f"at most {MOST_JOBS} at once", len(self._jobs) + 1, "wait for the others")
        self._jobs.append(job)

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            if self._jobs:
                await self._tried(self._jobs.popleft())
            elif self.drive is not None and not self._is_paused and not self._target.is_standing:
                await self._tried(self._next_block)
            else:
                await self.tell_state("paused" if self._is_paused else "ready")
                await self._wake.wait()

    @property
    def _target(self) -> Controls:
        """What is held; a key that was pressed and let go of again counts once."""
        return self._tapped if self._held.is_standing else self._held

    async def _tried(self, job: Job) -> None:
        """Whatever goes wrong is said on the page; the next request is served."""
        self._stop = False
        try:
            await job()
        except StoppedError:
            await self.tell(say="stopped")
        except (ValueError, OSError) as error:
            self._held = self._tapped = Controls()
            await self.tell(say="refused", text=str(error))
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self._held = self._tapped = Controls()
            await self.tell(say="failed", text=f"{type(error).__name__}: {error}")

    async def in_turn(self, work: Callable[[], Result]) -> Result:
        """Run the model when it is this page's turn, outside the thread that serves pages."""
        async with self.studio.turns.mine(lambda before: self.tell_state("waiting", before)):
            await self.tell_state("working")
            self.check_stop()
            return await self._in(self.studio.model_thread, work)

    async def _in(self, executor: Executor, work: Callable[[], Result]) -> Result:
        return await self._loop.run_in_executor(executor, work)

    def check_stop(self) -> None:
        if self._stop:
            raise StoppedError

    def on_step(self, done: int, of: int) -> None:
        """Called in the model's thread: tells the page, and ends what nobody waits for any more."""
        self.check_stop()
        asyncio.run_coroutine_threadsafe(self.tell(say="step", done=done, of=of), self._loop)

    async def _begin(self, view: StreetView) -> None:
        self.drive, self._tapped = None, Controls()
        drive = await self.in_turn(lambda: StreetDrive(self.studio.model, view, self.folder))
        self.drive = drive
        await self.tell(say="begun", world=view.number, notes=view.notes())
        await self._show(drive.first)

    async def _next_block(self) -> None:
        drive, total = self.drive, self.studio.model.steps
        assert drive is not None

        def made() -> Block:
            target, self._tapped = self._target, Controls()
            return drive.block(target, lambda done: self.on_step(done, total))

        block = await self.in_turn(made)
        await self._show(block)
        self._last_look = self._later(lambda: self._look(drive, block))

    async def _undo(self) -> None:
        if self.drive is None or not self.drive.can_undo:
            raise invalid("undo", "asked for after a block was driven", "nothing to take back", "drive first")
        self._held = self._tapped = Controls()
        left = await self.in_turn(self.drive.undo)
        self._last_look.cancel()
        await self.tell(say="undone", frames=left)

    async def _show(self, block: Block) -> None:
        """Frames of a block, as they come from the model."""
        encoded = await self._in(self.studio.view_thread, lambda: [jpeg(frame) for frame in block.frames])
        rows = [where.row() for where in on_the_ground(block.world_from_camera, block.numbers)]
        await self.tell(
            say="block",
            first=block.first,
            path=rows,
            held=[[round(one.speed_m_s, 3), round(one.yaw_rate_deg_s, 3)] for one in block.held],
            seconds=round(block.seconds, 3),
            undo=self.drive is not None and self.drive.can_undo,
        )
        for number, picture in zip(block.numbers, encoded, strict=True):
            await self.send_picture(GENERATED, 0, number, picture)

    async def _look(self, drive: StreetDrive, block: Block) -> None:
        """Beside the next block: what would be seen, and where the camera really was."""
        sight = await self._in(self.studio.view_thread, lambda: drive.look(block))
        if drive is not self.drive:
            return  # begun anew
        for number, picture in sight.true.items():
            await self.send_picture(TRUE, 0, number, picture)
        found, off_m = [where.row() for where in sight.found], sight.off_m
        await self.tell(say="seen", found=found, lost=sight.lost, off_m=None if off_m is None else round(off_m, 3))

    def _later(self, work: Job) -> "asyncio.Task[None]":
        """Beside everything else. What goes wrong is said, and nothing waits for it."""

        async def tried() -> None:
            try:
                await work()
            except Exception as error:
                await self.tell(say="failed", text=f"{type(error).__name__}: {error}")

        task = asyncio.create_task(tried())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)
        return task

    async def tell_state(self, state: str, before: int = 0) -> None:
        if self._state != (state, before):
            self._state = (state, before)
            await self.tell(say="state", state=state, before=before)

    async def tell(self, **message: object) -> None:
        await self._send(json.dumps(message, allow_nan=False))

    async def send_picture(self, kind: int, reel: int, frame: int, picture: bytes) -> None:
        await self._send(PICTURE_HEAD.pack(kind, reel, frame) + picture)

    async def _send(self, content: str | bytes) -> None:
        """A page that is gone needs nothing; its session ends by itself."""
        async with self._sending:
            if self._socket.application_state is not WebSocketState.CONNECTED:
                return
            try:
                if isinstance(content, str):
                    await self._socket.send_text(content)
                else:
                    await self._socket.send_bytes(content)
            except (WebSocketDisconnect, RuntimeError, OSError):
                self._stop = True
