"""A real server of the studio in a thread, with a tiny model, and a page without a browser."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket
from adapters.wan_models import perturb, tiny_config, tiny_wan
from tiny_pipelines import euler, miniature_vae, tiny_text

from merope.adapters.attachment import attach, detach
from merope.generate.camera_video import CameraVideoPipeline
from merope.studio.guard import Access, cookie_name
from merope.studio.serve import web_server
from merope.studio.studio_model import StudioModel
from merope.studio.web_app import Studio, studio_app
from merope.world.clips import WorldClips
from merope.world.clips_file import write_clips

PINHOLE = {"kind": "pinhole", "fov_deg": 70}
BEGIN = {"do": "begin", "world": 4, "lens": PINHOLE}
AHEAD = {"do": "steer", "speed_m_s": 8, "yaw_rate_deg_s": 0, "pressed": True}
RELEASED = {"do": "steer", "speed_m_s": 0, "yaw_rate_deg_s": 0}
CLIPS = WorldClips(frames=21, height=32, width=64, frame_rate_hz=16.0, prefix_frames=9)


def write_studio_model(folder: Path, clips: WorldClips = CLIPS, with_text: bool = False) -> None:
    """A latent model of random weights, with clips that are long enough for a prefix of nine frames."""
    text = tiny_text() if with_text else (None, None)
    transformer = tiny_wan(num_layers=2)
    perturb(attach(transformer, tiny_config()), scale=1.0)
    detach(transformer).save_pretrained(folder / "branch")
    pipe = CameraVideoPipeline(*text, miniature_vae(), euler(), transformer, expand_timesteps=True)
    pipe.save_pretrained(folder)
    write_clips(folder, clips, 2)


class Served:
    """A server that answers."""

    def __init__(self, studio: Studio, port: int) -> None:
        self.studio, self.port = studio, port
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}/"

    def page(self, token: str | None = None, **options: Any) -> "Page":
        return Page(self.host, token, **options)

    def request(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        answer, content = self.answer(path, method, body, **headers)
        return answer.status, content

    def answer(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer, content

    def send_file(
        self, page: "Page", kind: str, content: bytes, name: str = "", model: int = 0, **changes: str
    ) -> tuple[int, str]:
        """What the page's upload is answered."""
        metric = changes.pop("metric", "0")
        own = {"Origin": f"http://{self.host}"} | changes
        path = f"/sessions/{page.hello['session']}/{kind}?name={name}&model={model}&metric={metric}"
        status, words = self.request(path, "POST", content, **own)
        return status, words.decode()

    def until(self, is_so: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, "nothing happens"
            time.sleep(0.01)

    def wait_for_quiet(self) -> None:
        """No page, nobody in line, no work, no file."""
        self.until(lambda: not self.studio.pages and self.studio.turns.length == 0)
        for thread in (self.studio.model_thread, self.studio.view_thread):
            thread.submit(int).result(60)
        assert list(self.studio.folder.iterdir()) == []


class Page:
    """What a browser does on the wire. `heard` has all messages, `pictures` all frames by (kind, reel, frame)."""

    def __init__(self, host: str, token: str | None = None, origin: str | None = "") -> None:
        own = f"http://{host}" if origin == "" else origin
        cookie = None if token is None else f"{cookie_name(int(host.split(':')[1]))}={token}"
        self.socket = websocket.create_connection(
            f"ws://{host}/drive", origin=own, cookie=cookie, timeout=5, suppress_origin=own is None
        )
        self.heard: list[dict[str, Any]] = []
        self.pictures: dict[tuple[int, int, int], bytes] = {}
        self.read: dict[str, int] = {}
        self.hello = self.until("hello")

    def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self.socket.send(json.dumps(message))

    def until(self, say: str, **fields: object) -> dict[str, Any]:
        """The next message of this kind with these fields; kinds may come in any order."""
        end = time.monotonic() + 60.0
        while True:
            for at in range(self.read.get(say, 0), len(self.heard)):
                message = self.heard[at]
                if message["say"] == say and all(message.get(name) == value for name, value in fields.items()):
                    self.read[say] = at + 1
                    return message
            assert time.monotonic() < end, f"no {say} after {[message['say'] for message in self.heard[-8:]]}"
            self.receive()

    def receive(self) -> None:
        try:
            data = self.socket.recv()
        except websocket.WebSocketTimeoutException:
            return
        if isinstance(data, bytes):
            self.pictures[data[0], data[1], int.from_bytes(data[2:6], "big")] = data[6:]
        else:
            self.heard.append(json.loads(data))

    def begin(self, **changes: object) -> dict[str, Any]:
        """The given frames."""
        self.send(BEGIN | changes)
        self.until("begun")
        given = self.until("frames", first=0)
        self.read["state"] = self.read["frames"]  # a page is ready before it asks for anything, too
        self.until("state", state="ready")
        return given

    def block(self) -> dict[str, Any]:
        """The next block that was made, put together from the parts in which its frames came."""
        before = self.read.get("made", 0)
        made = self.until("made")
        end = self.read["made"]
        parts = [message for message in self.heard[before:end] if message["say"] == "frames" and message["first"] > 0]
        together = {name: [row for part in parts for row in part[name]] for name in ("path", "held")}
        return {**made, **together, "first": parts[0]["first"], "parts": [part["first"] for part in parts]}

    def count(self, say: str) -> int:
        return sum(message["say"] == say for message in self.heard)

    def close(self) -> None:
        self.socket.close()


@contextmanager
def served(*models: StudioModel, token: str | None = None, port: int = 0) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", port)) as listener:
        app = studio_app(models, Access(token=token))
        server = web_server(app)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            here = Served(app.state.studio, listener.getsockname()[1])
            here.until(lambda: server.started)
            yield here
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
            assert not here.studio.folder.parent.exists()
