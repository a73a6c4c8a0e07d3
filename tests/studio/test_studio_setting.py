"""What a page chooses: a model of the server's list, a prompt, steps, and a video of its own to begin with."""

import io
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from held_films import write_held
from PIL import Image
from scenes import straight_drive
from studio.studio_server import AHEAD, BEGIN, CLIPS, PINHOLE, RELEASED, Page, Served, served, write_studio_model
from torch import Tensor
from torch.testing import assert_close

from merope import formats
from merope.cli import main
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_video
from merope.studio.given_video import read_given
from merope.studio.load_models import distinct_names, load_model
from merope.studio.studio_model import ModelChoice, StudioModel

OWN = {"world": None, "video": {"speed_m_s": 8}}
FIVE = [[0, 10, 8], [-2, 20, 6], [-8, 28, 6], [-18, 32, 8], [-30, 32, 8]]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> StudioModel:
    folder = tmp_path_factory.mktemp("other") / "with-text"
    write_studio_model(folder, replace(CLIPS, height=64), with_text=True)
    return load_model(ModelChoice(folder, prompt="a street", device="cpu"))


@pytest.fixture(scope="module")
def server(model: StudioModel, text_model: StudioModel) -> Iterator[Served]:
    with served(model, text_model) as here:
        yield here


def film(path: Path, frames: int = 24, height: int = 60, width: int = 80, fps: float = 32.0) -> bytes:
    write_video(pictures(frames, height, width), path, fps)
    return path.read_bytes()


def pictures(frames: int, height: int, width: int) -> Tensor:  # uint8 [T, H, W, 3]
    """Grey, each a little brighter than the one before it; the left and right quarters are black."""
    grey = torch.zeros(frames, height, width, 3, dtype=torch.uint8)
    grey[:, :, width // 4 : -width // 4] = (8 * torch.arange(frames) + 20).byte()[:, None, None, None]
    return grey


def brightness(frames: Tensor) -> list[float]:  # uint8 [T, H, W, 3]
    return [float(frame[:, frame.shape[1] // 2].float().mean()) for frame in frames]


def test_a_page_chooses_among_the_models_of_the_server_and_nothing_else(page: Page) -> None:
    assert [(one["height"], one["text"], one["prompt"]) for one in page.hello["models"]] == [
        (32, False, ""),
        (64, True, "a street"),
    ]
    page.begin(model=1)
    assert Image.open(io.BytesIO(page.pictures[0, 0, 0])).size == (64, 64)
    for wrong in (2, -1, True, "/etc", "../with-text", 0.5, None):
        page.send(BEGIN | {"model": wrong})
        assert "model must be the number of a model, from 0 to 1" in page.until("refused")["text"]


def test_a_prompt_changes_the_video_and_needs_a_text_encoder(page: Page) -> None:
    made = []
    for prompt in ("a street at night", "rain", "a street at night", ""):
        page.begin(model=1, prompt=prompt)
        page.send(AHEAD, RELEASED)
        page.until("made")
        made.append(page.pictures[0, 0, 20])
    assert made[0] == made[2]
    assert len(set(made)) == 3
    page.send(BEGIN | {"prompt": "a street"})
    assert "prompt must be empty: this model has no text encoder" in page.until("refused")["text"]
    for wrong in ("x" * 2001, 3, ["a"]):
        page.send(BEGIN | {"model": 1, "prompt": wrong})
        assert "prompt must be a text of at most 2000 characters" in page.until("refused")["text"]


def test_steps_are_those_that_the_page_asks_for(page: Page) -> None:
    page.begin(steps=3)
    page.send(AHEAD, RELEASED)
    page.until("made")
    assert [message["done"] for message in page.heard if message["say"] == "step"] == [1, 2, 3]
    for wrong in (0, 101, 2.5, "3", True):
        page.send(BEGIN | {"steps": wrong})
        assert "steps must be a whole number from 1 to 100" in page.until("refused")["text"]


def test_driven_blocks_take_few_steps_unless_the_user_says_how_many(folder: Path, tmp_path: Path) -> None:
    for name in ("branch", "model_index.json", "scheduler", "transformer", "vae"):
        (tmp_path / name).symlink_to(folder / name)
    clips = json.loads((folder / "clips.json").read_text())
    (tmp_path / "clips.json").write_text(json.dumps(clips | {"steps": 30}))
    for asked, steps, driving in ((None, 30, 6), (20, 20, 20), (3, 3, 3)):
        about = load_model(ModelChoice(tmp_path, steps=asked, device="cpu")).about()
        assert (about["steps"], about["driving_steps"]) == (steps, driving)
    (tmp_path / "clips.json").write_text(json.dumps(clips | {"steps": 101}))
    with pytest.raises(ValueError, match=r"steps in .*clips.json must be at most 100, got 101; pass fewer as --steps"):
        load_model(ModelChoice(tmp_path, device="cpu"))
    assert load_model(ModelChoice(tmp_path, steps=100, device="cpu")).steps == 100


def test_a_video_begins_a_drive_without_a_street(server: Served, page: Page, tmp_path: Path) -> None:
    status, answer = server.send_file(page, "video", film(tmp_path / "film.mp4"), "my.mp4")
    assert status == 200, answer
    notes = json.loads(answer)["notes"]
    assert notes[0] == "its first 9 frames begin the drive, 0.5 s"
    assert notes[1] == "32 frames per second: one in 2 is taken, for 16"
    assert notes[2].startswith("frames of 80×60 are cropped to 80×40")
    assert [file.name for file in page_folder(server, page).iterdir()] == []

    given = page.begin(**OWN)
    assert_close(torch.tensor(given["path"])[:, 2], torch.arange(-8, 1) * 0.5)  # 8 m/s, to the origin
    begun = next(message for message in page.heard if message["say"] == "begun")
    assert begun["world"] is None
    assert begun["notes"][0] == "cameras of the video: straight ahead at 8 m/s, a 70° pinhole"
    page.send(AHEAD, RELEASED)
    block = page.block()
    assert block["path"][0][2] == pytest.approx(0.5)
    page.until("state", state="ready")
    page.send({"do": "undo"})
    page.until("undone")
    assert page.count("seen") == 0
    assert not any(kind == 1 for kind, _, _ in page.pictures)
    assert server.request(f"/sessions/{page.hello['session']}/drive.mp4")[0] == 200
    assert server.request(f"/sessions/{page.hello['session']}/drive.html")[0] == 409
    status, picture = server.request(f"/sessions/{page.hello['session']}/video.jpg?model=0")
    assert (status, Image.open(io.BytesIO(picture)).size) == (200, (64, 32))


def page_folder(server: Served, page: Page) -> Path:
    return server.studio.folder / str(page.hello["session"])


def test_a_video_is_fitted_and_not_stretched(model: StudioModel, tmp_path: Path) -> None:
    film(tmp_path / "film.mp4")
    fitted = read_given(tmp_path / "film.mp4", model).frames
    assert fitted.shape == (9, 32, 64, 3)
    expected = [20.0 + 16 * k for k in range(9)]  # every second frame
    assert brightness(fitted) == pytest.approx(expected, abs=4.0)
    assert float(fitted[8, :, :14].float().mean()) < 12.0  # the black quarter is still a quarter wide
    assert float(fitted[8, :, 18:46].float().mean()) > 130.0


def test_a_video_of_a_phone_is_seen_upright(model: StudioModel, tmp_path: Path) -> None:
    film(tmp_path / "film.mp4")
    write_held(tmp_path / "held.mp4", pictures(24, 60, 80).rot90(-1, dims=(1, 2)), 90, 32)
    upright, held = (read_given(tmp_path / name, model) for name in ("film.mp4", "held.mp4"))
    assert (upright.frames.float() - held.frames.float()).abs().mean() < 3.0
    assert upright.notes == held.notes


def test_a_drawn_path_goes_on_where_the_video_ends(server: Served, page: Page, tmp_path: Path) -> None:
    server.send_file(page, "video", film(tmp_path / "film.mp4"))
    take = {"do": "take", "lens": PINHOLE, "points": FIVE, **OWN}
    page.send(take | {"do": "trace"})
    traced = page.until("traced")
    page.send(take)
    made = page.until("take")
    assert (made["street"], made["title"], made["given"]) == (False, "your video, 70° pinhole", 9)
    assert made["path"] == traced["path"][:21]
    assert made["path"][8][1:] == [0.0, 0.0, 0.0]
    page.until("state", state="ready")
    assert page.count("judged") == 0


def test_cameras_of_a_video_come_from_a_pose_file(server: Served, page: Page, tmp_path: Path) -> None:
    server.send_file(page, "video", film(tmp_path / "film.mp4"))
    page.send(BEGIN | {"video": {"posed": True}})
    assert "drop a pose file of the video's cameras on the page" in page.until("refused")["text"]
    times_s = torch.arange(40, dtype=torch.float64) / 16.0
    formats.write(Trajectory(straight_drive(40, step_m=0.25), True, "test", times_s), tmp_path / "c.tum", "tum")
    content = (tmp_path / "c.tum").read_bytes()
    assert server.send_file(page, "cameras", content, "c.tum") == (200, '{"notes":[]}')
    given = page.begin(video={"posed": True})
    assert_close(torch.tensor(given["path"])[:, 2], torch.arange(-8, 1) * 0.25)
    short = b"\n".join(content.splitlines()[:6])  # a comment and five poses
    server.send_file(page, "cameras", short, "c.tum")
    page.send(BEGIN | {"video": {"posed": True}})
    assert "cameras of the video must be at least 9, got 5" in page.until("refused")["text"]


def test_a_video_is_fitted_to_one_model(server: Served, page: Page, tmp_path: Path) -> None:
    page.send(BEGIN | OWN)
    assert "drop a video on the page" in page.until("refused")["text"]
    content = film(tmp_path / "film.mp4")
    server.send_file(page, "video", content)
    page.send(BEGIN | OWN | {"model": 1})
    assert "video must be fitted to this model" in page.until("refused")["text"]
    assert server.send_file(page, "video", content, model=1)[0] == 200
    page.begin(**OWN, model=1)
    assert server.send_file(page, "video", content, model=2)[0] == 400
    for wrong in (-1, 21, "8", None, True):
        page.send(BEGIN | {"model": 1, "video": {"speed_m_s": wrong}})
        assert "speed of the video must be a number from 0 to 20 m/s" in page.until("refused")["text"]
    page.send(BEGIN | {"video": "/etc/passwd"})
    assert "video must be the speed of its camera" in page.until("refused")["text"]


@pytest.mark.parametrize("too_large", [False, True])
def test_a_file_that_is_refused_leaves_no_earlier_one_in_force(
    server: Served, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, too_large: bool
) -> None:
    assert server.send_file(page, "video", film(tmp_path / "film.mp4"))[0] == 200
    assert server.send_file(page, "path", b"w*40", "keys.txt")[0] == 200
    for kind in ("video", "path"):
        if too_large:
            monkeypatch.setitem(page_bounds(), kind, 10)
        assert server.send_file(page, kind, b"something else", "film.mp4")[0] == (413 if too_large else 400)
    page.send(BEGIN | OWN)
    assert "drop a video on the page" in page.until("refused")["text"]
    page.send(BEGIN | {"do": "trace", "dropped": True})
    assert "drop a pose file on the page" in page.until("refused")["text"]


PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile /etc/passwd\n"


def test_videos_from_strangers_are_bounded_and_checked(
    server: Served, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (PLAYLIST, CONCAT, b"", b"GIF89a", b"x" * 1000):
        for name in ("film.mp4", "../../film.mp4", "film.m3u8"):
            status, words = server.send_file(page, "video", content, name)
            assert (status, "a file of kind mp4, mov, webm, mkv or avi" in words) == (400, True)
    whole = film(tmp_path / "film.mp4")
    for content, words in (
        (whole[:200], "a film that can be decoded"),
        (whole[:40] + b"\0" * 2000, "a film that can be decoded"),
        (film(tmp_path / "short.mp4", frames=8), "at least 17 frames long"),
        (film(tmp_path / "slow.mp4", fps=10.0), "at least 16 frames per second, got 10"),
    ):
        status, answer = server.send_file(page, "video", content, "film.mp4")
        assert (status, words in answer) == (400, True), answer
        assert str(server.studio.folder) not in answer
    monkeypatch.setattr("merope.studio.given_video.MOST_PIXELS", 80 * 60 - 1)
    assert "at most 4096×2304, got 80×60" in server.send_file(page, "video", whole, "film.mp4")[1]
    monkeypatch.setitem(page_bounds(), "video", 1000)
    assert server.send_file(page, "video", whole, "film.mp4")[0] == 413
    assert server.send_file(page, "video", whole, "film.mp4", Origin="http://example.org")[0] == 403
    assert server.send_file(page, "anything", whole, "film.mp4")[0] == 404
    assert [file for file in server.studio.folder.rglob("*") if file.is_file()] == []


def page_bounds() -> dict[str, int]:
    from merope.studio.page_uploads import MOST_BYTES

    return MOST_BYTES


def test_models_have_names_that_tell_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / one / "trained" for one in ("a", "b")]
    assert distinct_names(folders) == ["a/trained", "b/trained"]
    assert distinct_names(folders[:1]) == ["trained"]
    with pytest.raises(ValueError, match="another folder each time"):
        distinct_names([folders[0], folders[0]])


def test_the_command_refuses_a_branch_for_several_models_and_an_idle_prompt(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["studio", "--port", "0", "--model", str(folder)]
    assert main([*given, "--model", str(tmp_path), "--branch", str(folder / "branch")]) == 2
    assert "--branch must be given with one model, got 2 models" in capsys.readouterr().err
    assert main([*given, "--prompt", "a street"]) == 2
    assert "--prompt must be left out: no model here has a text encoder" in capsys.readouterr().err


def test_a_page_that_is_closed_while_it_sends_leaves_no_file(server: Served) -> None:
    page = server.page()
    session = page.hello["session"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sending:
        head = f"POST /sessions/{session}/video HTTP/1.1\r\nHost: {server.host}\r\nOrigin: http://{server.host}\r\n"
        sending.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode() + b"x" * 50_000)
        server.until(lambda: (server.studio.folder / session / "sent-video").exists())
        page.close()
        server.wait_for_quiet()
    server.wait_for_quiet()
    assert [file for file in server.studio.folder.rglob("*") if file.is_file()] == []
