"""The studio's server over real connections: a drive, turns, pages that close, and requests that are refused."""

import io
import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import websocket
from PIL import Image
from small_disk import room_for
from studio.studio_server import AHEAD, BEGIN, CLIPS, RELEASED, Page, Served, served
from torch.testing import assert_close

from merope import formats
from merope.formats.video import read_first_frames
from merope.studio.steering import Controls, steered
from merope.studio.street_drive import StreetDrive
from merope.studio.studio_model import StudioModel

BLOCK = 12


def saved(server: Served, page: Page, kind: str, folder: Path) -> Path:
    status, content = server.request(f"/sessions/{page.hello['session']}/drive.{kind}")
    assert status == 200
    file = folder / f"drive.{kind}"
    file.write_bytes(content)
    return file


def test_a_page_is_told_what_the_model_is_like(page: Page) -> None:
    (about,) = page.hello["models"]
    assert (about["width"], about["height"], about["fps"], about["steps"]) == (64, 32, 16.0, 2)
    assert (about["causal"], about["lens"]) == (False, {"kind": "pinhole", "fov_deg": 70.0})


def test_a_drive_goes_where_it_is_steered_and_is_recorded(server: Served, page: Page, tmp_path: Path) -> None:
    first = page.begin()
    assert [row[0] for row in first["path"]] == list(range(9))
    page.send(AHEAD | {"yaw_rate_deg_s": -15}, RELEASED)
    block = page.block()
    page.until("seen")
    page.until("state", state="ready")
    assert [row[0] for row in block["path"]] == list(range(9, 9 + BLOCK))
    assert block["seconds"] > 0
    assert block["undo"]
    assert [message["done"] for message in page.heard if message["say"] == "step"] == [1, 2]
    for kind, frames in ((0, range(9 + BLOCK)), (1, (12, 16, 20))):
        assert [frame for made, reel, frame in page.pictures if (made, reel) == (kind, 0)] == list(frames)
    assert Image.open(io.BytesIO(page.pictures[0, 0, 20])).size == (64, 32)

    path = formats.read(saved(server, page, "json", tmp_path))
    assert path.count == len(read_first_frames(saved(server, page, "mp4", tmp_path), 100)[0]) == 9 + BLOCK
    given = path.world_from_camera
    assert_close(given[:9], CLIPS.path(100_004)[:9])
    start = Controls(*first["held"][-1])
    expected, held = steered(given[8], start, Controls(8.0, -15.0), BLOCK, 16.0)
    assert_close(given[9:], expected, atol=1e-3, rtol=0)  # what is held is told to three digits
    assert block["held"][-1] == [round(held[-1].speed_m_s, 3), -15.0]
    assert_close(torch.tensor([row[1:3] for row in block["path"]]).double(), given[9:, [0, 2], 3], atol=1e-3, rtol=0)
    assert formats.detect(saved(server, page, "tum", tmp_path)) == "tum"


def test_undo_takes_the_block_from_video_path_and_stream(server: Served, page: Page, tmp_path: Path) -> None:
    page.begin()
    made = []
    for _ in range(2):
        page.send(AHEAD, RELEASED)
        page.until("seen")
        made.append(page.pictures[0, 0, 20])
        page.send({"do": "undo"})
        assert page.until("undone")["frames"] == 9
        assert len(read_first_frames(saved(server, page, "mp4", tmp_path), 100)[0]) == 9
        assert formats.read(saved(server, page, "json", tmp_path)).count == 9
    assert made[0] == made[1]  # the same block again, to the last bit
    page.send({"do": "undo"})
    assert "nothing to take back; drive first" in page.until("refused")["text"]


def test_what_is_seen_of_a_block_that_was_taken_back_is_not_told(
    server: Served, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.begin()
    free, look = threading.Event(), StreetDrive.look
    monkeypatch.setattr(StreetDrive, "look", lambda *given: (free.wait(60), look(*given))[1])
    page.send(AHEAD, RELEASED)
    page.until("state", state="ready")
    page.send({"do": "undo"})
    page.until("undone")
    free.set()
    page.send(AHEAD, RELEASED)
    page.until("seen")
    page.send({"do": "undo"})
    page.until("undone")
    assert page.count("seen") == 1


def test_a_block_that_is_seen_while_it_is_taken_back_is_in_no_report(
    server: Served, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.begin()
    free, look, undo = threading.Event(), StreetDrive.look, StreetDrive.undo

    def slow_undo(drive: StreetDrive) -> int:
        left = undo(drive)
        free.set()
        server.until(lambda: bool(drive.sights))
        return left

    monkeypatch.setattr(StreetDrive, "look", lambda *given: (free.wait(60), look(*given))[1])
    monkeypatch.setattr(StreetDrive, "undo", slow_undo)
    page.send(AHEAD, RELEASED)
    page.until("state", state="ready")
    page.send({"do": "undo"})
    page.until("undone")
    assert server.request(f"/sessions/{page.hello['session']}/drive.html")[0] == 409


def test_a_held_key_drives_on_and_pause_stops_it(page: Page) -> None:
    page.begin()
    page.send(AHEAD)
    for _ in range(2):
        page.block()
    page.send({"do": "pause", "paused": True})
    page.until("state", state="paused")
    blocks = page.count("made")
    page.read["made"] = len(page.heard)
    page.send({"do": "pause", "paused": False})
    assert page.block()["first"] == 9 + BLOCK * blocks
    page.send(RELEASED)
    page.until("state", state="ready")


def test_a_key_that_is_tapped_while_the_model_works_counts_once(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, heard, block = threading.Event(), threading.Event(), StreetDrive.block
    monkeypatch.setattr(StreetDrive, "block", lambda *given: (at_work.set(), heard.wait(60), block(*given))[2])
    page.begin()
    page.send(AHEAD)
    assert at_work.wait(60)
    page.send(RELEASED, AHEAD, RELEASED, {"do": "answer"})
    page.until("refused")  # the answer to what the server does not know comes after all before it was heard
    heard.set()
    page.block()
    page.block()
    page.until("state", state="ready")
    assert page.count("made") == 2


def test_another_lens_begins_anew_and_says_what_the_model_has_not_seen(page: Page) -> None:
    page.begin()
    page.begin(lens={"kind": "fisheye", "fov_deg": 140})
    (note,) = next(message["notes"] for message in page.heard if message["say"] == "begun" and message["notes"])
    assert "a 140° fisheye (xi = 1); the model has seen a 70° pinhole only" in note
    page.send(AHEAD, RELEASED)
    assert page.block()["first"] == 9


def test_a_second_page_waits_its_turn_and_is_told(server: Served, page: Page) -> None:
    other, free = server.page(), threading.Event()
    server.studio.model_thread.submit(free.wait, 60)
    page.send(BEGIN)
    page.until("state", state="working")
    other.send(BEGIN)
    assert other.until("state", state="waiting")["before"] == 1
    assert server.request("/")[0] == 200  # pages are served while the model works
    free.set()
    page.until("begun")
    other.until("begun")
    for one in (page, other):
        one.send(AHEAD, RELEASED)
        one.until("seen")
    other.close()


def test_a_closed_page_stops_its_work(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merope.studio.studio_model.MOST_STEPS", 20_000)  # a block that takes minutes
    page = server.page()
    page.begin(steps=20_000)
    page.send(AHEAD)
    page.until("step", done=2)
    began_s = time.monotonic()
    assert server.request("/")[0] == 200
    page.close()
    server.wait_for_quiet()
    assert time.monotonic() - began_s < 20.0


REFUSED = {
    "no JSON": ("{", "Expecting"),
    "no object": ("[]", 'an object with "do"'),
    "nested": ("[" * 50_000, "recursion"),
    "unknown": ('{"do": "format"}', "something that the server knows"),
    "no world": (json.dumps(BEGIN | {"world": -1}), "world must be from 0 to"),
    "words": (json.dumps(BEGIN | {"world": "../../etc/passwd"}), "world must be from 0 to"),
    "no lens": (json.dumps(BEGIN | {"lens": "pinhole"}), "a kind and a field of view"),
    "lens": (json.dumps(BEGIN | {"lens": {"kind": "x", "fov_deg": 70}}), "one of pinhole, fisheye"),
    "a list for a lens": (json.dumps(BEGIN | {"lens": {"kind": [], "fov_deg": 70}}), "one of pinhole, fisheye"),
    "view": (json.dumps(BEGIN | {"lens": {"kind": "pinhole", "fov_deg": 180}}), "from 20° to 120°"),
    "NaN": ('{"do": "steer", "speed_m_s": NaN}', "speed_m_s must be a number from −20 to 20"),
    "fast": ('{"do": "steer", "speed_m_s": 1e9}', "speed_m_s must be a number from −20 to 20"),
    "true": ('{"do": "steer", "yaw_rate_deg_s": true}', "yaw_rate_deg_s must be a number"),
    "undo": ('{"do": "undo"}', "nothing to take back"),
}


def test_bad_messages_are_refused_in_words_and_the_page_lives(page: Page) -> None:
    for text, words in REFUSED.values():
        page.socket.send(text)
        assert words in page.until("refused")["text"]
    page.begin()


def test_too_many_requests_at_once_are_refused(server: Served, page: Page) -> None:
    free = threading.Event()
    server.studio.model_thread.submit(free.wait, 60)
    page.send(*[BEGIN] * 10)
    assert "at most 8 at once" in page.until("refused")["text"]
    free.set()
    page.until("begun")


def test_a_message_that_is_too_long_ends_the_connection_and_nothing_else(server: Served) -> None:
    page = server.page()
    page.until("state")
    page.socket.send("x" * (1 << 17))
    assert page.socket.recv() in ("", b"")  # closed
    server.page().close()
    server.wait_for_quiet()


def test_more_pages_than_the_bound_are_told_so(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merope.studio.web_app.MOST_PAGES", 1)
    page = server.page()
    refused = websocket.create_connection(f"ws://{server.host}/drive", origin=f"http://{server.host}", timeout=5)
    opcode, content = refused.recv_data()
    assert opcode == websocket.ABNF.OPCODE_CLOSE
    assert (int.from_bytes(content[:2], "big"), content[2:].decode()) == (1013, "1 pages are open: close one")
    refused.close()
    page.close()
    server.wait_for_quiet()


def test_a_server_that_ends_takes_its_pages_and_files_along(model: StudioModel) -> None:
    with served(model) as here:
        page = here.page()
        page.begin()
        page.send(AHEAD)
        page.until("step")
        folder = here.studio.folder
        assert (folder / page.hello["session"] / "drive.mp4").exists()
    assert not folder.exists()


def test_a_page_is_answered_while_its_own_block_is_made(server: Served, page: Page) -> None:
    page.begin(steps=100)
    page.send(AHEAD, RELEASED)
    page.until("step", done=1)
    page.send({**BEGIN, "do": "trace", "points": [[0, 20, 8]]})
    page.until("traced")
    assert server.request(f"/sessions/{page.hello['session']}/drive.json")[0] == 200
    assert page.count("made") == 0
    page.until("made")


def test_frames_come_before_the_block_is_whole(page: Page) -> None:
    """Those of a latent frame each, in order, and before the stream has taken the block in."""
    page.begin()
    page.send(AHEAD, RELEASED)
    block = page.block()
    assert block["parts"] == [9, 13, 17]
    kinds = [message["say"] for message in page.heard]
    assert kinds.index("made") > max(k for k, kind in enumerate(kinds) if kind == "frames")


def test_a_block_that_cannot_be_written_is_taken_from_page_stream_and_video(
    server: Served, page: Page, tmp_path: Path
) -> None:
    page.begin()
    (video,) = server.studio.folder.rglob("drive.mp4")
    with room_for(video.stat().st_size + 100):
        page.send(AHEAD, RELEASED)
        assert page.until("undone") == {"say": "undone", "frames": 9, "undo": False}
        assert "too large" in page.until("refused")["text"]
    page.send(AHEAD, RELEASED)
    assert page.block()["first"] == 9
    page.until("state", state="ready")
    assert len(read_first_frames(saved(server, page, "mp4", tmp_path), 100)[0]) == 9 + BLOCK


def test_a_drive_is_saved_as_a_report(server: Served, page: Page) -> None:
    page.begin()
    address = f"/sessions/{page.hello['session']}/drive.html"
    assert server.request(address)[0] == 409  # nothing is measured yet
    page.send(AHEAD, RELEASED)
    page.until("seen")
    answer, content = server.answer(address)
    assert answer.headers["content-disposition"] == 'attachment; filename="drive.html"'
    text = content.decode()
    assert "<title>Camera control report</title>" in text
    assert "world-4" in text
    assert "http" not in re.sub(r"http://www.w3.org/\S+", "", text)  # nothing is loaded from elsewhere
    page.until("state", state="ready")
    page.send({"do": "undo"})
    page.until("undone")
    assert server.request(address)[0] == 409
