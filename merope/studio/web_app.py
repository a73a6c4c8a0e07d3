"""The server of the page: its files, its connection, and what it may download."""

import asyncio
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from torch import Tensor

from merope.demo.drive import WORLDS
from merope.errors import invalid
from merope.studio.guard import Access, Guard
from merope.studio.page_session import PageSession
from merope.studio.recording import POSE_FORMATS, Recording
from merope.studio.steering import MOST_SPEED_M_S, MOST_YAW_RATE_DEG_S
from merope.studio.street_take import Take, read_dropped
from merope.studio.street_view import FOVS_DEG, XI, LensChoice, StreetView, jpeg, map_tile, on_the_ground
from merope.studio.studio_model import StudioModel
from merope.studio.turns import Turns

MOST_PAGES = 32  # open at once
TOO_MANY = 1013  # of WebSockets: try again later
MOST_DROPPED = 4 << 20  # bytes of a pose file
MOST_TRACED = 4000  # cameras of it that are drawn
MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
DOWNLOADS = {"mp4": "video/mp4", **dict.fromkeys(POSE_FORMATS, "application/octet-stream")}


class Studio:
    """What all pages share: the model, the line before it, and the folder with a folder for each page."""

    def __init__(self, model: StudioModel) -> None:
        self.model, self.turns = model, Turns()
        self.model_thread = ThreadPoolExecutor(1, "model")
        self.view_thread = ThreadPoolExecutor(1, "view")
        self.pages: dict[str, PageSession] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="merope-studio-"))
        self.preview, self.tile = lru_cache(64)(self._preview), lru_cache(256)(map_tile)

    def hello(self) -> dict[str, object]:
        """What a page must know of the model."""
        clips = self.model.clips
        return {
            "model": self.model.name,
            "causal": self.model.is_causal,
            "width": clips.width,
            "height": clips.height,
            "fps": clips.frame_rate_hz,
            "steps": self.model.steps,
            "worlds": WORLDS,
            "lens": {"kind": "pinhole" if clips.xi[0] == 0.0 else "fisheye", "fov_deg": clips.fov_deg[0]},
            "fovs_deg": FOVS_DEG,
            "xi": XI,
            "most": {"speed_m_s": MOST_SPEED_M_S, "yaw_rate_deg_s": MOST_YAW_RATE_DEG_S},
        }

    def view(self, asked: Mapping[str, object]) -> StreetView:
        """The street and the lens that a page asks for."""
        lens = asked.get("lens")
        if not isinstance(lens, dict):
            raise invalid("lens", "a kind and a field of view", repr(lens)[:80], "reload the page")
        choice = LensChoice(lens.get("kind"), lens.get("fov_deg"))  # type: ignore[arg-type]
        return StreetView(asked.get("world"), choice, self.model.clips)  # type: ignore[arg-type]

    async def drawn(self, draw: Callable[..., bytes], *place: object) -> bytes:
        """A picture of the street, one at a time: the model needs the other cores."""
        return await asyncio.get_running_loop().run_in_executor(self.view_thread, draw, *place)

    def _preview(self, world: int, lens: LensChoice) -> bytes:
        view = StreetView(world, lens, self.model.clips)
        return jpeg(view.pictures(view.start(1))[0])

    @asynccontextmanager
    async def session(self, socket: WebSocket) -> AsyncIterator[PageSession]:
        """A page's session and its folder, both gone when the page is."""
        name = secrets.token_urlsafe(16)
        folder = self.folder / name
        folder.mkdir()
        self.pages[name] = PageSession(self, socket, name, folder)
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

    def dropped(self, page: PageSession, content: bytes, name: str, is_metric: bool) -> Tensor:  # [T, 4, 4]
        """Read a pose file. Of its name only the ending counts, because some formats go by it."""
        ending = re.search(r"\.[A-Za-z0-9]{1,8}$", name)
        file = page.folder / f"dropped{'' if ending is None else ending[0].lower()}"
        file.write_bytes(content)
        try:
            page.dropped = read_dropped(file, self.model, is_metric)
        except (ValueError, OSError) as error:
            raise ValueError(str(error).replace(str(file), "this file")) from None
        finally:
            file.unlink()
        return page.dropped

    def traced(self, path: Tensor) -> dict[str, object]:  # [T, 4, 4]
        """A path for the page's view from above, and how much of it the model can drive."""
        driven, rate_hz = self.model.fitting_frames(len(path)), self.model.clips.frame_rate_hz
        shown = path[:MOST_TRACED]
        return {
            "path": [where.row() for where in on_the_ground(shown, list(range(len(shown))))],
            "frames": driven,
            "seconds": round((driven - 1) / rate_hz, 3),
            "whole_s": round((len(path) - 1) / rate_hz, 3),
            "metres": round(float(path[:driven, :3, 3].diff(dim=0).norm(dim=-1).sum()), 2),
        }

    def close(self) -> None:
        for thread in (self.model_thread, self.view_thread):
            thread.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class Answers:
    """What the server answers, route by route."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.page = {entry.name: entry.read_bytes() for entry in (files("merope.studio") / "page").iterdir()}

    async def show_page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self.page:
            return PlainTextResponse("there is no such page\n", 404)
        return Response(self.page[name], media_type=MEDIA[Path(name).suffix])

    async def connect(self, socket: WebSocket) -> None:
        if len(self.studio.pages) >= MOST_PAGES:
            await socket.accept()
            await socket.close(TOO_MANY, f"{MOST_PAGES} pages are open: close one")
            return
        await socket.accept()
        async with self.studio.session(socket) as session:
            await session.run()

    async def show_preview(self, request: Request) -> Response:
        asked = request.query_params
        try:
            lens = LensChoice(asked.get("lens", ""), float(asked.get("fov", "nan")))
            picture = await self.studio.drawn(self.studio.preview, int(asked.get("world", "")), lens)
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", 400)
        return Response(picture, media_type="image/jpeg")

    async def show_tile(self, request: Request) -> Response:
        try:
            place = [int(request.query_params.get(name, "")) for name in ("world", "x", "z")]
            picture = await self.studio.drawn(self.studio.tile, *place)
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", 400)
        return Response(picture, media_type="image/jpeg")

    async def download(self, request: Request) -> Response:
        name, kind = request.path_params["name"], request.path_params["kind"]
        recorded = self.studio.recorded(request.path_params["session"], name)
        if recorded is None or kind not in DOWNLOADS:
            return PlainTextResponse("there is no such recording\n", 404)
        file = recorded.video if kind == "mp4" else await run_in_threadpool(recorded.write_cameras, kind)
        content = await run_in_threadpool(file.read_bytes)
        headers = {"content-disposition": f'attachment; filename="{name}.{kind}"'}
        return Response(content, media_type=DOWNLOADS[kind], headers=headers)

    async def drop(self, request: Request) -> Response:
        """A pose file from the page, into the session's folder, under a name of ours."""
        session = self.studio.pages.get(request.path_params["session"])
        if session is None:
            return PlainTextResponse("this page is not connected\n", 404)
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > MOST_DROPPED:
                return PlainTextResponse(f"the file is larger than {MOST_DROPPED >> 20} MB\n", 413)
        name, is_metric = request.query_params.get("name", ""), request.query_params.get("metric") == "1"
        try:
            path = await run_in_threadpool(self.studio.dropped, session, bytes(content), name, is_metric)
            return JSONResponse(self.studio.traced(path))
        except (ValueError, OSError) as error:
            return PlainTextResponse(f"{error}\n", 400)


def studio_app(model: StudioModel, access: Access) -> Starlette:
    """The server, ready to be run."""
    studio = Studio(model)
    answers = Answers(studio)

    @asynccontextmanager
    async def alive(_: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(studio.close)

    routes = [
        Route("/", answers.show_page),
        Route("/page/{name}", answers.show_page),
        Route("/preview", answers.show_preview),
        Route("/map", answers.show_tile),
        Route("/sessions/{session}/path", answers.drop, methods=["POST"]),
        Route("/sessions/{session}/{name}.{kind}", answers.download),
        WebSocketRoute("/drive", answers.connect),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(Guard, access=access)], lifespan=alive)
    app.router.redirect_slashes = False
    app.state.studio = studio
    return app
