"""Videos without poses to a training set: pieces, metres, checks, lists of clips, and going on after a stop."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import curved_drive
from torch import Tensor

from merope.cli import main
from merope.curation.curate import read_manifest
from merope.datasets.footage_pieces import FromVideos
from merope.datasets.from_videos import training_set
from merope.datasets.metric_scale import height_above_road, logged_way
from merope.datasets.videos import VideoSource, read_video_rows
from merope.evaluate.estimators.estimator import PoseEstimate
from merope.formats import read, write
from merope.formats.trajectory import Trajectory
from merope.formats.video import as_bytes, write_video
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, Pinhole
from merope.geometry.poses import relative, rigid
from merope.geometry.trajectories import driving_path
from merope.world.clips import DRIVE, dice
from merope.world.render import render
from merope.world.scene import World

FPS, PIECE = 12.0, 6
LENS = Pinhole(30.0, 30.0, 24.0, 16.0, 48, 32)
STEP_M = 0.5
SETTINGS = FromVideos(FPS, 4, 2, PIECE, 16, 24, speed_m_s=STEP_M * FPS)
Recover = Callable[[str, Tensor, Lens | None], PoseEstimate | None]


def write_footage(folder: Path, **frames: int) -> None:
    """Videos whose frames tell their number, at twice the rate of training."""
    for name, count in frames.items():
        grey = (4 * torch.arange(2 * count, dtype=torch.uint8))[:, None, None, None]
        write_video(grey.expand(-1, 32, 48, 3).contiguous(), folder / f"{name}.mp4", 2 * FPS)


def answer(count: int, scale: float = 0.37, **changes: Any) -> PoseEstimate:
    """A straight drive of STEP_M a frame, in another unit."""
    poses = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    poses[:, 2, 3] = STEP_M * scale * torch.arange(count)
    given = {"is_metric": False, "name": "told", "lens": LENS, **changes}
    return PoseEstimate(poses, torch.ones(count, dtype=torch.bool), **given)


def told(piece: str, frames: Tensor, lens: Lens | None) -> PoseEstimate:
    return answer(len(frames))


def test_pieces_are_scaled_cut_into_clips_and_curated(tmp_path: Path) -> None:
    write_footage(tmp_path / "in", a=14, b=7)
    records = training_set(tmp_path / "in", tmp_path / "out", SETTINGS, told)
    assert [(record["piece"], record["kept"]) for record in records] == [
        *(("a-000", True), ("a-001", True), ("a-002", False), ("b-000", True), ("b-001", False)),
    ]
    assert records[2]["reason"] == "2 frames, a clip has 4"
    path = read(tmp_path / "out" / "poses" / "a-001.json")
    assert path.is_metric
    torch.testing.assert_close(path.world_from_camera[:, 2, 3], STEP_M * torch.arange(6, dtype=torch.float64))
    assert float(path.lens.fx) == 15.0
    source = VideoSource(read_video_rows(tmp_path / "out" / "train.jsonl"), tmp_path / "out", 4, 16, 24)
    assert [source.name(index) for index in range(len(source))] == [
        *("a-000-0000", "a-000-0002", "a-001-0000", "a-001-0002"),
    ]
    shown = source.clip(3).frames.float().mean((1, 2, 3)) / 8  # every second frame of the video
    assert torch.allclose(shown, torch.tensor([8.0, 9.0, 10.0, 11.0]), atol=0.3)
    assert source.clip(3).fps == pytest.approx(FPS)
    assert [row.id for row in read_video_rows(tmp_path / "out" / "val.jsonl")] == ["b-000-0000", "b-000-0002"]
    assert len(read_manifest(tmp_path / "out" / "curation" / "manifest.jsonl").ids) == 4


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.json*"))}


def test_a_stopped_run_goes_on_with_the_next_piece(tmp_path: Path) -> None:
    write_footage(tmp_path / "in", a=14, b=7)
    training_set(tmp_path / "in", tmp_path / "whole", SETTINGS, told)
    asked: list[str] = []

    def until(stop: str) -> Recover:
        def recover(piece: str, frames: Tensor, lens: Lens | None) -> PoseEstimate:
            if piece == stop:
                raise KeyboardInterrupt
            asked.append(piece)
            return told(piece, frames, lens)

        return recover

    for stop in ("a-001", "b-000"):
        with pytest.raises(KeyboardInterrupt):
            training_set(tmp_path / "in", tmp_path / "out", SETTINGS, until(stop))
    training_set(tmp_path / "in", tmp_path / "out", SETTINGS, until(""))
    assert asked == ["a-000", "a-001", "b-000"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    with pytest.raises(ValueError, match="a folder of the same settings"):
        training_set(tmp_path / "in", tmp_path / "out", replace(SETTINGS, speed_m_s=3.0), told)
    with pytest.raises(ValueError, match="a new folder, or one to go on with"):
        training_set(tmp_path / "in", tmp_path / "in", SETTINGS, told)


def test_what_fails_once_is_said_and_tried_again(tmp_path: Path) -> None:
    write_footage(tmp_path / "in", a=14, b=7)
    whole = (tmp_path / "in" / "a.mp4").read_bytes()
    (tmp_path / "in" / "a.mp4").write_bytes(whole[: len(whole) // 3])
    (tmp_path / "in" / "._b.mp4").write_bytes(b"of another system")

    def stops(piece: str, frames: Tensor, lens: Lens | None) -> PoseEstimate:
        raise RuntimeError("no memory is left")

    wrong, stopped, _ = training_set(tmp_path / "in", tmp_path / "out", SETTINGS, stops)
    assert (wrong["piece"], wrong["kept"]) == ("a", False)
    assert "a.mp4 cannot be decoded" in wrong["reason"]
    assert stopped["reason"] == "the estimator stopped: RuntimeError: no memory is left"
    (tmp_path / "in" / "a.mp4").write_bytes(whole)
    again = training_set(tmp_path / "in", tmp_path / "out", SETTINGS, told)
    assert [record["piece"] for record in again if record["kept"]] == ["a-000", "a-001", "b-000"]


def test_a_speed_log_that_is_missing_is_said_before_any_work(tmp_path: Path) -> None:
    write_footage(tmp_path / "in", a=7, b=7)
    (tmp_path / "a.csv").write_text("0,6\n1,6\n")
    settings = replace(SETTINGS, speed_m_s=None, speed_logs=tmp_path)
    with pytest.raises(ValueError, match=r"a log for every video, got no b\.csv"):
        training_set(tmp_path / "in", tmp_path / "out", settings, told)
    (tmp_path / "b.csv").write_text("seconds,speed\n0,6\n1,6\n")
    (tmp_path / "a.csv").write_text("time_s,speed_m_s\n0,6\n1,6\n")
    with pytest.raises(ValueError, match=r"b\.csv must be a CSV .*, got columns seconds, speed"):
        training_set(tmp_path / "in", tmp_path / "out", settings, told)
    assert not (tmp_path / "out").exists()


def test_a_piece_that_its_speed_log_does_not_cover_is_left_out(tmp_path: Path) -> None:
    write_footage(tmp_path / "in", a=30, b=7)
    (tmp_path / "a.csv").write_text("time_s,speed_m_s\n0,6\n0.5,6\n")
    (tmp_path / "b.csv").write_text("time_s,speed_m_s\n0,6\n0.5,6\n")
    settings = replace(SETTINGS, speed_m_s=None, speed_logs=tmp_path)
    records = {record["piece"]: record for record in training_set(tmp_path / "in", tmp_path / "out", settings, told)}
    assert [records[name]["kept"] for name in ("a-000", "a-004", "b-000")] == [True, False, True]
    assert "a.csv must be speeds from" in records["a-004"]["reason"]
    assert (tmp_path / "out" / "report.json").exists()


def without_middle(count: int) -> PoseEstimate:
    valid = torch.ones(count, dtype=torch.bool)
    valid[2] = False
    return replace(answer(count), valid=valid, note="1 of 6 frames not registered")


@pytest.mark.parametrize(
    ("recovered", "settings", "reason"),
    [
        (lambda n: answer(n, doubt="the estimators disagree"), SETTINGS, "the estimators disagree"),
        (lambda n: answer(n, lens=None), SETTINGS, "told says no lens"),
        (lambda n: answer(n, scale=0.0), SETTINGS, "the camera stands still"),
        (without_middle, SETTINGS, "poses of 3 frames in a row; 1 of 6 frames not registered"),
        (answer, replace(SETTINGS, speed_m_s=0.1), "says nothing about scale"),
        (answer, replace(SETTINGS, speed_m_s=900.0), "m/s"),
        (answer, replace(SETTINGS, speed_m_s=None), "told knows no metres"),
        (answer, replace(SETTINGS, speed_m_s=None, camera_height_m=1.5), "told sees no road"),
    ],
)
def test_what_is_wrong_with_a_piece_is_said(
    tmp_path: Path, recovered: Callable[[int], PoseEstimate], settings: FromVideos, reason: str
) -> None:
    write_footage(tmp_path / "in", a=6)
    (record,) = training_set(tmp_path / "in", tmp_path / "out", settings, lambda _, frames, __: recovered(len(frames)))
    assert not record["kept"]
    assert reason in record["reason"]
    assert (tmp_path / "out" / "train.jsonl").read_text() == ""


def test_videos_with_other_sides_than_the_lens_are_left_out(tmp_path: Path) -> None:
    """Scaled to them it would not have square pixels."""
    write_footage(tmp_path / "in", a=6)
    seen = list[Lens | None]()

    def asked(piece: str, frames: Tensor, lens: Lens | None) -> PoseEstimate:
        seen.append(lens)
        return told(piece, frames, lens)

    tall = torch.zeros(12, 48, 32, 3, dtype=torch.uint8)
    write_video(tall, tmp_path / "in" / "b.mp4", 2 * FPS)
    wide, held = training_set(tmp_path / "in", tmp_path / "out", SETTINGS, asked, LENS)
    assert (wide["kept"], held["kept"]) == (True, False)
    assert "frames of 32×48, and the lens is of 48×32" in held["reason"]
    assert [(float(lens.fx), float(lens.fy)) for lens in seen if isinstance(lens, Pinhole)] == [(30.0, 30.0)]


def test_a_field_of_view_is_that_of_the_videos(tmp_path: Path) -> None:
    """Not of the frames that are written, which may have other sides: pixels of the videos are square."""
    write_footage(tmp_path / "in", a=6)
    (tmp_path / "told").mkdir()
    write(Trajectory(answer(6).world_from_camera, False, "told"), tmp_path / "told" / "a-000.json")
    command = ["data", "from-videos", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--fov", "90"]
    command += ["--estimates", str(tmp_path / "told"), "--check", "none", "--speed", "6", "--size", "16", "32"]
    assert main([*command, "--fps", "12", "--frames", "4", "--step", "2", "--piece-frames", "6"]) == 0
    lens = read(tmp_path / "out" / "poses" / "a-000.json").lens
    assert isinstance(lens, Pinhole)
    assert (float(lens.fx), float(lens.fy)) == pytest.approx((16.0, 12.0))  # of 48×32 both are 24


def test_metric_estimates_need_no_scale(tmp_path: Path) -> None:
    write_footage(tmp_path / "in", a=6)
    settings = replace(SETTINGS, speed_m_s=None)
    (record,) = training_set(
        tmp_path / "in", tmp_path / "out", settings, lambda _, frames, __: answer(len(frames), 1.0, is_metric=True)
    )
    assert (record["kept"], record["scale"]) == (True, 1.0)


def test_the_log_of_a_speed_gives_the_way(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("time_s,speed_m_s\n0,4\n1,4\n3,8\n5,8\n")
    assert logged_way(file, 0.5, 4.0) == pytest.approx(2.0 + 12.0 + 8.0)
    with pytest.raises(ValueError, match="speeds from 2 s to 9 s, got 0 s to 5 s"):
        logged_way(file, 2.0, 9.0)
    file.write_text("\ufefftime_s, speed_m_s\n0, -4\n2, -4\n", encoding="utf-8")  # of Excel, and backwards
    assert logged_way(file, 0.0, 2.0) == pytest.approx(8.0)
    for text in ("time_s,v\n0,4\n", "time_s,speed_m_s\n1,4\n0,4\n", "time_s,speed_m_s\n0,fast\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"a\.csv must be"):
            logged_way(file, 0.0, 1.0)


def test_the_height_above_the_road_is_found_among_walls_and_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(900, 3, generator=generator, dtype=torch.float64)
    road = drawn[:300] * torch.tensor([12.0, 0.02, 40.0]) + torch.tensor([-6.0, 1.49, 0.0])
    wall = drawn[300:700] * torch.tensor([0.1, 8.0, 40.0]) + torch.tensor([5.0, -6.0, 0.0])
    others = drawn[700:] * 30.0 - 15.0
    path = curved_drive(12, step_m=1.5)
    world_from_here = rigid(torch.linalg.qr(torch.randn(3, 3, generator=generator).double())[0], torch.ones(3).double())
    world_from_here[:3, :3] *= torch.linalg.det(world_from_here[:3, :3]).sign()
    points = torch.cat((road, wall, others)) @ world_from_here[:3, :3].mT + world_from_here[:3, 3]
    assert height_above_road(world_from_here @ path, points) == pytest.approx(1.5, rel=0.01)
    assert height_above_road(path, wall[:20]) is None


def test_the_road_is_the_deepest_surface() -> None:
    """Not the pavement, though more points are on it."""
    drawn = torch.rand(700, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    road = drawn[:300] * torch.tensor([6.0, 0.04, 40.0]) + torch.tensor([-3.0, 1.48, 0.0])
    pavement = drawn[300:] * torch.tensor([3.0, 0.04, 40.0]) + torch.tensor([3.0, 1.23, 0.0])
    below = drawn[:30] * torch.tensor([6.0, 0.04, 40.0]) + torch.tensor([-3.0, 2.0, 0.0])  # mirrored in a puddle
    height = height_above_road(curved_drive(12, step_m=1.5), torch.cat((road, pavement, below)))
    assert height == pytest.approx(1.5, rel=0.02)


def test_the_command_takes_answers_of_other_programs_as_they_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_footage(tmp_path / "in", a=12)
    (tmp_path / "answers").mkdir()
    poses = answer(6).world_from_camera
    write(Trajectory(poses, False, "a network", lens=LENS), tmp_path / "answers" / "a-000.json")
    clip = ["--frames", "4", "--step", "2", "--piece-frames", "6", "--size", "16", "24", "--check", "none"]
    command = ["data", "from-videos", str(tmp_path / "in"), "--out", str(tmp_path / "out"), *clip, "--speed", "6"]
    command += ["--estimates", str(tmp_path / "answers")]
    assert main(command) == 0
    assert "left out a-001: waits for its estimate" in capsys.readouterr().out
    write(Trajectory(poses, False, "a network", lens=LENS), tmp_path / "answers" / "a-001.json")
    assert main(command) == 0
    assert "kept 2 of 2 pieces" in capsys.readouterr().out
    assert main([*command[:3], "--out", str(tmp_path / "out"), "--speed", "1"]) == 2
    assert main(["data", "from-videos", str(tmp_path / "nothing"), "--out", str(tmp_path / "new")]) == 2


def test_estimates_of_a_video_with_brackets_in_its_name_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_footage(tmp_path / "in", **{"Drive [dQw4]": 6})
    (tmp_path / "answers").mkdir()
    file = tmp_path / "answers" / "Drive [dQw4]-000.json"
    write(Trajectory(answer(6).world_from_camera, False, "a network", lens=LENS), file)
    clip = ["--frames", "4", "--step", "2", "--piece-frames", "6", "--size", "16", "24", "--check", "none"]
    command = ["data", "from-videos", str(tmp_path / "in"), "--out", str(tmp_path / "out"), *clip, "--speed", "6"]
    assert main([*command, "--estimates", str(tmp_path / "answers")]) == 0
    assert "kept 1 of 1 pieces" in capsys.readouterr().out


def test_colmap_recovers_a_rendered_video(tmp_path: Path) -> None:
    """Three longer clips at a larger size are in benchmarks/from_videos.py."""
    path = driving_path(9, FPS, dice(41, DRIVE), prefix=1)
    lens = Pinhole(200.0, 200.0, 128.0, 72.0, 256, 144)
    seen = render(World(41).cleared(path), Cameras(path, lens), 144, 256, samples=1)
    write_video(as_bytes(seen.image), tmp_path / "in" / "a.mp4", FPS)
    way_m = float(path[:, :3, 3].diff(dim=0).norm(dim=-1).sum())
    write(Trajectory(path[:1], True, "a lens", lens=lens), tmp_path / "lens.json")
    clip = ["--frames", "9", "--size", "144", "256", "--lens", str(tmp_path / "lens.json")]
    command = ["data", "from-videos", str(tmp_path / "in"), "--out", str(tmp_path / "out"), *clip]
    assert main([*command, "--speed", str(way_m * FPS / 8), "--check", "none"]) == 0
    found = read(tmp_path / "out" / "poses" / "a-000.json").world_from_camera
    error = relative(relative(path[:1], path), relative(found[:1], found))
    turn = torch.acos(((error[:, [0, 1, 2], [0, 1, 2]].sum(-1) - 1) / 2).clamp(-1, 1))
    assert float(turn.rad2deg().mean()) < 0.5
    assert float(error[1:, :3, 3].norm(dim=-1).mean()) < 0.01 * way_m


def test_an_unknown_lens_is_the_median_of_what_pieces_say(tmp_path: Path) -> None:
    write_footage(tmp_path / "in", a=18, b=6)
    focals = iter((60.0, 20.0, 30.0, 31.0))
    given: list[Lens | None] = []

    def recover(piece: str, frames: Tensor, lens: Lens | None) -> PoseEstimate:
        given.append(lens)
        return answer(len(frames), lens=Pinhole(next(focals), 30.0, 24.0, 16.0, 48, 32) if lens is None else None)

    training_set(tmp_path / "in", tmp_path / "out", SETTINGS, recover, calibrate=True)
    assert given[:4] == [None] * 4
    assert [float(lens.fx) for lens in given[4:] if lens is not None] == pytest.approx([30.5] * 4)
    assert float(read(tmp_path / "out" / "poses" / "b-000.json").lens.fx) == pytest.approx(30.5 / 2)
    (tmp_path / "out" / "pieces" / "b-000.json").unlink()
    (tmp_path / "out" / "pieces" / "b.done.json").unlink()
    training_set(tmp_path / "in", tmp_path / "out", SETTINGS, recover, calibrate=True)  # the lens is kept
    assert len(given) == 9
