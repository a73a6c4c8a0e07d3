"""One open page: what it asks for, one thing after the other, and what it is told while the model works."""

import asyncio
import json
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.websockets import WebSocketDisconnect
from torch import Tensor

from merope.errors import invalid
from merope.studio.page_channel import GENERATED, TRUE, PageChannel
from merope.studio.page_setting import Setting, read_route, read_setting
from merope.studio.page_uploads import PageUploads
from merope.studio.playback import Playback
from merope.studio.steering import Controls
from merope.studio.street_drive import Block, StreetDrive
from merope.studio.street_take import Take, judge, make_take
from merope.studio.street_view import StreetView, jpeg, on_the_ground
from merope.studio.studio_model import StoppedError

if TYPE_CHECKING:
    from merope.studio.open_pages import Studio

MOST_JOBS = 8  # that wait for one page
MOST_TAKES = 4  # that a page keeps side by side

Result = TypeVar("Result")
Job = Callable[[], Awaitable[None]]


class PageSession:
    """Lives as long as the page's connection. Its folder and all its work end with it."""

    def __init__(self, studio: "Studio", channel: PageChannel, name: str, folder: Path) -> None:
        self.studio, self.channel, self.name, self.folder = studio, channel, name, folder
        self.uploads = PageUploads(folder)
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[Job] = deque()
        self._wake = asyncio.Event()
        self._stop = False
        self._looks: set[asyncio.Task[None]] = set()
        self.drive: StreetDrive | None = None
        self.takes: dict[int, Take] = {}
        self._next_reel, self._shown = 1, 0  # _shown: frames of the drive that the page has
        self._held, self._tapped, self._is_paused = Controls(), Controls(), False

    async def run(self) -> None:
        """Until the page is closed."""
        await self.channel.tell(**self.studio.hello(), say="hello", session=self.name)
        work = asyncio.create_task(self._work())
        try:
            while True:
                await self._heard(await self.channel.heard())
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
            await self.channel.tell(say="refused", text=str(error))
        self._wake.set()

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "begin":
                setting = self._setting(message)
                self._stop = self.drive is not None  # whatever is being made is of no use any more
                self._add_job(lambda: self._begin(setting))
            case "steer":
                self._held = Controls(message.get("speed_m_s", 0.0), message.get("yaw_rate_deg_s", 0.0))
                if message.get("pressed"):
                    self._tapped = self._held
            case "pause":
                self._is_paused = bool(message.get("paused"))
            case "undo":
                self._add_job(self._undo)
            case "trace":
                setting = self._setting(message)
                traced = self.studio.traced(setting.model, read_route(setting, self.uploads, message))
                self._later(lambda: self.channel.tell(say="traced", **traced))
            case "take":
                setting = self._setting(message)
                route = read_route(setting, self.uploads, message)
                self._add_job(lambda: self._take(setting, route))
            case "stop":
                self._stop, self._held, self._tapped = True, Controls(), Controls()
                self._jobs.clear()
            case other:
                raise invalid("do", "something that the server knows", repr(other[:40]), "reload the page")

    def _setting(self, message: dict[str, Any]) -> Setting:
        return read_setting(self.studio.models, self.uploads, message)

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
                await self._drive_on(self.drive)
            else:
                await self.channel.tell_state("paused" if self._is_paused else "ready")
                await self._wake.wait()

    async def _drive_on(self, drive: StreetDrive) -> None:
        """The next block, or a wait while the page has more than one to play: what is made is not steered any more."""
        early_s = self._playback.left_s - drive.block_s
        if early_s <= 0.0:
            await self._tried(self._next_block)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), early_s)

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
            await self.channel.tell(say="stopped")
        except (ValueError, OSError) as error:
            self._held = self._tapped = Controls()
            await self.channel.tell(say="refused", text=str(error))
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self._held = self._tapped = Controls()
            await self.channel.tell(say="failed", text=f"{type(error).__name__}: {error}")

    async def _in_turn(self, work: Callable[[], Result]) -> Result:
        """Run the model when it is this page's turn, outside the thread that serves pages."""
        async with self.studio.turns.mine(lambda before: self.channel.tell_state("waiting", before)):
            await self.channel.tell_state("working")
            self._check_stop()
            return await self._in(self.studio.model_thread, work)

    async def _in(self, executor: Executor, work: Callable[[], Result]) -> Result:
        return await self._loop.run_in_executor(executor, work)

    def _check_stop(self) -> None:
        if self._stop or self.channel.is_lost:
            raise StoppedError

    def _on_step(self, done: int, of: int) -> None:
        """Called in the model's thread: tells the page, and ends what nobody waits for any more."""
        self._check_stop()
        self.channel.tell_from_thread(say="step", done=done, of=of)

    # The drive.

    async def _begin(self, setting: Setting) -> None:
        self.drive, self._tapped, self._shown = None, Controls(), 0
        self._playback = Playback(setting.model.clips.frame_rate_hz)
        number = self.studio.models.index(setting.model)

        def begun() -> StreetDrive:
            drive = StreetDrive(setting.model, setting.beginning, setting.sampling, self.folder)
            world, given = None if drive.street is None else drive.street.number, len(drive.given.frames)
            notes = setting.beginning.notes()
            self.channel.tell_from_thread(say="begun", model=number, world=world, given=given, notes=notes)
            self._show(drive.given)
            return drive

        self.drive = await self._in_turn(begun)

    async def _next_block(self) -> None:
        drive = self.drive
        assert drive is not None
        total = drive.sampling.steps

        def made() -> Block:
            target, self._tapped = self._target, Controls()
            return drive.block(target, lambda done: self._on_step(done, total), self._show)

        try:
            block = await self._in_turn(made)
        except Exception:
            if self._shown > drive.recording.frames:  # what was shown is not in the drive
                self._playback.skip()
                await self.channel.tell(say="undone", frames=drive.recording.frames, undo=drive.can_undo)
            raise
        await self.channel.tell(say="made", seconds=round(block.seconds, 3), undo=drive.can_undo)
        street = drive.street
        if street is not None:
            self._last_look = self._later(lambda: self._look(drive, street, block))

    async def _undo(self) -> None:
        drive = self.drive
        if drive is None or not drive.can_undo:
            raise invalid("undo", "asked for after a block was driven", "nothing to take back", "drive first")
        self._held = self._tapped = Controls()
        left = await self._in_turn(drive.undo)
        if drive.street is not None:
            self._last_look.cancel()
            drive.forget_sights(left)  # what was looked at while the block was taken back, too
        self._playback.skip()
        await self.channel.tell(say="undone", frames=left, undo=False)

    def _show(self, part: Block) -> None:
        """Called in the model's thread: frames go to the page while those after them are still being made."""
        rows = [where.row() for where in on_the_ground(part.world_from_camera, part.numbers)]
        held = [[round(one.speed_m_s, 3), round(one.yaw_rate_deg_s, 3)] for one in part.held]
        self._shown = part.first + len(part.frames)
        self._playback.add(len(part.frames))
        self.channel.tell_from_thread(say="frames", first=part.first, path=rows, held=held)
        for number, frame in zip(part.numbers, part.frames, strict=True):
            self.channel.send_picture_from_thread(GENERATED, 0, number, jpeg(frame))

    async def _look(self, drive: StreetDrive, street: StreetView, block: Block) -> None:
        """Beside the next block: what would be seen, and where the camera really was."""
        sight = await self._in(self.studio.view_thread, lambda: drive.look(street, block))
        if drive is not self.drive:
            return  # begun anew
        drive.sights.append(sight)
        for number, picture in sight.true.items():
            await self.channel.send_picture(TRUE, 0, number, picture)
        found, off_m = [where.row() for where in sight.found], sight.off_m
        off = None if off_m is None else round(off_m, 3)
        await self.channel.tell(say="seen", found=found, lost=sight.lost, off_m=off)

    # Takes.

    async def _take(self, setting: Setting, route: Tensor) -> None:  # [T, 4, 4]
        """Make a take into the next of a few places, and then say how well it followed."""
        reel, beginning = self._next_reel, setting.beginning
        video = self.folder / f"take-{reel}.mp4"
        model, sampling = setting.model, setting.sampling
        take = await self._in_turn(lambda: make_take(model, beginning, sampling, route, video, self._on_step))
        self.takes[reel], self._next_reel = take, reel % MOST_TAKES + 1
        rows = [where.row() for where in on_the_ground(take.world_from_camera, list(range(len(take.frames))))]
        street = beginning if isinstance(beginning, StreetView) else None
        lens = f"{beginning.choice.fov_deg:g}° {beginning.choice.kind}"
        await self.channel.tell(
            say="take",
            reel=reel,
            path=rows,
            given=take.given,
            fps=model.clips.frame_rate_hz,
            title=f"{beginning.title}, {lens}",
            street=street is not None,
            notes=beginning.notes(take.world_from_camera),
        )
        await self._send_all(GENERATED, reel, take.frames)
        if street is not None:
            self._later(lambda: self._judge(reel, take, street))

    async def _judge(self, reel: int, take: Take, street: StreetView) -> None:
        verdict = await self._in(self.studio.view_thread, lambda: judge(take, street))
        if self.takes.get(reel) is not take:
            return  # another take is in its place
        self.takes[reel] = replace(take, verdict=verdict)
        await self._send_all(TRUE, reel, verdict.true)
        await self.channel.tell(
            say="judged",
            reel=reel,
            found=[where.row() for where in verdict.found],
            off_m={frame: round(value, 3) for frame, value in verdict.off_m.items()},
            rot_deg=verdict.number("rot_deg"),
            metric_tr_percent=verdict.number("metric_tr_percent"),
            psnr_db=round(verdict.score.psnr_db, 2),
            left_frame=verdict.left_frame,
        )

    async def _send_all(self, kind: int, reel: int, frames: Tensor) -> None:  # uint8 [T, H, W, 3]
        encoded = await self._in(self.studio.view_thread, lambda: [jpeg(frame) for frame in frames])
        for number, picture in enumerate(encoded):
            await self.channel.send_picture(kind, reel, number, picture)

    def _later(self, work: Job) -> "asyncio.Task[None]":
        """Beside everything else. What goes wrong is said, and nothing waits for it."""

        async def tried() -> None:
            try:
                await work()
            except Exception as error:
                await self.channel.tell(say="failed", text=f"{type(error).__name__}: {error}")

        task = asyncio.create_task(tried())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)
        return task
