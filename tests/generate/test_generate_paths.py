"""What a clip is to be generated from: times, zoom, lenses of other sizes, metres; files that do not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import curved_drive, straight_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH

from merope import formats
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_image, write_video
from merope.generate.camera_path import at_frame_rate
from merope.generate.drive_inputs import KEYS, DriveConfig, route_from_files
from merope.generate.inputs import GenerateConfig, camera_path, warn_of_idle_weights
from merope.geometry.lenses import Pinhole, UnifiedCamera
from merope.geometry.trajectories import interpolate


def path_of(poses: torch.Tensor, rate_hz: float | None = None, **changes: Any) -> Trajectory:
    times_s = None if rate_hz is None else torch.arange(len(poses), dtype=torch.float64) / rate_hz
    return Trajectory(poses, is_metric=True, convention="a test", timestamps_s=times_s, **changes)


def config_of(trajectory: Path, **changes: Any) -> GenerateConfig:
    options = {"height": HEIGHT, "width": WIDTH, "frames": 5, **changes}
    return GenerateConfig("model", "branch", trajectory, Path("clip.mp4"), **options)


def test_poses_between_given_times() -> None:
    path = path_of(curved_drive(20), rate_hz=10.0)
    resampled = at_frame_rate(path, 12.0, most=100)
    assert resampled.count == 23  # 1.9 s
    assert path.timestamps_s is not None
    expected = interpolate(path.world_from_camera, path.timestamps_s, torch.arange(23, dtype=torch.float64) / 12.0)
    assert (resampled.world_from_camera - expected).abs().max() < 1e-9


def test_zoom_follows_time() -> None:
    lens = Pinhole(torch.arange(50.0, 60.0), 50.0, 32.0, 16.0, WIDTH, HEIGHT)
    resampled = at_frame_rate(path_of(straight_drive(10), rate_hz=10.0, lens=lens), 5.0, most=100)
    assert isinstance(resampled.lens, Pinhole)
    assert torch.as_tensor(resampled.lens.fx).tolist() == [50.0, 52.0, 54.0, 56.0, 58.0]


def test_poses_without_times_are_frames(tmp_path: Path) -> None:
    formats.write(path_of(curved_drive(7)), tmp_path / "path.txt", "kitti")
    path = camera_path(config_of(tmp_path / "path.txt", fov_deg=90.0))
    assert (path.world_from_camera - curved_drive(5)).abs().max() < 1e-12
    assert isinstance(path.lens, Pinhole)  # as branches are trained with: PRoPE and RayRoPE refuse any other
    assert abs(float(path.lens.fx) - WIDTH / 2) < 1e-9
    assert isinstance(camera_path(config_of(tmp_path / "path.txt", fov_deg=90.0, xi=1.0)).lens, UnifiedCamera)


def test_lens_is_scaled_with_the_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = Pinhole(200.0, 210.0, 120.0, 66.0, 4 * WIDTH, 4 * HEIGHT)
    formats.write(path_of(straight_drive(5), lens=large), tmp_path / "path.json")
    lens = camera_path(config_of(tmp_path / "path.json")).lens
    assert isinstance(lens, Pinhole)
    assert [float(v) for v in (lens.fx, lens.fy, lens.cx, lens.cy)] == [50.0, 52.5, 30.0, 16.5]
    assert "stretched" not in capsys.readouterr().err
    camera_path(config_of(tmp_path / "path.json", height=2 * HEIGHT))
    assert "stretched" in capsys.readouterr().err


def test_lens_of_another_file_and_metres_by_assertion(tmp_path: Path) -> None:
    sfm = replace(path_of(straight_drive(5)), is_metric=False)
    formats.write(sfm, tmp_path / "path.json")
    formats.write(path_of(straight_drive(2), lens=LENS), tmp_path / "lens.json")
    path = camera_path(config_of(tmp_path / "path.json", lens=tmp_path / "lens.json", assume_metric=True))
    assert path.is_metric
    assert isinstance(path.lens, Pinhole)
    assert float(path.lens.fx) == 50.0


def test_a_prefix_of_another_shape_than_the_lens_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scaled to the clip, its rays would not be those of the lens."""
    formats.write(path_of(straight_drive(5), lens=LENS), tmp_path / "path.json")
    for name, width in (("fits", WIDTH), ("narrow", WIDTH // 2)):
        write_video(torch.zeros(5, HEIGHT, width, 3, dtype=torch.uint8), tmp_path / f"{name}.mp4", 12.0)
    for options in ({"fov_deg": 65.0}, {}):
        camera_path(config_of(tmp_path / "path.json", prefix=tmp_path / "fits.mp4", **options))
        assert "do not fit" not in capsys.readouterr().err
        camera_path(config_of(tmp_path / "path.json", prefix=tmp_path / "narrow.mp4", **options))
        said = capsys.readouterr().err
        assert f"narrow.mp4 are {WIDTH // 2}×{HEIGHT}" in said
        assert "do not fit" in said


def test_images_of_another_shape_than_the_lens_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats.write(path_of(straight_drive(5), lens=LENS), tmp_path / "path.json")
    for name, width in (("fits", WIDTH), ("narrow", WIDTH // 2)):
        for k in range(5):
            write_image(torch.zeros(HEIGHT, width, 3, dtype=torch.uint8), tmp_path / name / f"{k}.png")
    clip = config_of(tmp_path / "path.json", prefix_frames=5)
    with_keys = {"keys": "w*5", "prefix_poses": tmp_path / "path.json"}
    for name in ("fits", "narrow"):
        clip = replace(clip, prefix=tmp_path / name)
        camera_path(clip)
        route_from_files(DriveConfig(clip))
        route_from_files(DriveConfig(replace(clip, trajectory=KEYS), **with_keys))
        said = f"{tmp_path / 'narrow'} are {WIDTH // 2}×{HEIGHT}"
        assert capsys.readouterr().err.count(said) == (3 if name == "narrow" else 0)


@pytest.mark.parametrize(
    "inputs", [{"trajectory": "drive.json"}, {"prefix": "drive.mp4"}, {"lens": "drive.cameras.json"}]
)
def test_no_output_replaces_an_input(tmp_path: Path, inputs: dict[str, str]) -> None:
    paths = {"trajectory": tmp_path / "path.json", **{name: tmp_path / file for name, file in inputs.items()}}
    with pytest.raises(ValueError, match="an input"):
        GenerateConfig(model="m", branch="b", out=tmp_path / "drive.mp4", **paths)


def test_models_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = GenerateConfig("~/wan", "owner/branch", Path("path.json"), Path("clip.mp4"), transformer="~/trained")
    assert (config.model, config.branch) == ("/home/someone/wan", "owner/branch")
    assert config.transformer == "/home/someone/trained"


def test_weights_that_were_trained_with_a_branch_are_not_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = tmp_path / "trained"
    (trained / "transformer").mkdir(parents=True)
    config = replace(config_of(tmp_path / "path.json"), branch=str(trained / "branch"))
    for quiet in (
        replace(config, transformer=str(trained / "transformer")),
        replace(config, model=str(trained)),  # the branch in a model's folder: its transformer runs
        replace(config, branch=str(tmp_path / "branch")),
        replace(config, branch="none"),
    ):
        warn_of_idle_weights(quiet.model, quiet.branch, quiet.transformer)
    assert capsys.readouterr().err == ""
    warn_of_idle_weights(config.model, config.branch, config.transformer)
    assert f"not the one trained with the branch; --transformer {trained / 'transformer'}" in capsys.readouterr().err


def test_a_path_that_is_cut_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats.write(path_of(straight_drive(61), rate_hz=12.0), tmp_path / "timed.json")
    formats.write(path_of(straight_drive(61)), tmp_path / "bare.json")
    for name in ("timed", "bare"):
        path = camera_path(config_of(tmp_path / f"{name}.json", fov_deg=90.0, frames=37))
        assert path.count == 37
        said = capsys.readouterr().err
        told = "lasts 5 s; the clip is its first 3 s; cut off its beginning to drive another part; "
        told += "merope drive makes all of it"
        assert said.splitlines() == [f"merope: {tmp_path / name}.json {told}"]
        camera_path(config_of(tmp_path / f"{name}.json", fov_deg=90.0, frames=61))
        assert capsys.readouterr().err == ""


def test_as_many_poses_are_made_as_the_clip_has(tmp_path: Path) -> None:
    """A day of one pose per second at 1,000 frames per second would be 86 million."""
    day = path_of(straight_drive(86_400, step_m=2.0), rate_hz=1.0)
    assert at_frame_rate(day, 1000.0, most=50).count == 50
    formats.write(path_of(straight_drive(10), rate_hz=10.0), tmp_path / "path.json")
    with pytest.raises(ValueError, match=r"fps must be positive and at most 1000, got 1e\+09"):
        config_of(tmp_path / "path.json", fov_deg=90.0, fps=1e9)


@pytest.mark.parametrize(("unit", "factor"), [("milliseconds", 1e3), ("nanoseconds", 1e9)])
def test_times_in_another_unit_make_no_clip(tmp_path: Path, unit: str, factor: float) -> None:
    """33.6 m in 4 s: in milliseconds the first 4 s of it were 0.03 m."""
    drive = path_of(straight_drive(49, step_m=0.7), rate_hz=12.0 / factor)
    formats.write(drive, tmp_path / "path.json")
    with pytest.raises(ValueError, match=rf"path.json: times are not in seconds.*if they are in {unit}, divide them"):
        camera_path(config_of(tmp_path / "path.json", fov_deg=90.0))
