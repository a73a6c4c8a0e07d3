"""A run of several methods, in one process or several: what is compared, and what broken processes cost."""

import json
import math
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from scenes import PINHOLE, curved_drive

from merope import formats
from merope.cli import main
from merope.evaluate.discover import ClipName, match, read_commanded
from merope.evaluate.record import Record
from merope.evaluate.recover import EstimatorChoice
from merope.evaluate.results import EVERYTHING, IN_COMMON, measure
from merope.evaluate.run import Task, _in_processes, evaluate
from merope.formats.trajectory import Trajectory
from tests.evaluate.clip_files import FRAMES, kinds, outputs, write_clip, write_path


@pytest.mark.parametrize("command_is_metric", [True, False])
def test_errors_in_metres_need_a_command_in_metres(tmp_path: Path, command_is_metric: bool) -> None:
    path = Trajectory(curved_drive(FRAMES), command_is_metric, "made by a test", lens=PINHOLE)
    (tmp_path / "commanded").mkdir()
    formats.write(path, tmp_path / "commanded/a.json")
    write_clip(tmp_path / "videos/a.mp4")
    write_path(tmp_path / "estimates/a.json", curved_drive(FRAMES, yaw_step_rad=0.08))
    given = tmp_path / "commanded", {"ours": tmp_path / "videos"}, EstimatorChoice("precomputed"), tmp_path / "out"
    (clip,) = evaluate(*given, estimates=tmp_path / "estimates").clips
    assert clip.metrics is not None
    assert (clip.metrics.ate_m is not None) == command_is_metric
    assert (clip.metrics.metric_tr_percent is not None) == command_is_metric


@pytest.fixture
def two_methods(tmp_path: Path) -> Path:
    """Recovered paths are given; one method lost a clip."""
    for name in ("a_left", "a_right", "b"):
        write_path(tmp_path / f"commanded/{name}.json", curved_drive(FRAMES))
        for method, yaw_step_rad in (("good", 0.07), ("bad", 0.12)):
            write_clip(tmp_path / f"videos/{method}/{name}.mp4")
            recovered = curved_drive(FRAMES, yaw_step_rad=yaw_step_rad)
            write_path(tmp_path / f"estimates/{method}/{name}.json", recovered)
    (tmp_path / "videos/bad/b.mp4").unlink()
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    methods = [f"--method={name}={folder / 'videos' / name}" for name in ("good", "bad")]
    common = ["evaluate", f"--commanded={folder / 'commanded'}", *methods, "--estimator=precomputed"]
    return [*common, f"--estimates={folder / 'estimates'}", *more]


def test_command_line_compares_methods(two_methods: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(two_methods, "--workers=1", f"--out={two_methods / 'out'}")) == 0
    printed = capsys.readouterr().out
    assert "bad: b: no video" in printed
    document = json.loads((two_methods / "out/results.json").read_text())
    assert document["settings"]["estimator"] == "precomputed"
    good, bad = (document["summaries"][EVERYTHING][name]["values"] for name in ("good", "bad"))
    assert good["cammc"]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert bad["cammc"]["mean"] > 0.1
    assert good["ate_m"]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert {row["clips"] for row in document["summaries"][IN_COMMON].values()} == {2}
    assert {clip["manoeuvre"] for clip in document["clips"]} == {"left", "right", ""}


def test_clips_in_common_are_those_in_the_means_of_every_method() -> None:
    """A pose in two of seven frames is in no mean, so the clip is none that both methods have."""
    path = curved_drive(FRAMES)
    found = {("one", "a"): FRAMES, ("one", "b"): 2, ("other", "a"): FRAMES, ("other", "b"): FRAMES}
    records = [
        Record(method, ClipName(clip), path, path, torch.arange(FRAMES) < count, False, True)
        for (method, clip), count in found.items()
    ]
    results = measure(records, [], {}, {})
    assert [clip.is_measured for clip in results.clips] == [True, False, True, True]
    assert {summary.values["cammc"].count for summary in results.summaries[IN_COMMON].values()} == {1}


def test_processes_give_the_same_as_one(two_methods: Path) -> None:
    for workers in (1, 2):
        assert main(arguments(two_methods, f"--workers={workers}", f"--out={two_methods / str(workers)}")) == 0
    assert outputs(two_methods / "1") == outputs(two_methods / "2")


@pytest.mark.parametrize("poses", [10, FRAMES])
def test_precomputed_poses_of_a_longer_video_are_those_of_its_first_frames(tmp_path: Path, poses: int) -> None:
    write_path(tmp_path / "commanded/a.json", curved_drive(FRAMES))
    write_path(tmp_path / "estimates/a.json", curved_drive(10)[:poses])
    (tmp_path / "videos").mkdir()
    write_clip(tmp_path / "videos/a.mp4", frames=10)
    choice, videos = EstimatorChoice("precomputed"), {"ours": tmp_path / "videos"}
    results = evaluate(tmp_path / "commanded", videos, choice, tmp_path / "out", estimates=tmp_path / "estimates")
    assert kinds(results) == {"a": {"more frames"}}
    assert results.clips[0].value("cammc") == pytest.approx(0.0, abs=1e-9)


class Deadly:
    """A choice whose estimator takes its process with it."""

    checkpoint = second = None

    @property
    def name(self) -> str:
        if multiprocessing.parent_process() is not None:
            os._exit(9)
        return "deadly"


def test_a_process_that_dies_costs_its_clip_only(two_methods: Path) -> None:
    commanded, videos = read_commanded(two_methods / "commanded"), {"good": two_methods / "videos/good"}
    recovering, _ = match(commanded, videos)
    given, _ = match(commanded, videos, two_methods / "estimates")  # needs no estimator
    tasks = [
        Task(index, job, Deadly(), two_methods / f"{index}.json", "")
        for index, job in enumerate((recovering[0], given[1]))
    ]
    records = dict(_in_processes(tasks, 1))
    assert [problem.kind for problem in records[0].problems] == ["estimator stopped"]
    assert "died" in records[0].problems[0].reason
    measured = measure([records[0], records[1]], [], {}, {}).summaries[EVERYTHING]["good"]
    assert (measured.clips, measured.failed_clips) == (2, 1)
    assert measured.values["auc_10"].mean == pytest.approx(50.0)  # every pair of the lost clip is a miss
    assert bool(records[1].valid.all())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--method=good=elsewhere"], "name of its own"),
        (["--method=third"], "NAME=FOLDER"),
        (["--method=third=/nowhere"], "a folder"),
        (["--estimator=sextant", "--workers=1"], "one of colmap"),
        (["--estimator=render-anchored"], "nothing but the video"),
        (["--estimator=colmap", "--check=colmap"], "check must be another estimator"),
        (["--estimator=colmap", "--check=sextant", "--workers=1"], "one of colmap"),
        (["--estimator=vggt"], "checkpoint"),
        (["--workers=-1"], "at least 1"),
    ],
)
def test_wrong_arguments_are_refused_before_work(
    two_methods: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(two_methods, f"--out={two_methods / 'out'}", *more)
    if any(word.startswith("--estimator") for word in more):
        given = [word for word in given if not word.startswith("--estimates")]
    assert main(given) == 2
    assert words in capsys.readouterr().err
    assert not (two_methods / "out").exists()


def test_a_real_estimator_runs_on_a_folder(tmp_path: Path) -> None:
    """OpenCV's tracker finds nothing to track in grey frames, and says so."""
    write_path(tmp_path / "commanded/a.json", curved_drive(FRAMES))
    write_clip(tmp_path / "videos/a.mp4")
    results = evaluate(
        tmp_path / "commanded", {"ours": tmp_path / "videos"}, EstimatorChoice("opencv"), tmp_path / "out"
    )
    (problem,) = results.problems
    assert problem.kind == "recovery failed"
    assert math.isnan(results.clips[0].value("cammc"))
