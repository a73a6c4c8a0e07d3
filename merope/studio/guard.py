"""Who may talk to the server: the right host name, the right origin and, beyond this machine, a token."""

import secrets
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from merope.errors import invalid

LEAST_TOKEN = 16  # characters
POLICY_VIOLATION = 1008  # of WebSockets: the connection is refused
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; connect-src 'self'; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """Where the server listens and what it asks for."""

    host: str = "127.0.0.1"
    token: str | None = None

    def __post_init__(self) -> None:
        if not self.is_local and self.token is None:
            raise invalid("--token", f"given for {self.host}, which others can reach", None, "pass a long, random one")
        if self.token is not None and len(self.token) < LEAST_TOKEN:
            fix = f"such as {secrets.token_urlsafe(18)}"
            raise invalid("--token", f"of at least {LEAST_TOKEN} characters", f"{len(self.token)}", fix)
        wrong = next((one for one in self.token or "" if not " " <= one <= "~"), None)
        if wrong is not None:
            fix = "it is part of an address and of a cookie: use letters and digits"
            raise invalid("--token", "of printable ASCII characters", ascii(wrong), fix)

    @property
    def is_local(self) -> bool:
        return _is_loopback(self.host)

    def problem(self, scope: Scope) -> str | None:
        """Why a request is refused, in words; None for one that may pass."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self.is_local and not _is_loopback(_host_name(host)):
            return f"this server answers to 127.0.0.1 and localhost, not to {host!r}"
        needs_origin = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        origin = headers.get("origin")
        if (needs_origin or origin is not None) and origin not in (f"http://{host}", f"https://{host}"):
            return f"requests come from the page of this server, not from {origin!r}"
        if self.token is not None and not secrets.compare_digest(_cookie(scope, headers).encode(), self.token.encode()):
            return "the token is missing or wrong: open the address that `merope studio` has printed"
        return None

    def opens(self, scope: Scope) -> bool:
        """Whether a request is the first one, with the right token in its address."""
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        is_first = scope["type"] == "http" and scope["path"] == "/" and self.token is not None
        return is_first and secrets.compare_digest(given.encode(), (self.token or "").encode())


class Guard:
    """ASGI middleware that lets nobody else pass, and says to browsers that nothing comes from elsewhere."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if self.access.opens(scope):
            answer = RedirectResponse("/", 303, HEADERS)
            answer.set_cookie(
                cookie_name(scope["server"][1]), self.access.token or "", httponly=True, samesite="strict"
            )
            await answer(scope, receive, send)
            return
        problem = self.access.problem(scope)
        if problem is None:
            await self.app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "refused"})
        else:
            await PlainTextResponse(f"refused: {problem}\n", 403, HEADERS)(scope, receive, send)


def _with_headers(send: Send) -> Send:
    async def send_all(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *given]}
        await send(message)

    return send_all


def _host_name(host: str) -> str:
    """Without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def cookie_name(port: int) -> str:
    """Browsers send the cookies of a host to all its ports: each server has a name of its own."""
    return f"merope_studio_{port}"


def _cookie(scope: Scope, headers: dict[str, str]) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(cookie_name(scope["server"][1]))
    except CookieError:
        return ""
    return "" if found is None else found.value
