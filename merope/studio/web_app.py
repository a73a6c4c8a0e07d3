"""The server of the page: its files, its connection, what it may send, and what it may download."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from merope.studio.guard import Access, Guard
from merope.studio.lens_choice import LensChoice
from merope.studio.open_pages import Studio
from merope.studio.page_session import PageSession
from merope.studio.page_setting import chosen_model
from merope.studio.page_uploads import MOST_BYTES, received
from merope.studio.recording import POSE_FORMATS
from merope.studio.street_view import jpeg
from merope.studio.studio_model import StudioModel

MOST_PAGES = 32  # open at once
TOO_MANY = 1013  # of WebSockets: try again later
MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
DOWNLOADS = {
    "mp4": "video/mp4",
    "html": "application/octet-stream",  # a report is saved, never shown as a page of this server
    **dict.fromkeys(POSE_FORMATS, "application/octet-stream"),
}


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
            place = [int(asked.get(name, "")) for name in ("model", "world")]
            picture = await self.studio.drawn(self.studio.preview, *place, lens)
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
        session, name, kind = (request.path_params[part] for part in ("session", "name", "kind"))
        recorded = self.studio.recorded(session, name)
        if recorded is None or kind not in DOWNLOADS:
            return PlainTextResponse("there is no such recording\n", 404)
        if kind == "html":
            try:
                content = (await run_in_threadpool(self.studio.report, session, name)).encode()
            except ValueError as error:
                return PlainTextResponse(f"{error}\n", 409)
        else:
            file = recorded.video if kind == "mp4" else await run_in_threadpool(recorded.write_cameras, kind)
            content = await run_in_threadpool(file.read_bytes)
        headers = {"content-disposition": f'attachment; filename="{name}.{kind}"'}
        return Response(content, media_type=DOWNLOADS[kind], headers=headers)

    async def show_video(self, request: Request) -> Response:
        """The first frame of the video that a page has sent, as the model is given it."""
        session = self.studio.pages.get(request.path_params["session"])
        if session is None:
            return PlainTextResponse("this page is not connected\n", 404)
        try:
            model = chosen_model(self.studio.models, int(request.query_params.get("model", "")))
            picture = jpeg(session.uploads.video(model).frames[0])
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", 400)
        return Response(picture, media_type="image/jpeg")

    async def upload(self, request: Request) -> Response:
        """A file from the page, into the session's folder, under a name of ours."""
        session, kind = self.studio.pages.get(request.path_params["session"]), request.path_params["kind"]
        if session is None or kind not in MOST_BYTES:
            return PlainTextResponse("this page is not connected\n", 404)
        try:
            async with session.uploads.turn:
                return await self._read_upload(request, session, kind)
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", 400)
        except (ClientDisconnect, OSError):  # of a page that is gone the folder is, too
            return PlainTextResponse("this page was closed before its file was read\n", 400)

    async def _read_upload(self, request: Request, session: PageSession, kind: str) -> Response:
        asked = request.query_params
        model, is_metric = int(asked.get("model", "0")), asked.get("metric") == "1"
        fitted_to = chosen_model(self.studio.models, model)
        session.uploads.forget(kind)
        file = session.uploads.file_for(kind, asked.get("name", ""))
        if not await received(request.stream(), file, MOST_BYTES[kind]):
            return PlainTextResponse(f"the file is larger than {MOST_BYTES[kind] >> 20} MB\n", 413)
        try:
            notes = await run_in_threadpool(session.uploads.read, kind, file, fitted_to, is_metric)
        finally:
            file.unlink(missing_ok=True)
        return JSONResponse({"notes": notes})


def studio_app(models: Sequence[StudioModel], access: Access) -> Starlette:
    """The server, ready to be run."""
    studio = Studio(models)
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
        Route("/sessions/{session}/video.jpg", answers.show_video),
        Route("/sessions/{session}/{kind}", answers.upload, methods=["POST"]),
        Route("/sessions/{session}/{name}.{kind}", answers.download),
        WebSocketRoute("/drive", answers.connect),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(Guard, access=access)], lifespan=alive)
    app.router.redirect_slashes = False
    app.state.studio = studio
    return app
