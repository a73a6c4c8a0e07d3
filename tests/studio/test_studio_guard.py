"""What strangers try: other origins and hosts, no token, files outside the session's folder."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
import websocket
from studio.studio_server import Served, served

from merope.cli import main
from merope.studio.guard import Access, cookie_name
from merope.studio.serve import address
from merope.studio.studio_model import StudioModel

TOKEN = "a-long-and-random-one"


@pytest.fixture(scope="module")
def locked(model: StudioModel) -> Iterator[Served]:
    with served(model, token=TOKEN) as here:
        yield here


def is_refused(server: Served, **options: str | None) -> bool:
    with pytest.raises(websocket.WebSocketBadStatusException) as refusal:
        server.page(**options)
    return bool(refusal.value.status_code == 403)


@pytest.mark.parametrize("origin", ["http://example.org", "null", "http://127.0.0.1:1", None])
def test_connections_from_elsewhere_are_refused(server: Served, origin: str | None) -> None:
    assert is_refused(server, origin=origin)
    server.wait_for_quiet()


def test_another_name_for_this_machine_is_refused(server: Served) -> None:
    for host in (f"example.org:{server.port}", "", f"127.0.0.1.example.org:{server.port}", "[::1", "192.168.0.1"):
        status, words = server.request("/", Host=host)
        assert (status, b"answers to 127.0.0.1 and localhost" in words) == (403, True)
    for host in (f"localhost:{server.port}", f"[::1]:{server.port}"):
        assert server.request("/", Host=host)[0] == 200


def test_a_request_with_another_origin_is_refused(server: Served) -> None:
    assert server.request("/", Origin="http://example.org")[0] == 403
    assert server.request("/", Origin=f"http://{server.host}")[0] == 200


def test_browsers_are_told_to_load_nothing_from_elsewhere(server: Served) -> None:
    answer, _ = server.answer("/")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")


def test_without_the_token_nothing_is_served(locked: Served) -> None:
    for path in (
        "/",
        "/page/studio.js",
        "/preview?model=0&world=4&lens=pinhole&fov=70",
        "/?token=another",
        "/map?token=" + TOKEN,
    ):
        status, words = locked.request(path)
        assert (status, b"token is missing or wrong" in words) == (403, True)
    name = cookie_name(locked.port)
    assert locked.request("/", Cookie=f"{name}=another")[0] == 403
    assert locked.request("/", Cookie=f'{name}="\\')[0] == 403
    assert is_refused(locked)
    assert is_refused(locked, token="another")


def test_the_token_opens_the_page_and_leaves_the_address(locked: Served) -> None:
    answer, _ = locked.answer(f"/?token={TOKEN}")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert locked.request("/", Cookie=cookie.split(";")[0])[0] == 200
    page = locked.page(token=TOKEN)
    page.begin()
    page.close()
    assert is_refused(locked, token=TOKEN, origin="http://example.org")
    locked.wait_for_quiet()


def test_two_servers_on_one_machine_do_not_log_each_other_s_pages_out(model: StudioModel, locked: Served) -> None:
    with served(model, token=TOKEN[::-1]) as other:
        kept = [
            one.answer(f"/?token={token}")[0].headers["set-cookie"].split(";")[0]
            for one, token in ((locked, TOKEN), (other, TOKEN[::-1]))
        ]
        assert len({cookie.split("=")[0] for cookie in kept}) == 2  # a browser keeps both
        assert [one.request("/", Cookie="; ".join(kept))[0] for one in (locked, other)] == [200, 200]


def test_the_address_that_is_printed_opens_the_page_whatever_the_token(model: StudioModel) -> None:
    token = 'a+b&c=d #e;f"g%h/ij'
    with served(model, token=token) as here:
        printed = address(Access(token=token), here.port)
        answer, _ = here.answer(printed.removeprefix(f"http://{here.host}"))
        assert answer.status == 303
        assert here.request("/", Cookie=answer.headers["set-cookie"].split("; HttpOnly")[0])[0] == 200


@pytest.mark.parametrize(("host", "family"), [("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)])
def test_a_server_for_all_addresses_prints_one_of_this_machine(host: str, family: socket.AddressFamily) -> None:
    own = urlsplit(address(Access(host, TOKEN), 8642)).hostname
    assert own not in (None, host)
    if own != socket.gethostname().lower():
        socket.create_server((own, 0), family=family).close()  # others are refused


def test_no_file_outside_the_page_and_the_session_is_read(server: Served) -> None:
    page = server.page()
    page.begin()
    session = page.hello["session"]
    secret = server.studio.folder / "drive.secret"
    secret.write_text("secret")
    ways = ["../web_app.py", "..%2fweb_app.py", quote("../" * 9 + "etc/passwd", safe=""), "%00", "index.html/", "page"]
    sessions = ["", "..", "%2e%2e", f"{session}/..", f"{session}%2f..", "another"]
    for path in [f"/page/{way}" for way in ways] + [f"/sessions/{one}/drive.secret" for one in sessions]:
        assert server.request(path)[0] in (404, 405), path
    assert server.request(f"/sessions/{session}/drive.json")[0] == 200
    for kind in ("py", "secret", "json/../../x", "%2e%2e"):
        assert server.request(f"/sessions/{session}/drive.{kind}")[0] == 404
    secret.unlink()
    page.close()
    server.wait_for_quiet()
    assert server.request(f"/sessions/{session}/drive.json")[0] == 404  # gone with its page


def test_pictures_of_the_street_are_bounded(server: Served) -> None:
    good = "/preview?model=0&world=4&lens=fisheye&fov=140"
    assert server.request(good)[1][:2] == b"\xff\xd8"  # JPEG
    for bad in ("world=-1&lens=pinhole&fov=70", "world=x&lens=pinhole&fov=70", "world=4&lens=a&fov=70", "world=4"):
        assert server.request(f"/preview?model=0&{bad}")[0] == 400
    assert server.request("/preview?model=0&world=4&lens=pinhole&fov=nan")[0] == 400
    assert server.request("/map?world=4&x=0&z=0")[1][:2] == b"\xff\xd8"
    for bad in ("world=4&x=101&z=0", "world=4&x=0", "world=4&x=0.5&z=0", "world=99999999&x=0&z=0"):
        assert server.request(f"/map?{bad}")[0] == 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--token must be given for 0.0.0.0, which others can reach"),
        (["--host", "0.0.0.0", "--token", "short"], "--token must be of at least 16 characters, got 5"),
        (["--token", "short"], "--token must be of at least 16 characters"),
        (["--token", "geheim-für-immer-und-ewig"], "--token must be of printable ASCII characters"),
        (["--token", "two lines,\nno address"], "--token must be of printable ASCII characters"),
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (
            ["--host", "203.0.113.1", "--token", TOKEN],
            "--host and --port must be a free address of this machine",
        ),
        (["--model", "nowhere"], "--model must be a file or folder that exists, got nowhere"),
        (["--steps", "0"], "--steps must be from 1 to 100, got 0"),
        (["--steps", "101"], "--steps must be from 1 to 100, got 101"),
        (["--prompt", "x" * 2001], "--prompt must be a text of at most 2000 characters, got 2001, 'xxx"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--port", "0", "--device", "tpu"], "--device must be auto or, on this machine, cpu"),
    ],
)
def test_the_command_refuses_what_cannot_be(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["studio", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studio", "--port", str(server.port)]) == 2
    assert "another server may use it: try --port 0" in capsys.readouterr().err


def test_a_model_without_clips_is_refused_before_its_weights_are_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("branch", "model_index.json", "scheduler", "transformer", "vae"):
        (tmp_path / name).symlink_to(folder / name)
    assert main(["studio", "--model", str(tmp_path), "--port", "0"]) == 2
    assert "--model must be a folder with clips.json, as every model with a VAE needs" in capsys.readouterr().err
