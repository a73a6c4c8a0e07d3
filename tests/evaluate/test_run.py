"""A folder run: who is matched with whom, what each trouble counts as, and that interruptions leave no trace."""

import csv
import io
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import pytest
import torch
from PIL import Image
from scenes import PINHOLE, curved_drive, straight_drive
from torch import Tensor

from merope import formats
from merope.cli import EXTRAS, main
from merope.evaluate import recover as recover_module
from merope.evaluate.estimators import ESTIMATORS
from merope.evaluate.estimators.estimator import PoseEstimate, failed
from merope.evaluate.metrics import pose_metrics
from merope.evaluate.recover import EstimatorChoice
from merope.evaluate.results import EVERYTHING, Results, as_text
from merope.evaluate.run import evaluate
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_first_frames
from merope.geometry.lenses import Lens, Pinhole
from tests.evaluate.clip_files import BLACK, FRAMES, WHITE, kinds, outputs, write_clip, write_path


@dataclass
class StandIn:
    """Recovers `path` unless the frames are black; remembers how often it was asked; may be interrupted."""

    path: Tensor  # [T, 4, 4]
    calls: int = 0
    interrupt_at: int | None = None
    seen_lens: Lens | None = None

    def __call__(self, frames: Tensor, lens: Lens | None) -> PoseEstimate:
        self.calls += 1
        self.seen_lens = lens
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        level = float(frames.float().mean())
        if level > 250:
            raise RuntimeError("out of memory")
        if level < 5:
            return failed(len(frames), "stand-in", "nothing to see")
        valid = torch.ones(len(frames), dtype=torch.bool)
        return PoseEstimate(self.path[: len(frames)], valid, False, "stand-in", weights_sha256="ab" * 32)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    def install(**options: object) -> StandIn:
        made = StandIn(curved_drive(FRAMES, yaw_step_rad=0.08), **options)
        monkeypatch.setitem(ESTIMATORS, "stand-in", lambda: made)
        recover_module.built.cache_clear()
        return made

    return install


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every trouble of the issue's acceptance, among clips that are fine."""
    commanded, videos = tmp_path / "commanded", tmp_path / "videos"
    for name in ("left/fine", "right/fine", "fine", "corrupt", "short", "long", "unseen", "no-video"):
        write_path(commanded / f"{name}.json", curved_drive(FRAMES))
        write_clip(videos / f"{name}.mp4")
    write_path(commanded / "static.json", straight_drive(FRAMES, step_m=0.0))
    write_clip(videos / "static.mp4")
    write_clip(videos / "short.mp4", frames=4)
    write_clip(videos / "long.mp4", frames=10)
    write_clip(videos / "unseen.mp4", BLACK)
    write_clip(videos / "nobody-asked.mp4")
    (videos / "corrupt.mp4").write_bytes(b"\0" * 2000)
    (videos / "no-video.mp4").unlink()
    (commanded / "garbled.json").write_text("{")
    write_clip(videos / "garbled.mp4")
    return tmp_path


def run(folder: Path, out: str = "out", **options: object) -> Results:
    videos = {"ours": folder / "videos"}
    return evaluate(folder / "commanded", videos, EstimatorChoice("stand-in"), folder / out, **options)


EXPECTED = {
    "corrupt": {"unreadable video"},
    "short": {"fewer frames"},
    "long": {"more frames"},
    "unseen": {"recovery failed"},
    "no-video": {"no video"},
    "static": {"undefined"},
    "nobody-asked": {"no trajectory"},
    "garbled": {"unreadable poses"},
}


def test_every_trouble_is_named_everywhere_and_ends_nothing(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    stand_in()
    results = run(folder)
    assert kinds(results) == EXPECTED
    document = json.loads((folder / "out/results.json").read_text())
    with (folder / "out/clips.csv").open() as file:
        rows = list(csv.DictReader(file))
    text, page = as_text(results), (folder / "out/report.html").read_text()
    for clip, (kind,) in EXPECTED.items():
        reason = next(one.reason for one in results.problems if one.clip == clip)
        assert {"clip": clip, "kind": kind} in [{k: p[k] for k in ("clip", "kind")} for p in document["problems"]]
        assert [(row["problems"], row["reasons"]) for row in rows if row["clip"] == clip] == [(kind, reason)]
        assert f"{clip}: {kind}: {reason}" in text
        assert kind in page
        assert clip in page
    assert all(problem["counts"] for problem in document["problems"])
    failed = {"corrupt", "unseen", "no-video", "garbled"}
    assert {row["clip"] for row in rows if row["trusted"] == "no"} == failed
    assert {clip["clip"] for clip in document["clips"] if not clip["trusted"]} == failed


def test_what_failed_is_in_no_mean_but_a_miss_in_the_auc(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    path = stand_in().path
    summary = run(folder).summaries[EVERYTHING]["ours"]
    assert summary.clips == 9  # all but the garbled path
    assert summary.failed_clips == 3
    whole = pose_metrics(curved_drive(FRAMES), path)
    short = pose_metrics(curved_drive(FRAMES), path, torch.arange(FRAMES) < 4)
    static = pose_metrics(straight_drive(FRAMES, step_m=0.0), path)
    assert summary.values["rot_deg"].count == 6
    assert summary.values["rot_deg"].mean == pytest.approx((4 * whole.rot_deg + short.rot_deg + static.rot_deg) / 6)
    assert summary.values["tr_percent"].count == 5
    assert summary.values["tr_percent"].mean == pytest.approx((4 * whole.tr_percent + short.tr_percent) / 5)
    assert summary.values["auc_10"].count == 9
    assert summary.values["auc_10"].mean < 100 * 5 / 9
    assert summary.failed_frames == 3 * FRAMES + 3


def test_a_clip_with_few_poses_is_called_failed_and_all_outputs_count_alike(
    folder: Path, stand_in: Callable[..., StandIn]
) -> None:
    stand_in()
    write_clip(folder / "videos/short.mp4", frames=3)  # of seven: less than half, so in no mean
    results = run(folder)
    assert kinds(results)["short"] == {"fewer frames", "too few poses"}
    assert results.summaries[EVERYTHING]["ours"].failed_clips == 4
    assert "5 of 10\n" in as_text(results)  # the clip whose path cannot be read is commanded, too
    assert "5<small>of 10</small>" in (folder / "out/report.html").read_text()


def test_manoeuvres_have_their_own_summaries(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    stand_in()
    results = run(folder)
    assert list(results.summaries) == [EVERYTHING, "original", "left", "right"]
    assert [results.summaries[name]["ours"].clips for name in ("original", "left", "right")] == [1, 1, 1]


def test_interrupted_runs_go_on_and_give_the_same(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    whole = stand_in()
    run(folder, "whole")
    interrupted = stand_in(interrupt_at=3)
    with pytest.raises(KeyboardInterrupt):
        run(folder, "twice")
    assert not (folder / "twice/results.json").exists()
    resumed = stand_in()
    run(folder, "twice")
    assert resumed.calls == whole.calls - (interrupted.calls - 1)
    assert outputs(folder / "twice") == outputs(folder / "whole")
    again = stand_in()
    run(folder, "twice")
    assert again.calls == 0
    assert outputs(folder / "twice") == outputs(folder / "whole")


@pytest.mark.parametrize("out", ["commanded", "commanded/out"])
def test_results_among_the_commanded_paths_are_no_paths(
    folder: Path, stand_in: Callable[..., StandIn], out: str
) -> None:
    stand_in()
    run(folder, out)
    first = outputs(folder / out)
    assert kinds(run(folder, out)) == EXPECTED
    assert outputs(folder / out) == first


def test_records_of_a_method_with_any_name_are_no_paths(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    stand_in()
    commanded, videos = folder / "commanded", {"MeRoPE 5.1 (ours)": folder / "videos"}
    for _ in range(2):
        results = evaluate(commanded, videos, EstimatorChoice("stand-in"), commanded / "out")
        assert kinds(results) == EXPECTED


def test_command_line_says_how_to_go_on(
    folder: Path, stand_in: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(interrupt_at=2)
    given = [f"--commanded={folder / 'commanded'}", f"--videos={folder / 'videos'}", f"--out={folder / 'out'}"]
    assert main(["evaluate", *given, "--estimator=stand-in", "--workers=1"]) == 130
    assert "run the same command to go on" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_are_refused(
    folder: Path, stand_in: Callable[..., StandIn], capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    stand_in()
    given = [f"--commanded={folder / 'commanded'}", f"--videos={folder / 'videos'}", f"--out={folder / 'out'}"]
    assert main(["evaluate", *given, "--estimator=stand-in", f"--workers={workers}"]) == 2
    assert f"workers must be at least 1, got {workers}" in capsys.readouterr().err


def test_a_clip_is_done_again_when_its_files_changed(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    stand_in()
    run(folder)
    write_clip(folder / "videos/fine.mp4", 90)
    write_path(folder / "commanded/long.json", straight_drive(FRAMES))
    (damaged,) = (folder / "out/clips/ours").glob("static-*.json")
    damaged.write_text('{"half": ')
    again = stand_in()
    results = run(folder)
    assert again.calls == 3
    assert kinds(results) == EXPECTED


def test_an_estimator_that_stops_is_named_and_tried_again(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    write_clip(folder / "videos/fine.mp4", WHITE)
    stand_in()
    first = run(folder)
    assert kinds(first)["original/fine"] == {"estimator stopped"}
    assert "RuntimeError: out of memory" in [problem.reason for problem in first.problems]
    again = stand_in()
    run(folder)
    assert again.calls == 1


def test_the_estimator_gets_the_lens_for_the_size_of_the_video(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    estimator = stand_in()
    run(folder)
    assert estimator.seen_lens is not None
    assert (estimator.seen_lens.width, estimator.seen_lens.height) == (64, 36)
    assert float(estimator.seen_lens.fx) == pytest.approx(float(PINHOLE.fx) * 64 / PINHOLE.width)


def test_a_field_of_view_stands_in_for_a_missing_lens(
    tmp_path: Path, stand_in: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Trajectory(curved_drive(FRAMES), True, "", torch.arange(FRAMES, dtype=torch.float64))
    (tmp_path / "commanded").mkdir()
    formats.write(path, tmp_path / "commanded/fine.txt", "tum")
    write_clip(tmp_path / "videos/fine.mp4")
    estimator = stand_in()
    given = [f"--commanded={tmp_path / 'commanded'}", f"--videos={tmp_path / 'videos'}", f"--out={tmp_path / 'out'}"]
    command = ["evaluate", *given, "--estimator=stand-in", "--workers=1"]
    assert main(command) == 0
    assert estimator.seen_lens is None
    assert main([*command, "--fov=90"]) == 0
    assert isinstance(estimator.seen_lens, Pinhole)
    assert float(estimator.seen_lens.fx) == pytest.approx(estimator.seen_lens.width / 2)
    assert main([*command, "--fov=180"]) == 2
    assert "fov must be between 0 and 180 degrees" in capsys.readouterr().err


def test_nothing_measured_is_an_error(
    tmp_path: Path, stand_in: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    write_path(tmp_path / "commanded/unseen.json", curved_drive(FRAMES))
    write_clip(tmp_path / "videos/unseen.mp4", BLACK)
    stand_in()
    given = [f"--commanded={tmp_path / 'commanded'}", f"--videos={tmp_path / 'videos'}", f"--out={tmp_path / 'out'}"]
    assert main(["evaluate", *given, "--estimator=stand-in", "--workers=1"]) == 2
    shown = capsys.readouterr()
    assert "measured, got none of 1; mend the problems above" in shown.err
    assert "unseen: recovery failed" in shown.out
    assert (tmp_path / "out/report.html").exists()


def test_a_video_of_one_frame_has_failed_and_says_so(tmp_path: Path) -> None:
    write_path(tmp_path / "commanded/a.json", curved_drive(FRAMES))
    write_path(tmp_path / "estimates/a.json", curved_drive(1))
    (tmp_path / "videos").mkdir()
    write_clip(tmp_path / "videos/a.mp4", frames=1)
    choice, videos = EstimatorChoice("precomputed"), {"ours": tmp_path / "videos"}
    results = evaluate(tmp_path / "commanded", videos, choice, tmp_path / "out", estimates=tmp_path / "estimates")
    assert kinds(results) == {"a": {"fewer frames", "recovery failed"}}


def test_a_video_whose_size_changes_is_unreadable(stand_in: Callable[..., StandIn], folder: Path) -> None:
    stand_in()
    write_growing_video(folder / "videos/corrupt.mkv")
    (folder / "videos/corrupt.mp4").unlink()
    results = run(folder)
    assert kinds(results)["corrupt"] == {"unreadable video"}
    assert any("different sizes" in problem.reason for problem in results.problems)


def write_growing_video(file: Path) -> None:
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mjpeg", rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuvj420p"
        for t in range(FRAMES):
            buffer = io.BytesIO()
            Image.new("RGB", (64, 32) if t < 4 else (96, 48)).save(buffer, "JPEG")
            packet = av.Packet(buffer.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, t, t, Fraction(1, 12)
            container.mux(packet)


def test_thumbnails_are_the_frames_of_the_papers_figures(tmp_path: Path) -> None:
    from merope.evaluate.record import thumbnails

    assert [one.frame for one in thumbnails(torch.zeros(49, 8, 16, 3, dtype=torch.uint8))] == [0, 16, 32, 48]
    assert [one.frame for one in thumbnails(torch.zeros(2, 8, 16, 3, dtype=torch.uint8))] == [0, 1]
    write_clip(tmp_path / "a.mp4", frames=5)
    frames, count = read_first_frames(tmp_path / "a.mp4", 3)
    assert (frames.shape, count) == ((3, 36, 64, 3), 5)


def test_a_missing_package_ends_the_run_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_path(tmp_path / "commanded/clip.json", curved_drive(FRAMES))
    write_clip(tmp_path / "videos/clip.mp4")
    monkeypatch.setitem(sys.modules, "pycolmap", None)  # importing it raises ModuleNotFoundError
    recover_module.built.cache_clear()
    folders = ["--commanded", str(tmp_path / "commanded"), "--videos", str(tmp_path / "videos")]
    command = ["evaluate", *folders, "--estimator", "colmap", "--workers", "1", "--out", str(tmp_path / "report")]
    assert main(command) == 2
    assert "pycolmap is not installed: pip install 'merope[eval]'" in capsys.readouterr().err
    assert not (tmp_path / "report" / "results.json").exists()


def test_every_extra_that_a_message_names_exists() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
