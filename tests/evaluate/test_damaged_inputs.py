"""Files that are damaged, foreign or hostile cost their own clip, run no code, and leave no process behind."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from scenes import PINHOLE, curved_drive

from merope import formats
from merope.cli import main
from merope.evaluate.discover import Problem
from merope.evaluate.fidelity import read_fidelity
from merope.evaluate.frechet import FrechetStatistics
from merope.evaluate.record import Thumbnail
from merope.evaluate.recover import EstimatorChoice, built
from merope.evaluate.results import Results
from merope.evaluate.run import evaluate
from merope.evaluate.workers import worker_pool
from merope.formats.parts import usable_cores
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_video
from tests.evaluate.clip_files import FRAMES, kinds, write_clip, write_path

OLD = Path(__file__).parents[1] / "data/written-by-0.1.0/evaluate"
ROOT = Path(__file__).parents[2]


def write_clips(folder: Path, *names: str) -> None:
    """Clips with their commanded and recovered paths."""
    for name in names:
        write_path(folder / f"commanded/{name}.json", curved_drive(FRAMES))
        write_path(folder / f"estimates/{name}.json", curved_drive(FRAMES, yaw_step_rad=0.08))
        write_clip(folder / f"videos/{name}.mp4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_clips(tmp_path, "bad", "fine")
    return tmp_path


def run(folder: Path, **options: object) -> Results:
    given = folder / "commanded", {"ours": folder / "videos"}, EstimatorChoice("precomputed"), folder / "out"
    return evaluate(*given, estimates=folder / "estimates", **options)


def nested(file: Path) -> None:
    file.write_text("[" * 100_000)


def huge_array(file: Path) -> None:
    """The header of an array of 2⁶⁰ numbers, and none of them."""
    file.unlink()
    with file.with_suffix(".npy").open("wb") as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "<f8", "fortran_order": False, "shape": (1 << 56, 4, 4)})


def cut_model(file: Path) -> None:
    """A COLMAP model whose images.bin ends in the middle of an image."""
    file.unlink()
    model = file.with_suffix("")
    formats.write(Trajectory(curved_drive(FRAMES), False, "made by a test", lens=PINHOLE), model, "colmap")
    for text in model.glob("*.txt"):
        text.unlink()
    (model / "cameras.bin").write_bytes((1).to_bytes(8, "little"))
    (model / "images.bin").write_bytes((3).to_bytes(8, "little") + b"\0" * 20)
    (model / "points3D.bin").write_bytes((0).to_bytes(8, "little"))


def far_away(file: Path) -> None:
    document = json.loads(file.read_text())
    document["frames"][3]["world_from_camera"][0][3] = 1e200
    file.write_text(json.dumps(document))


@pytest.mark.parametrize("damage", [nested, huge_array, cut_model, far_away])
def test_a_bad_pose_file_costs_its_own_clip(folder: Path, damage: object) -> None:
    damage(folder / "commanded/bad.json")
    results = run(folder)
    assert kinds(results) == {"bad": {"unreadable poses"}}
    assert results.problems[0].reason
    assert [clip.is_measured for clip in results.clips] == [False, True]


@pytest.mark.parametrize("damage", [nested, far_away])
def test_a_bad_recovered_path_costs_its_own_clip(folder: Path, damage: object) -> None:
    damage(folder / "estimates/bad.json")
    assert kinds(run(folder)) == {"bad": {"estimator stopped"}}


def test_names_that_are_not_utf8_are_evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = os.fsdecode(b"caf\xe9")
    for place, suffix in (("commanded", "json"), ("estimates", "json"), ("videos", "mp4")):
        (folder / place / f"bad.{suffix}").rename(folder / place / f"{odd}.{suffix}")
    arguments = [f"--commanded={folder / 'commanded'}", f"--videos={folder / 'videos'}", f"--out={folder / 'out'}"]
    given = [*arguments, "--estimator=precomputed", f"--estimates={folder / 'estimates'}", "--workers=1"]
    for _ in range(2):  # the second time from the records
        assert main(["evaluate", *given]) == 0
        document = json.loads((folder / "out/results.json").read_text(encoding="utf-8"))
        assert [clip["clip"] for clip in document["clips"]] == ["caf?", "fine"]
    (folder / f"videos/{odd}.mp4").write_bytes(b"none")
    assert main(["evaluate", *given]) == 0
    assert "caf?: unreadable video" in capsys.readouterr().out


def test_cells_that_look_like_formulas_are_text(tmp_path: Path) -> None:
    names = ["=1+1", "+1", "-1", "@sum"]
    write_clips(tmp_path, *names)
    run(tmp_path)
    with (tmp_path / "out/clips.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["clip"] for row in rows} == {f"'{name}" for name in names}
    assert all(float(row["rot_deg"]) > 0 for row in rows)


SCRIPT = '"><script>alert(1)</script>'


def edited(folder: Path, change: object) -> Path:
    """A finished run whose record of one clip was changed by hand."""
    run(folder)
    (file,) = (folder / "out/clips/ours").glob("bad-*.json")
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["thumbnails"][0].update(jpeg_base64=SCRIPT),
        lambda record: record["thumbnails"][0].update(width=SCRIPT),
        lambda record: record.pop("doubt"),
        lambda record: record.pop("commanded"),
        lambda record: record.update(inliers=SCRIPT),
        lambda record: record.update(note=3),
        lambda record: record.update(valid=[True]),
        lambda record: record.update(commanded=-1),
        lambda record: record.update(recovered=7.5),
        lambda record: record["commanded"][1].pop(),
        lambda record: record["recovered"][1].__setitem__(0, 10**30),
        lambda record: record["recovered"][1].__setitem__(0, 10**400),
        lambda record: record["recovered"][1].__setitem__(0, 7.0),
        lambda record: record["clip"].update(base=3),
        lambda record: record.update(problems=[{"method": "ours", "clip": "bad", "kind": "worse", "reason": ""}]),
    ],
)
def test_a_record_that_was_edited_or_lacks_something_is_made_again(
    folder: Path, change: object, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder)
    page = (folder / "out/report.html").read_bytes()
    edited(folder, change)
    capsys.readouterr()
    run(folder)
    assert "1 of 2 clips are done again" in capsys.readouterr().err
    assert (folder / "out/report.html").read_bytes() == page


def test_text_of_an_edited_record_is_shown_as_text(folder: Path) -> None:
    edited(folder, lambda record: record.update(doubt=SCRIPT, check=SCRIPT, note=SCRIPT, estimator=SCRIPT))
    results = run(folder)
    assert results.clips[0].record.doubt == SCRIPT
    assert "<script>alert" not in (folder / "out/report.html").read_text()


def test_thumbnails_and_problems_take_nothing_else() -> None:
    with pytest.raises(ValueError, match="base64"):
        Thumbnail(0, SCRIPT, 4, 4)
    with pytest.raises(ValueError, match="of a kind among"):
        Problem("ours", "clip", "worse", "")


def test_files_of_the_first_version_are_read_or_made_again_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    before = json.loads((tmp_path / "out/results.json").read_text())
    results = run(tmp_path, fidelity=tmp_path / "fidelity/fidelity.json")
    assert "1 of 1 clips are done again" in capsys.readouterr().err
    after = json.loads((tmp_path / "out/results.json").read_text())
    assert set(before) <= set(after)
    assert after["clips"][0].items() >= {key: before["clips"][0][key] for key in ("clip", "method", "note")}.items()
    assert results.clips[0].value("rot_deg") == pytest.approx(before["clips"][0]["metrics"]["rot_deg"], rel=1e-9)
    assert read_fidelity(tmp_path / "fidelity/fidelity.json").methods["ours"].scores["fid"].count == FRAMES
    (statistics,) = (tmp_path / "fidelity/statistics").glob("*.npz")
    assert FrechetStatistics.load(statistics).count == FRAMES


def test_results_of_another_program_among_the_paths_are_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "commanded/results.json").write_text('{"settings": {}, "paths": {"straight": 3}}')
    assert kinds(run(folder)) == {}
    assert "results.json is no pose file, and no video has its name: left alone" in capsys.readouterr().err
    (folder / "commanded/results.json").write_text('{"settings": ')  # damaged: it may have been a path
    assert kinds(run(folder)) == {"results": {"unreadable poses"}}
    (folder / "commanded/results.json").write_text("{}")
    write_clip(folder / "videos/results.mp4")  # somebody meant it
    assert kinds(run(folder)) == {"results": {"unreadable poses"}}


def test_a_folder_without_any_pose_file_is_refused(tmp_path: Path) -> None:
    for place in ("commanded", "videos", "estimates"):
        (tmp_path / place).mkdir()
    (tmp_path / "commanded/results.json").write_text("{}")
    with pytest.raises(ValueError, match="at least one path, got none"):
        run(tmp_path)


def test_a_video_of_another_frame_rate_than_its_path_is_named(folder: Path) -> None:
    path = formats.read(folder / "commanded/bad.json")
    for poses_hz, found in ((12.0, set()), (12.1, set()), (30.0, {"other frame rate"})):
        times_s = torch.arange(path.count, dtype=torch.float64) / poses_hz
        formats.write(replace(path, timestamps_s=times_s), folder / "commanded/bad.json")
        results = run(folder)
        assert kinds(results) == ({"bad": found} if found else {})
    assert "the video has 12 frames per second, the path 30 poses" in results.problems[0].reason
    assert results.clips[0].is_measured


def test_a_video_of_another_shape_than_its_lens_is_named(folder: Path) -> None:
    write_video(torch.full((FRAMES, 36, 192, 3), 128, dtype=torch.uint8), folder / "videos/bad.mp4", 12.0)
    results = run(folder)
    assert kinds(results) == {"bad": {"other shape"}}
    assert results.problems[0].reason == "the video is 36×192, the lens of the path is of 144×256"
    assert results.clips[0].is_measured


def test_options_of_a_format_reach_its_reader(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Trajectory(curved_drive(FRAMES), True, "made by a test")
    (folder / "commanded/bad.json").unlink()
    formats.write(path, folder / "commanded/bad.json", "recammaster")
    document = json.loads((folder / "commanded/bad.json").read_text())
    for frame in document.values():
        (camera,) = list(frame)
        frame |= {"cam08": frame[camera]}
    (folder / "commanded/bad.json").write_text(json.dumps(document))
    (folder / "commanded/fine.json").unlink()
    arguments = [f"--commanded={folder / 'commanded'}", f"--videos={folder / 'videos'}", f"--out={folder / 'out'}"]
    given = ["evaluate", *arguments, "--estimator=precomputed", f"--estimates={folder / 'estimates'}", "--workers=1"]
    assert main(given) == 2
    assert "bad: unreadable poses" in capsys.readouterr().out
    assert main([*given, "--trajectory-option", "camera=cam08"]) == 0
    assert "unreadable poses" not in capsys.readouterr().out
    assert json.loads((folder / "out/results.json").read_text())["settings"]["trajectory_options"] == {
        "camera": "cam08"
    }


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--commanded", "--commanded must be a file or folder that exists"),
        ("--videos", "videos of nowhere must be a folder"),
        ("--estimates", "--estimates must be a file or folder that exists"),
        ("--fidelity", "--fidelity must be a file or folder that exists"),
        ("--checkpoint", "--checkpoint must be a file or folder that exists"),
    ],
)
def test_a_missing_file_is_named_at_once(
    folder: Path, option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--commanded={folder / 'commanded'}", f"--videos={folder / 'videos'}", f"--out={folder / 'out'}"]
    assert main(["evaluate", *arguments, f"{option}={folder / 'nowhere'}"]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "nowhere" in message


@pytest.mark.parametrize("package", ["cv2", "pycolmap", "av", "PIL"])
def test_a_missing_package_is_named_before_a_video_is_opened(
    folder: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises ModuleNotFoundError
    built.cache_clear()
    (folder / "videos/bad.mp4").write_bytes(b"never read")
    with pytest.raises(ModuleNotFoundError, match=package):
        evaluate(folder / "commanded", {"ours": folder / "videos"}, EstimatorChoice("colmap"), folder / "out")
    assert not (folder / "out").exists()


def test_detector_files_are_programs_and_need_consent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.jit, "load", lambda *given, **options: pytest.fail("loaded without consent"))
    (folder / "detector.pt").write_bytes(b"a program")
    given = [f"--videos={folder / 'videos'}", f"--reference={folder / 'videos'}", f"--out={folder / 'out'}"]
    assert main(["fidelity", *given, f"--inception={folder / 'detector.pt'}"]) == 2
    assert "pass --allow-code if you trust" in capsys.readouterr().err


SLOW_RUN = """
import sys, time
from concurrent.futures import wait
from merope.evaluate.workers import worker_pool

if __name__ == "__main__":
    with worker_pool(2) as pool:
        started = [pool.submit(time.sleep, 0.5) for _ in range(2)]
        wait(started)
        print(*pool._processes, flush=True)
        wait([pool.submit(time.sleep, 600) for _ in range(2)])
"""


def test_workers_leave_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "slow_run.py"
    script.write_text(SLOW_RUN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(_is_alive(worker) for worker in workers)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline_s = time.monotonic() + 30.0
    while any(_is_alive(worker) for worker in workers):
        assert time.monotonic() < deadline_s, "workers are left behind"
        time.sleep(0.1)


def test_opencv_leaves_the_cores_of_other_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)  # of a machine that gives this process fewer
    with worker_pool(2) as pool:
        assert pool.submit(cv2.getNumThreads).result() == max(usable_cores() // 2, 1)


def _is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("command", ["evaluate", "curate"])
def test_a_manifest_nested_without_end_is_named(
    folder: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nested = tmp_path / "nested.jsonl"
    nested.write_text("[" * 100_000)
    sources = {
        "evaluate": [f"--commanded={nested}", f"--videos={folder / 'videos'}"],
        "curate": [f"--videos={nested}"],
    }
    assert main([command, *sources[command], f"--out={tmp_path / 'out'}"]) == 2
    assert "nested.jsonl, line 1" in capsys.readouterr().err
