"""What all pages share: the models, the line before them, and the folder with a folder for each page."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache

from starlette.websockets import WebSocket
from torch import Tensor

from merope.demo.drive import WORLDS
from merope.errors import invalid
from merope.studio.drive_report import drive_report, take_report
from merope.studio.given_video import MOST_VIDEO, NO_TRUTH
from merope.studio.lens_choice import FOVS_DEG, LensChoice
from merope.studio.page_channel import PageChannel
from merope.studio.page_session import PageSession
from merope.studio.page_setting import chosen_model
from merope.studio.recording import Recording
from merope.studio.server_folder import ServerFolder
from merope.studio.steering import MOST_SPEED_M_S, MOST_YAW_RATE_DEG_S
from merope.studio.street_take import Take
from merope.studio.street_view import StreetView, jpeg, map_tile, on_the_ground
from merope.studio.studio_model import MOST_PROMPT, MOST_STEPS, StudioModel
from merope.studio.turns import Turns

MOST_TRACED = 4000  # cameras of a path that are drawn


class Studio:
    """One block or take is made at a time, whatever the model: all of them share the cores, or the GPU."""

    def __init__(self, models: Sequence[StudioModel]) -> None:
        self.models, self.turns = tuple(models), Turns()
        self.model_thread = ThreadPoolExecutor(1, "model")
        self.view_thread = ThreadPoolExecutor(1, "view")
        self.pages: dict[str, PageSession] = {}
        self._server_folder = ServerFolder()
        self.folder = self._server_folder.pages
        self.preview, self.tile = lru_cache(64)(self._preview), lru_cache(256)(map_tile)

    def hello(self) -> dict[str, object]:
        """What a page must know."""
        most = {"speed_m_s": MOST_SPEED_M_S, "yaw_rate_deg_s": MOST_YAW_RATE_DEG_S}
        bounds = {"steps": MOST_STEPS, "prompt": MOST_PROMPT, "video_bytes": MOST_VIDEO}
        return {
            "models": [model.about() for model in self.models],
            "worlds": WORLDS,
            "fovs_deg": FOVS_DEG,
            "most": most | bounds,
            "no_truth": NO_TRUTH,
        }

    async def drawn(self, draw: Callable[..., bytes], *place: object) -> bytes:
        """A picture of the street, one at a time: the model needs the other cores."""
        return await asyncio.get_running_loop().run_in_executor(self.view_thread, draw, *place)

    def _preview(self, model: int, world: int, lens: LensChoice) -> bytes:
        view = StreetView(world, lens, chosen_model(self.models, model).clips)
        return jpeg(view.pictures(view.start(1))[0])

    @asynccontextmanager
    async def session(self, socket: WebSocket) -> AsyncIterator[PageSession]:
        """A page's session and its folder, both gone when the page is."""
        name = secrets.token_urlsafe(16)
        folder = self.folder / name
        folder.mkdir()
        self.pages[name] = PageSession(self, PageChannel(socket), name, folder)
        try:
            yield self.pages[name]
        finally:
            del self.pages[name]
            self.model_thread.submit(shutil.rmtree, folder, True)  # after what it still writes there

    def recorded(self, session: str, name: str) -> Recording | Take | None:
        """What a page may download: its drive, or one of its takes."""
        page = self.pages.get(session)
        if page is None:
            return None
        if name == "drive":
            return None if page.drive is None else page.drive.recording
        return next((take for take in page.takes.values() if take.video.stem == name), None)

    def report(self, session: str, name: str) -> str:
        """The page of what was recorded under this name; a ValueError where nothing is measured yet."""
        recorded, page = self.recorded(session, name), self.pages.get(session)
        if isinstance(recorded, Take):
            return take_report(recorded)
        if page is None or page.drive is None:
            raise invalid("report", "asked for by an open page with a drive", "none", "drive first")
        return drive_report(page.drive)

    def traced(self, model: StudioModel, route: Tensor) -> dict[str, object]:  # [T, 4, 4]
        """All cameras of a take for the page's view from above, and how many of them the model can drive."""
        driven, rate_hz = model.fitting_frames(len(route)), model.clips.frame_rate_hz
        shown = route[:MOST_TRACED]
        return {
            "path": [where.row() for where in on_the_ground(shown, list(range(len(shown))))],
            "frames": driven,
            "seconds": round((driven - 1) / rate_hz, 3),
            "whole_s": round((len(route) - 1) / rate_hz, 3),
            "metres": round(float(route[:driven, :3, 3].diff(dim=0).norm(dim=-1).sum()), 2),
        }

    def close(self) -> None:
        for thread in (self.model_thread, self.view_thread):
            thread.shutdown(wait=True, cancel_futures=True)
        self._server_folder.remove()
