"""A folder run: who is matched with whom, what each trouble counts as, and that interruptions leave no trace."""

import csv
import io
import json
import math
import multiprocessing
import os
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

from merope.cli import main
from merope.data import formats
from merope.data.trajectory import Trajectory
from merope.data.video import write_video
from merope.evaluate import recover as recover_module
from merope.evaluate.discover import ClipName, match, read_commanded
from merope.evaluate.estimators import ESTIMATORS
from merope.evaluate.estimators.protocol import PoseEstimate, failed
from merope.evaluate.metrics import pose_metrics
from merope.evaluate.record import Record
from merope.evaluate.recover import EstimatorChoice, decode
from merope.evaluate.results import EVERYTHING, IN_COMMON, Results, as_text, measure
from merope.evaluate.run import Task, _in_processes, evaluate
from merope.geometry.lenses import Lens

FRAMES = 7
GREY, BLACK, WHITE = 128, 0, 255


def write_path(file: Path, poses: Tensor) -> None:  # [T, 4, 4]
    file.parent.mkdir(parents=True, exist_ok=True)
    formats.write(Trajectory(poses, True, "made by a test", lens=PINHOLE), file)


def write_clip(file: Path, brightness: int = GREY, frames: int = FRAMES) -> None:
    write_video(torch.full((frames, 32, 64, 3), brightness, dtype=torch.uint8), file, 12.0)


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


def kinds(results: Results) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for problem in results.problems:
        found.setdefault(problem.clip, set()).add(problem.kind)
    return found


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


def test_every_trouble_is_named_everywhere_and_ends_nothing(
    folder: Path, stand_in: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "0 s left" in capsys.readouterr().err


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


def test_manoeuvres_have_their_own_summaries(folder: Path, stand_in: Callable[..., StandIn]) -> None:
    stand_in()
    results = run(folder)
    assert list(results.summaries) == [EVERYTHING, "original", "left", "right"]
    assert [results.summaries[name]["ours"].clips for name in ("original", "left", "right")] == [1, 1, 1]


def outputs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("results.json", "clips.csv", "report.html")}


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


def test_command_line_says_how_to_go_on(
    folder: Path, stand_in: Callable[..., StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(interrupt_at=2)
    given = [f"--commanded={folder / 'commanded'}", f"--videos={folder / 'videos'}", f"--out={folder / 'out'}"]
    assert main(["evaluate", *given, "--estimator=stand-in", "--workers=1"]) == 130
    assert "run the same command to go on" in capsys.readouterr().err


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
    assert (estimator.seen_lens.width, estimator.seen_lens.height) == (64, 32)
    assert float(estimator.seen_lens.fx) == pytest.approx(float(PINHOLE.fx) * 64 / PINHOLE.width)


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


class Deadly:
    """A choice whose estimator takes its process with it."""

    checkpoint = None

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


def test_thumbnails_are_the_frames_of_the_papers_figures(tmp_path: Path) -> None:
    from merope.evaluate.record import thumbnails

    assert [one.frame for one in thumbnails(torch.zeros(49, 8, 16, 3, dtype=torch.uint8))] == [0, 16, 32, 48]
    assert [one.frame for one in thumbnails(torch.zeros(2, 8, 16, 3, dtype=torch.uint8))] == [0, 1]
    write_clip(tmp_path / "a.mp4", frames=5)
    frames, count = decode(tmp_path / "a.mp4", 3)
    assert (frames.shape, count) == ((3, 32, 64, 3), 5)
