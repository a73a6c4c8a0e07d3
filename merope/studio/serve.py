"""`merope studio`: load models, say where the page is, and serve it until Ctrl-C."""

import socket
import time
from dataclasses import dataclass, field
from urllib.parse import quote

import uvicorn
from starlette.types import ASGIApp

from merope.errors import invalid
from merope.studio.guard import Access
from merope.studio.load_models import load_models
from merope.studio.studio_model import ModelChoice
from merope.studio.web_app import studio_app

MOST_MESSAGE = 1 << 16  # bytes that a page may send at once
EVERY_ADDRESS = ("0.0.0.0", "::")  # of this machine
CLOSING_S = 3  # that open pages get when the server ends


@dataclass(frozen=True)
class StudioConfig:
    """What is served, and to whom. port: 0 for any free one."""

    choices: tuple[ModelChoice, ...] = (ModelChoice(),)
    access: Access = field(default_factory=Access)
    port: int = 8642

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise invalid("--port", "from 0 to 65535", self.port, "leave it out")


def serve(config: StudioConfig) -> None:
    """Until it is stopped. The port is taken before the model is loaded."""
    with _listening(config) as listener:
        began_s = time.perf_counter()
        models = load_models(config.choices)
        names = ", ".join(model.name for model in models)
        print(f"loaded {names} in {time.perf_counter() - began_s:.1f} s", flush=True)
        print(f"open {address(config.access, listener.getsockname()[1])}   (Ctrl-C ends it)", flush=True)
        web_server(studio_app(models, config.access)).run([listener])


def web_server(app: ASGIApp) -> uvicorn.Server:
    """What serves the page, with bounds on what a page can send."""
    options = uvicorn.Config(
        app,
        ws="wsproto",
        ws_max_size=MOST_MESSAGE,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=CLOSING_S,
    )
    return uvicorn.Server(options)


def address(access: Access, port: int) -> str:
    """What to open in a browser, also on another device if the server listens to all."""
    host = _own_address(access.host) if access.host in EVERY_ADDRESS else access.host
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + ("" if access.token is None else f"?token={quote(access.token, safe='')}")


def _own_address(every: str) -> str:
    """Where this machine is in its network, as far as it knows."""
    family, other = (socket.AF_INET6, "2001:db8::1") if ":" in every else (socket.AF_INET, "192.0.2.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as outgoing:
            outgoing.connect((other, 9))  # sends nothing, but finds the way there
            return str(outgoing.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _listening(config: StudioConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.access.host else socket.AF_INET
    try:
        return socket.create_server((config.access.host, config.port), family=family)
    except (OSError, OverflowError) as error:
        got, fix = f"{config.access.host}:{config.port} ({error})", "another server may use it: try --port 0"
        raise invalid("--host and --port", "a free address of this machine", got, fix) from None
