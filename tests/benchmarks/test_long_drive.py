"""benchmarks/long_drive.py by its command line, on a model that is as small as can be; and its paths."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_folder import write_latent_model

from merope.world.clips import WorldClips
from merope.world.clips_file import write_clips
from merope.world.commanded import FIRST_TEST_SEED
from merope.world.scene import World
from merope.world.street import LANE_M, street_coordinates

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import long_drive
import long_drive_picture

CLIPS = WorldClips(frames=21, height=32, width=64, frame_rate_hz=2.0, prefix_frames=9)
SETTINGS = ["laps-true", "laps-window6-sink3", "laps-window6-sink3-recall3"]


def command(place: Path, *more: str) -> Any:
    options = ["--model", place / "model", "--work", place / "work", "--out", place / "result.json", "--seconds", "50"]
    sized = ["--worlds", "1", "--workers", "1", "--steps", "1", "--settings", *SETTINGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["long_drive.py", *map(str, options), *sized, *more])
        laps = (long_drive.Setting("laps", 6, 3), long_drive.Setting("laps", 6, 3, recall=3))
        patch.setattr(long_drive, "SETTINGS", (long_drive.Setting("laps", 0, 0), *laps))
        patch.setattr(long_drive, "WINDOW_FRAMES", 13)
        patch.setattr(long_drive, "EVERY_S", 25.0)
        long_drive.main()
    return json.loads((place / "result.json").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("long")
    write_latent_model(place / "model")
    write_clips(place / "model", CLIPS, 1)
    return place


@pytest.fixture(scope="module")
def report(place: Path) -> Any:
    return command(place)


def test_every_setting_is_driven_and_scored(place: Path, report: Any) -> None:
    assert [row["setting"] for row in report["drives"]] == SETTINGS
    trial = long_drive.Trial(place / "model", place / "work", 50.0, 1)
    assert trial.frames == 9 + 12 * 8
    starts = sorted({row["start_s"] for row in report["windows"]})
    assert len(report["windows"]) == len(SETTINGS) * len(starts)
    true, made, recalled = report["drives"]
    assert set(true["psnr_db"]) == {60.0}
    assert len(made["psnr_db"]) == math.ceil(trial.frames / 2)
    assert made["psnr_db"][:4] == [60.0] * 4  # what is given
    assert made["psnr_db"][5:] != recalled["psnr_db"][5:]
    assert true["psnr_to_lap_before_db"] == made["true_psnr_to_lap_before_db"]
    assert min(true["true_psnr_to_lap_before_db"]) > 30  # the same place


def test_the_page_has_a_line_for_each_setting(place: Path, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_drive, "WINDOW_FRAMES", 13)
    long_drive_picture.draw(report, place / "picture.png")
    long_drive_picture.sheet(report, place / "work", place / "frames.webp")
    assert (place / "picture.png").stat().st_size > 10_000
    assert (place / "frames.webp").stat().st_size > 1_000
    printed = long_drive_picture.tables(report)
    assert all(printed.count(f"| {name} |") == len(long_drive_picture.ERRORS) for name in SETTINGS)
    assert "laps-true: second lap to first lap" in printed


def test_finished_drives_are_kept(place: Path, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_drive, "true_frames", None)  # a call would be an error
    assert command(place)["drives"] == report["drives"]


def test_less_than_the_turn_is_refused(place: Path) -> None:
    with pytest.raises(ValueError, match=r"--seconds must be at least 50, got 20\.0"):
        command(place, "--seconds", "20")


@pytest.mark.parametrize("seed", range(FIRST_TEST_SEED, FIRST_TEST_SEED + 3))
def test_the_road_ends_in_the_right_lane_of_the_side_street(seed: int) -> None:
    clips = WorldClips(frames=49, height=144, width=256, frame_rate_hz=16.0, prefix_frames=9)
    poses = long_drive.road(seed, 960, clips)
    side = World(seed).streets.each(lambda of_all: of_all[0, 3].double())
    turned = torch.atan2(poses[:, 0, 2], poses[:, 2, 2])
    straight = int((turned - side.heading_rad).abs().argmin())  # the turn is over
    assert 15 < straight / 16 < 45
    off_m, _ = street_coordinates(side, poses[straight + 64, 0, 3], poses[straight + 64, 2, 3])
    assert abs(float(off_m) - LANE_M / 2) < 1.5
    steps = poses[1:, :3, 3] - poses[:-1, :3, 3]
    assert float((16 * steps.norm(dim=-1) - long_drive.ROAD_M_S).abs().max()) < 1e-3
