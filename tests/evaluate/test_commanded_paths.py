"""Commanded paths that can be read but not be right: in another unit, torn apart, or odd."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scenes import curved_drive, straight_drive

from merope import formats
from merope.cli import main
from merope.evaluate.recover import EstimatorChoice
from merope.evaluate.results import Results
from merope.evaluate.run import evaluate
from merope.formats.trajectory import Trajectory
from tests.evaluate.clip_files import FRAMES, kinds, write_clip, write_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two clips with their commanded and recovered paths."""
    for name in ("bad", "fine"):
        write_path(tmp_path / f"commanded/{name}.json", curved_drive(FRAMES))
        write_path(tmp_path / f"estimates/{name}.json", curved_drive(FRAMES, yaw_step_rad=0.08))
        write_clip(tmp_path / f"videos/{name}.mp4")
    return tmp_path


def run(folder: Path) -> Results:
    given = folder / "commanded", {"ours": folder / "videos"}, EstimatorChoice("precomputed"), folder / "out"
    results = evaluate(*given, estimates=folder / "estimates")
    assert results is not None
    return results


def rewritten(file: Path, rate_hz: float, scale: float = 1.0, backwards: bool = False) -> None:
    """A drive of 49 frames at 8 m/s whose times or positions are in another unit, or that looks back."""
    poses = straight_drive(49, step_m=8.0 / 12)
    poses[:, :3, 3] *= -scale if backwards else scale
    formats.write(Trajectory(poses, True, "made by a test", torch.arange(49, dtype=torch.float64) / rate_hz), file)


def jump(file: Path) -> None:
    rewritten(file, 12.0)
    document = json.loads(file.read_text())
    document["frames"][3]["world_from_camera"][0][3] = 1e9
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (jump, "jumps in position or orientation, between frames 2→3, 3→4, one of 1e+09 m"),
        (lambda file: rewritten(file, 12.0, scale=100.0), "positions are not in metres"),
        (lambda file: rewritten(file, 12e-3), "times are not in seconds"),
    ],
)
def test_a_path_that_nothing_can_follow_is_in_no_number(
    folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(folder / "commanded/bad.json")
    results = run(folder)
    assert kinds(results) == {"bad": {"wrong path"}}
    assert words in results.problems[0].reason
    assert str(results.counts("all clips", "ours")) == "1 of 2"
    assert results.summaries["all clips"]["ours"].values["tr_percent"].mean < 100.0


def test_a_doubtful_path_is_measured_and_named(folder: Path) -> None:
    for place in ("commanded", "estimates"):
        rewritten(folder / place / "bad.json", 12.0, backwards=True)
    write_clip(folder / "videos/bad.mp4", frames=49)
    results = run(folder)
    assert kinds(results) == {"bad": {"doubtful path"}}
    assert "as if driving backwards" in results.problems[0].reason
    assert [clip.is_measured for clip in results.clips] == [True, True]
    assert kinds(run(folder)) == {"bad": {"doubtful path"}}  # from the record


def test_the_folders_inside_a_data_set_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `merope data synth --layout videos` writes it."""
    drives = tmp_path / "my drives"
    write_path(drives / "poses/a.json", curved_drive(FRAMES))
    write_clip(drives / "videos/a.mp4")
    given = [f"--commanded={drives}", f"--videos={drives}", f"--out={tmp_path / 'out'}", "--workers=1"]
    assert main(["evaluate", *given]) == 2
    said = capsys.readouterr().err
    assert f"pass the folders inside: --commanded '{drives}/poses', videos from '{drives}/videos'" in said
