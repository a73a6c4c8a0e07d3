"""Drawn and dropped paths: what a car can drive, takes along them over a real connection, uploads that are refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from scenes import straight_drive
from studio.studio_server import PINHOLE, Page, Served
from torch.testing import assert_close

from merope import formats
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_first_frames
from merope.geometry.drives import motion
from merope.geometry.trajectories import MAX_ACCELERATION_M_S2, MAX_YAW_RATE_RAD_S
from merope.studio.drawn_path import DrawnPoint, drawn_path
from merope.studio.studio_model import StudioModel

FIVE = [[0, 10, 8], [-2, 20, 6], [-8, 28, 6], [-18, 32, 8], [-30, 32, 8]]
TAKE = {"do": "take", "world": 4, "lens": PINHOLE, "points": FIVE}


def drive_of(points: list[list[float]], rate_hz: float = 16.0) -> torch.Tensor:
    return drawn_path([DrawnPoint(*point) for point in points], rate_hz, 2000)


@pytest.mark.parametrize("rate_hz", [4.0, 16.0])
def test_a_drawn_path_begins_at_the_camera_passes_the_points_and_can_be_driven(rate_hz: float) -> None:
    path = drive_of(FIVE, rate_hz)
    assert torch.equal(path[0], torch.eye(4, dtype=torch.float64))
    for right_m, ahead_m, _ in FIVE[:-1]:
        assert float((path[:, [0, 2], 3] - torch.tensor([right_m, ahead_m])).norm(dim=-1).min()) < 2.0
    end_m = path[-1, [0, 2], 3] - torch.tensor(FIVE[-1][:2])
    assert float(end_m.norm()) < 8.0 / rate_hz + 0.5
    moved = motion(path, torch.arange(len(path), dtype=torch.float64) / rate_hz)
    assert moved.top_turn_rad_s <= MAX_YAW_RATE_RAD_S + 1e-9
    assert moved.top_speed_m_s <= 8.0 + 1e-9


def test_a_corner_is_rounded_and_a_faster_car_rounds_it_more() -> None:
    corner = [[0.0, 20.0], [30.0, 20.0]]
    slow, fast = (drive_of([[*point, speed] for point in corner]) for speed in (3.0, 12.0))
    for path, speed in ((slow, 3.0), (fast, 12.0)):
        headings = torch.atan2(path[:, 0, 2], path[:, 2, 2])
        assert (
            float(headings.diff().abs().max() * 16.0) <= min(MAX_YAW_RATE_RAD_S, MAX_ACCELERATION_M_S2 / speed) + 1e-9
        )
        assert math.degrees(float(headings[-1])) > 60.0
    assert float(fast[:, 2, 3].max()) > float(slow[:, 2, 3].max()) > 20.0


@pytest.mark.parametrize("points", [[[0, -20, 8]], [[0, 0, 8]], [[0, 5, 8], [0, 5, 8], [0, 0, 8]], [[1, 1, 20]] * 40])
def test_any_points_make_a_path_that_ends(points: list[list[float]]) -> None:
    path = drive_of(points)
    assert path.isfinite().all()
    assert len(path) <= 2000


def test_a_path_is_traced_while_it_is_drawn(page: Page) -> None:
    page.send(TAKE | {"do": "trace"})
    traced = page.until("traced")
    assert traced["frames"] == 21  # the model's clips
    assert traced["whole_s"] > traced["seconds"] == 1.25
    assert_close(
        torch.tensor([row[1:3] for row in traced["path"]], dtype=torch.float64),
        drive_of(FIVE)[:, [0, 2], 3],
        atol=1e-3,
        rtol=0,
    )


def test_a_take_follows_the_path_is_judged_and_can_be_saved(server: Served, page: Page, tmp_path: Path) -> None:
    page.send(TAKE)
    take = page.until("take")
    verdict = page.until("judged")
    assert (take["reel"], take["given"], len(take["path"])) == (1, 9, 21)
    for kind in (0, 1):
        assert [frame for made, reel, frame in page.pictures if (made, reel) == (kind, 1)] == list(range(21))
    assert page.pictures[0, 1, 20] != page.pictures[1, 1, 20]
    assert verdict["left_frame"] is None or 9 <= verdict["left_frame"] < 21
    assert set(verdict["off_m"]) == {str(row[0]) for row in verdict["found"]}
    saved = {}
    for kind in ("mp4", "json", "tum"):
        status, content = server.request(f"/sessions/{page.hello['session']}/take-1.{kind}")
        assert status == 200
        saved[kind] = tmp_path / f"take.{kind}"
        saved[kind].write_bytes(content)
    assert len(read_first_frames(saved["mp4"], 100)[0]) == 21
    assert_close(formats.read(saved["json"]).world_from_camera, drive_of(FIVE)[:21])
    assert server.request(f"/sessions/{page.hello['session']}/take-2.mp4")[0] == 404
    status, report = server.request(f"/sessions/{page.hello['session']}/take-1.html")
    assert (status, b"left the path by 1 m" in report, b"data:image/jpeg" in report) == (200, True, True)


def test_takes_stand_side_by_side_until_the_oldest_is_replaced(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merope.studio.page_session.MOST_TAKES", 2)
    for reel in (1, 2, 1):
        page.send(TAKE)
        assert page.until("take")["reel"] == reel


def test_a_take_that_is_stopped_or_refused_uses_up_no_place(page: Page) -> None:
    page.send(TAKE | {"steps": 100})
    page.until("step", done=1)
    page.send({"do": "stop"})
    page.until("stopped")
    page.send(TAKE | {"points": [[0, 1, 8]]})
    page.until("refused")
    for reel in (1, 2):
        page.send(TAKE)
        assert page.until("take")["reel"] == reel


def drop(server: Served, page: Page, content: bytes, name: str, **changes: str) -> tuple[int, str]:
    return server.send_file(page, "path", content, name, **changes)


def test_a_dropped_pose_file_is_driven_and_leaves_no_file(server: Served, page: Page, tmp_path: Path) -> None:
    poses = straight_drive(40, step_m=0.5)
    times_s = torch.arange(40, dtype=torch.float64) / 16.0
    formats.write(Trajectory(poses, True, "test", times_s), tmp_path / "drive.tum", "tum")
    status, answer = drop(server, page, (tmp_path / "drive.tum").read_bytes(), "drive.tum")
    assert status == 200, answer
    assert answer == '{"notes":[]}'
    assert [file.name for file in (server.studio.folder / page.hello["session"]).iterdir()] == []
    dropped = {**TAKE, "points": None, "dropped": True}
    page.send({**dropped, "do": "trace"})
    assert page.until("traced")["metres"] == 10.0
    page.send(dropped)
    take = page.until("take")
    assert take["path"][20][1:3] == [0.0, 10.0]


def test_what_is_odd_about_a_pose_file_is_said_on_the_page(
    server: Served, page: Page, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{k / 16} 0 0 {0.5 * k + (40.0 if k > 20 else 0.0)} 0 0 0 1" for k in range(40)]
    status, answer = drop(server, page, "\n".join(lines).encode(), "jump.tum")
    assert status == 200
    (note,) = json.loads(answer)["notes"]
    assert note.startswith("warning: this file: ")
    assert "jump" in note
    assert str(server.studio.folder) not in note
    assert "merope:" not in capfd.readouterr().err


def test_uploads_are_bounded_and_checked(server: Served, page: Page, tmp_path: Path) -> None:
    status, words = drop(server, page, b"x" * ((4 << 20) + 1), "big.txt")
    assert (status, words) == (413, "the file is larger than 4 MB\n")
    for name in ("../../evil.json", "a.json/../../b", "%00", "x" * 300, ""):
        status, words = drop(server, page, b"nothing", name)
        assert status == 400
        assert str(server.studio.folder) not in words
    assert [file for file in server.studio.folder.rglob("*") if file.is_file()] == []
    assert [file.name for file in server.studio.folder.parent.glob("evil*")] == []
    assert drop(server, page, b"w*40", "keys.txt")[0] == 200
    assert drop(server, page, b"w*40", "keys.txt", Origin="http://example.org")[0] == 403
    assert server.request("/sessions/another/path", "POST", b"w*40", Origin=f"http://{server.host}")[0] == 404
    assert server.request(f"/sessions/{page.hello['session']}/path", "POST", b"w*40")[0] == 403  # no origin


def test_a_path_without_a_scale_is_refused_unless_it_is_said_to_be_in_metres(
    server: Served, page: Page, tmp_path: Path
) -> None:
    formats.write(Trajectory(straight_drive(30, step_m=0.5), False, "test"), tmp_path / "path.json")
    content = (tmp_path / "path.json").read_bytes()
    assert "must be in metres" in drop(server, page, content, "path.json")[1]
    assert drop(server, page, content, "path.json", metric="1")[0] == 200


@pytest.mark.parametrize(
    "points", [None, [], "x", [[0, 1]], [[0, 1, math.nan]], [[0, 1, 0.5]], [[0, 1e9, 8]], [[0, 9, 8]] * 41]
)
def test_points_that_are_none_are_refused(page: Page, points: object) -> None:
    page.send({"do": "take", "world": 4, "lens": PINHOLE, "points": points})
    assert "point" in page.until("refused")["text"]


def test_a_take_without_a_dropped_file_or_too_short_is_refused(page: Page) -> None:
    page.send({"do": "take", "world": 4, "lens": PINHOLE, "dropped": True})
    assert "drop a pose file on the page" in page.until("refused")["text"]
    page.send(TAKE | {"do": "trace", "points": [[0, 1, 8]]})
    assert "path must be of at least 13 frames" in page.until("refused")["text"]


def test_a_causal_model_takes_paths_block_by_block(model: StudioModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same frames as a stream that is driven by hand."""
    from merope.geometry.cameras import Cameras
    from merope.studio.lens_choice import LensChoice
    from merope.studio.street_view import StreetView
    from merope.studio.studio_model import Sampling

    monkeypatch.setattr(type(model.pipe), "causal_block_frames", 3)
    view, path = StreetView(4, LensChoice("pinhole", 70.0), model.clips), drive_of(FIVE)
    count = model.fitting_frames(40)
    assert (count, model.fitting_frames(10_000)) == (33, 9 + 12 * 27)
    prefix, steps = view.pictures(path[:9]), []
    frames = model.clip(
        prefix, Cameras(path[:count], view.lens), Sampling(2), lambda done, of: steps.append((done, of))
    )
    stream = model.stream(prefix, path[:9], view.lens, Sampling(2))
    expected = torch.cat((prefix, stream.drive(path[9:21]), stream.drive(path[21:33])))
    assert torch.equal(frames, expected)
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
