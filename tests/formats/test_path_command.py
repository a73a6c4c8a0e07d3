"""`merope path`: paths from a few numbers, in any format, and from one format to another."""

import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from merope import formats
from merope.cli import main
from merope.geometry.drives import straight_drive, turning_drive
from merope.geometry.lenses import Pinhole, UnifiedCamera


def test_a_turn_as_our_json_with_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "bend.json"
    assert main(["path", "turn", str(out), "--yaw-rate", "-15", "--speed", "6", "--picture"]) == 0
    said = capsys.readouterr().out
    assert f"wrote {out}: 49 poses, 4 s, 24 m long, top speed 6 m/s, largest yaw rate 15°/s" in said
    path = formats.read(out)
    expected = turning_drive(6.0, math.radians(-15.0), 0.75, 4.0, 12.0)
    torch.testing.assert_close(path.world_from_camera, expected, rtol=0, atol=1e-12)
    assert path.is_metric
    assert isinstance(path.lens, Pinhole)
    assert (path.lens.width, path.lens.height) == (512, 288)
    assert 2 * math.degrees(math.atan(256 / float(path.lens.fx))) == pytest.approx(70.0)
    assert path.timestamps_s is not None
    torch.testing.assert_close(path.timestamps_s, torch.arange(49, dtype=torch.float64) / 12, rtol=0, atol=1e-12)
    assert Image.open(out.with_suffix(".birdseye.png")).size == (480, 480)
    assert formats.validate(path) == []


def test_driving_backwards_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for speed, is_backwards in (("3", False), ("-3", True)):
        assert main(["path", "turn", str(tmp_path / "a.json"), "--yaw-rate", "5", "--speed", speed]) == 0
        assert ("°/s, driving backwards\n" in capsys.readouterr().out) == is_backwards


def test_a_radius_is_a_yaw_rate(tmp_path: Path) -> None:
    for name, sharpness in (("a", ["--radius", "20"]), ("b", ["--yaw-rate", str(math.degrees(8.0 / 20.0))])):
        assert main(["path", "turn", str(tmp_path / f"{name}.json"), *sharpness]) == 0
    a, b = (formats.read(tmp_path / f"{name}.json").world_from_camera for name in "ab")
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("what", "out", "format"),
    [
        (["straight"], "path.txt", "tum"),
        (["shift", "--offset", "3"], "model", "colmap"),
        (["stop"], "path.json", "merope"),
        (["straight", "--fov", "140", "--xi", "1"], "path.npy", "panshot"),
        (["stop"], "path.npy", "panshot"),
        (["keys", "--keys", "w*30 a*20"], "path.json", "merope"),
        (["keys", "--keys", "w*30 a*20", "--format", "keys"], "path.keys", "keys"),
        (["straight", "--format", "vggt"], "path.npz", "vggt"),
        (["straight", "--format", "lingbot"], "folder", "lingbot"),
        (["straight", "--format", "kitti"], "path.poses", "kitti"),
        (["straight", "--format", "nerfstudio"], "path.json", "nerfstudio"),
    ],
)
def test_formats_by_suffix_and_by_name(tmp_path: Path, what: list[str], out: str, format: str) -> None:
    assert main(["path", *what, str(tmp_path / out)]) == 0
    assert formats.detect(tmp_path / out) == format
    assert formats.read(tmp_path / out).count >= 49


def test_keys_are_driven_at_the_speed_and_rate_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["path", "keys", str(tmp_path / "a.json"), "--keys", "w*24 d*12", "--speed", "5", "--yaw-rate", "20"]
    assert main(command) == 0
    assert "37 poses, 3 s, 15 m long, top speed 5 m/s, largest yaw rate 20°/s" in capsys.readouterr().out
    assert main([*command[:4], "w*24 jump"]) == 2
    assert "got 'jump'" in capsys.readouterr().err


def test_a_path_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{1_000_000 * k // 12} 0.7 1.2 0.5 0.5 0 0 1 0 0 0 0 1 0 0 0 0 1 {-8 * k / 12}" for k in range(49)]
    (tmp_path / "re10k.txt").write_text("video\n" + "\n".join(rows) + "\n")
    arguments = ["path", "convert", str(tmp_path / "re10k.txt"), str(tmp_path / "path.json")]
    assert main([*arguments, "--option", "image_size=[640,360]"]) == 0
    assert "49 poses, 4 s, 32 units long, top speed 8 units/s" in capsys.readouterr().out
    path = formats.read(tmp_path / "path.json")
    assert path.lens is not None
    assert (path.is_metric, path.lens.width) == (False, 640)
    torch.testing.assert_close(path.world_from_camera, straight_drive(8.0, 4.0, 12.0), rtol=0, atol=1e-9)
    assert main(["path", "convert", str(tmp_path / "path.json"), str(tmp_path / "tum.txt")]) == 2
    assert "trajectory.is_metric must be True for tum" in capsys.readouterr().err
    assert main(["path", "convert", str(tmp_path / "path.json"), str(tmp_path / "tum.txt"), "--assume-metric"]) == 0
    assert main(["path", "convert", str(tmp_path / "tum.txt"), str(tmp_path / "kitti.txt"), "--format", "kitti"]) == 0
    assert f"wrote {tmp_path / 'kitti.txt'}: 49 poses without times, 32 m long" in capsys.readouterr().out
    assert main(["path", "convert", str(tmp_path / "kitti.txt"), str(tmp_path / "last.json")]) == 0
    assert "49 poses without times, 32 m long" in capsys.readouterr().out


def test_a_fisheye(tmp_path: Path) -> None:
    assert main(["path", "straight", str(tmp_path / "a.json"), "--fov", "140", "--xi", "1", "--size", "72", "128"]) == 0
    lens = formats.read(tmp_path / "a.json").lens
    assert isinstance(lens, UnifiedCamera)
    assert (lens.width, lens.height) == (128, 72)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["straight", "path.mp4"], "out must be a name that ends in .json, .txt or .npy"),
        (["turn", "path.json", "--radius", "0"], "radius must be positive"),
        (["stop", "path.json", "--seconds", "4"], "seconds must be at least 9.75"),
        (["straight", "path.json", "--fps", "0"], "seconds and fps"),
        (["shift", "path.json", "--offset", "3", "--speed", "0"], "moving after frame"),
        (["convert", "nowhere.txt", "path.json"], "nowhere.txt"),
        (["straight", "path.json", "--format", "openexr"], "format must be one of merope"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["path", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_says_what_looks_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (f"{1000 * k / 12} 0 0 {k / 2} 0 0 0 1" for k in range(30))
    (tmp_path / "milliseconds.txt").write_text("\n".join(lines))
    assert main(["path", "convert", str(tmp_path / "milliseconds.txt"), str(tmp_path / "path.json")]) == 0
    assert "times are not in seconds" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["path=1", "format=tum", "is_metric=1", "lens=1", "camera=" + "[" * 100_000])
def test_what_is_no_option_of_a_format_is_refused(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["path", "straight", str(tmp_path / "path.txt")]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["path", "convert", str(tmp_path / "path.txt"), str(tmp_path / "path.json"), "--option", option])
    message = capsys.readouterr().err
    assert "not an option of a format" in message or "nested too deeply" in message


def test_no_file_that_was_there_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the path that is read, by whatever name, nor one beside it, nor a reconstruction."""
    path, model = tmp_path / "drive.json", tmp_path / "model"
    assert main(["path", "turn", str(path), "--yaw-rate", "12"]) == 0
    before = path.read_bytes()

    def refused(expected: str, *words: str) -> None:
        assert main(["path", *words]) == 2
        assert expected in capsys.readouterr().err
        assert path.read_bytes() == before

    refused("drive.json must be absent, or the sidecar", "convert", str(path), str(path.with_suffix(".npy")))
    assert not path.with_suffix(".npy").exists()
    refused("must be absent, or the sidecar", "straight", str(path.with_suffix(".npy")))
    refused("out must be another file than the path", "convert", str(path), str(tmp_path / "x" / ".." / "drive.json"))
    refused("out must be a new folder", "straight", str(tmp_path))
    assert main(["path", "convert", str(path), str(model)]) == 0
    assert main(["path", "convert", str(path), str(model)]) == 0  # its own model, once more
    (model / "cameras.bin").write_bytes(b"")
    refused("must be a folder without a reconstruction, got cameras.bin", "straight", str(model))
    (model / "cameras.bin").unlink()
    (model / "points3D.txt").write_text("# a comment\n1 0 0 0 0 0 0 0.5\n")
    refused("got points in points3D.txt", "straight", str(model))
    assert main(["path", "straight", str(tmp_path / "own.npy")]) == 0
    assert main(["path", "straight", str(tmp_path / "own.npy"), "--speed", "5"]) == 0  # with its own sidecar


def test_what_is_printed_is_what_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path", "straight", str(tmp_path / "path.json")]) == 0
    assert capsys.readouterr().err == ""
    assert main(["path", "convert", str(tmp_path / "path.json"), str(tmp_path / "other.npy")]) == 0
    said = capsys.readouterr()
    assert said.out == f"wrote {tmp_path / 'other.npy'}: 49 poses without times, 32 units long\n"
    assert "warning: panshot has no place for times and unit: say it where" in said.err
