"""Recovered poses are believed only if a second estimator finds the same path."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scenes import curved_drive, random_poses
from torch import Tensor

from merope import formats
from merope.cli import main
from merope.evaluate import recover as recover_module
from merope.evaluate.estimators import ESTIMATORS
from merope.evaluate.estimators.estimator import PoseEstimate, failed
from merope.evaluate.estimators.structure_from_motion import ColmapEstimator
from merope.evaluate.metrics import pose_metrics
from merope.evaluate.recover import EstimatorChoice
from merope.evaluate.results import EVERYTHING, Results, as_text
from merope.evaluate.run import evaluate
from merope.evaluate.trust import MAX_SHIFT_PERCENT, MAX_TURN_DEG, difference
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_video
from merope.geometry.lenses import Lens
from merope.world.clips import WorldClips
from merope.world.commanded import WorldTest, commanded_clips
from tests.evaluate.clip_files import FRAMES, kinds, outputs, write_clip, write_path

RIGHT, WRONG = curved_drive(FRAMES, yaw_step_rad=0.075), curved_drive(FRAMES, yaw_step_rad=0.2)
Answer = Callable[[Tensor], PoseEstimate]


def found(path: Tensor, name: str = "stand-in") -> PoseEstimate:  # [T, 4, 4]
    return PoseEstimate(path, torch.ones(len(path), dtype=torch.bool), False, name, inliers=40)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Answer], None]:
    """Put an estimator of that name in place whose answer depends on the frames."""

    def install_one(name: str, answer: Answer) -> None:
        def estimate(frames: Tensor, lens: Lens | None) -> PoseEstimate:
            return answer(frames)

        monkeypatch.setitem(ESTIMATORS, name, lambda: estimate)
        recover_module.built.cache_clear()

    return install_one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Clip b is brighter, by which stand-ins tell the two apart."""
    for name, brightness in (("a", 90), ("b", 170)):
        write_path(tmp_path / f"commanded/{name}.json", curved_drive(FRAMES))
        write_clip(tmp_path / f"videos/{name}.mp4", brightness)
    return tmp_path


def run(folder: Path, check: str, name: str = "first", out: str = "out") -> Results:
    choice = EstimatorChoice(name, check=check)
    return evaluate(folder / "commanded", {"ours": folder / "videos"}, choice, folder / out)


def wrong_in_b(frames: Tensor) -> PoseEstimate:
    return found(WRONG if float(frames.float().mean()) > 130 else RIGHT, "first")


def test_paths_are_compared_without_their_world_and_scale() -> None:
    world = random_poses(1)[0]
    moved = world @ RIGHT
    moved[:, :3, 3] *= 7.0
    same = difference(found(RIGHT), found(moved))
    assert same is not None
    assert same.turn_deg == pytest.approx(0.0, abs=1e-5)
    assert same.shift_percent == pytest.approx(0.0, abs=1e-6)
    other = difference(found(RIGHT), found(WRONG))
    assert other is not None
    assert other.turn_deg == pytest.approx(pose_metrics(RIGHT, WRONG).rot_deg)
    assert not other.is_small


def test_paths_with_few_frames_in_common_are_not_compared() -> None:
    few = PoseEstimate(RIGHT, torch.arange(FRAMES) < 3, False, "stand-in")
    assert difference(found(RIGHT), few) is None
    assert difference(found(RIGHT), failed(FRAMES, "stand-in", "nothing")) is None


@pytest.mark.parametrize(("still", "moving"), [(0, 0), (0, 1)])
def test_a_camera_that_stands_still_agrees_with_another_only(still: int, moving: int) -> None:
    standing = torch.eye(4, dtype=torch.float64).repeat(FRAMES, 1, 1)
    paths = (found(standing), found(RIGHT))
    compared = difference(paths[still], paths[moving])
    assert compared is not None
    assert compared.is_small == (still == moving)


def test_a_clip_on_which_estimators_disagree_is_in_no_mean_and_counted(
    folder: Path, install: Callable[[str, Answer], None]
) -> None:
    install("first", wrong_in_b)
    install("second", lambda frames: found(RIGHT, "second"))
    results = run(folder, "second")
    a, b = results.clips
    assert (a.record.trusted, b.record.trusted) == (True, False)
    assert a.record.doubt == ""
    assert a.record.check.startswith("second differs by 0°")
    assert b.record.doubt.startswith("the estimators disagree: second differs by")
    assert kinds(results) == {"b": {"not trusted"}}
    summary = results.summaries[EVERYTHING]["ours"]
    expected = pose_metrics(curved_drive(FRAMES), RIGHT)
    assert (summary.clips, summary.values["rot_deg"].count, summary.values["auc_10"].count) == (1, 1, 1)
    assert summary.values["rot_deg"].mean == pytest.approx(expected.rot_deg)
    assert results.counts(EVERYTHING, "ours").not_trusted == 1


def test_every_output_says_who_is_not_trusted(folder: Path, install: Callable[[str, Answer], None]) -> None:
    install("first", wrong_in_b)
    install("second", lambda frames: found(RIGHT, "second"))
    results = run(folder, "second")
    text = as_text(results)
    assert "ours: 2 clips, 1 not trusted: the estimators disagree" in text
    assert "1 of 2, 1 not trusted" in text
    document = json.loads((folder / "out/results.json").read_text())
    assert [clip["trusted"] for clip in document["clips"]] == [True, False]
    assert document["clips"][1]["doubt"] == results.clips[1].record.doubt
    assert document["clips"][0]["inliers"] == 40
    assert document["counts"] == {"ours": {"commanded": 2, "measured": 1, "not_trusted": 1}}
    assert document["settings"]["checked_by"] == "second"
    with (folder / "out/clips.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["trusted"], row["doubt"]) for row in rows] == [("yes", ""), ("no", results.clips[1].record.doubt)]
    page = (folder / "out/report.html").read_text()
    assert "<strong>1</strong> not trusted" in page
    assert "<li>ours: 2 clips, 1 not trusted</li>" in page
    assert page.index('data-name="b"') < page.index('data-name="a"')  # before all numbers
    before = outputs(folder / "out")
    run(folder, "second")  # from the records
    assert outputs(folder / "out") == before


def test_outputs_hold_when_no_clip_is_trusted(folder: Path, install: Callable[[str, Answer], None]) -> None:
    install("first", lambda frames: found(WRONG, "first"))
    install("second", lambda frames: found(RIGHT, "second"))
    results = run(folder, "second")
    assert results.summaries[EVERYTHING] == {}
    assert "0 of 2, 2 not trusted" in as_text(results)
    page = (folder / "out/report.html").read_text()
    assert 'class="doubted"' in page
    assert "rot°" in page


@pytest.mark.parametrize("stops", [False, True])
def test_a_second_estimator_without_an_answer_leaves_the_clip_measured_and_named(
    folder: Path, install: Callable[[str, Answer], None], stops: bool
) -> None:
    def answer(frames: Tensor) -> PoseEstimate:
        if stops:
            raise RuntimeError("no luck")
        return failed(len(frames), "second", "lost")

    install("first", wrong_in_b)
    install("second", answer)
    results = run(folder, "second")
    assert kinds(results) == {"a": {"not checked"}, "b": {"not checked"}}
    assert results.summaries[EVERYTHING]["ours"].values["rot_deg"].count == 2
    assert ("no luck" if stops else "second found a pose in 0 of 7 frames") in results.problems[0].reason


def test_small_frames_need_a_second_estimator_that_agrees(folder: Path, install: Callable[[str, Answer], None]) -> None:
    install("first", lambda frames: found(RIGHT, ColmapEstimator.name))
    install("second", lambda frames: found(RIGHT, "second"))
    alone, confirmed = run(folder, "none", out="alone"), run(folder, "second", out="confirmed")
    assert [clip.record.trusted for clip in alone.clips] == [False, False]
    assert "36×64 are too small for colmap-global alone" in alone.clips[0].record.doubt
    assert [clip.record.trusted for clip in confirmed.clips] == [True, True]
    assert kinds(confirmed) == {"a": {"small frames"}, "b": {"small frames"}}


def test_who_checks_whom() -> None:
    assert EstimatorChoice("colmap").second == EstimatorChoice("opencv", check="none")
    assert EstimatorChoice("colmap", check="none").second is None
    assert EstimatorChoice("vggt").second is None
    assert EstimatorChoice("opencv", check="colmap").second == EstimatorChoice("colmap", check="none")
    prints = {EstimatorChoice("colmap", check=check).fingerprint() for check in ("default", "none")}
    assert len(prints) == 2


def test_help_names_the_default_and_its_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "or colmap (colmap)" in said
    assert "by default opencv checks colmap" in said


def test_true_renders_of_72_by_128_along_their_own_commands_give_no_large_error(tmp_path: Path) -> None:
    """COLMAP is 10° to 50° off on most of these and registers all frames; none of that may be in a mean."""
    (tmp_path / "commanded").mkdir()
    for clip in commanded_clips(WorldTest(worlds=2), WorldClips(), torch.device("cpu")):
        name = f"world-{clip.seed}_{clip.manoeuvre}"
        write_video(clip.true, tmp_path / f"videos/{name}.mp4", 4.0)
        path = Trajectory(clip.cameras.world_from_camera, True, "made by a test", lens=clip.cameras.lens)
        formats.write(path, tmp_path / f"commanded/{name}.json")
    results = evaluate(
        tmp_path / "commanded", {"true": tmp_path / "videos"}, EstimatorChoice("colmap"), tmp_path / "out"
    )
    wrong = [clip for clip in results.clips if clip.value("rot_deg") > 10.0]
    assert wrong  # else this shows nothing
    assert not any(clip.record.trusted for clip in wrong)
    for clip in results.clips:
        if clip.is_measured:
            assert clip.value("rot_deg") < MAX_TURN_DEG
            assert clip.value("tr_percent") < MAX_SHIFT_PERCENT
    counts = results.counts(EVERYTHING, "true")
    assert counts.commanded == 6
    assert counts.not_trusted >= len(wrong)
    assert f"6 clips, {counts.not_trusted} not trusted" in as_text(results)
