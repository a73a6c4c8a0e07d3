"""`--part I/N`: parts and the run that joins them leave the very files of one run, also after a loss or a kill."""

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from merope.cli import main
from merope.curation import path_tables
from merope.datasets import cache, synth
from merope.evaluate import fidelity as fidelity_module
from merope.evaluate import record
from merope.evaluate.fidelity import fidelity
from merope.formats.parts import Part, own_or_all, usable_cores
from tests.evaluate.clip_files import write_clip, write_path
from tests.scenes import curved_drive

Run = Callable[[Path, str | None], None]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file by its place."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def command(*words: str) -> Run:
    """A command as a function of its folder and part."""

    def run(out: Path, part: str | None) -> None:
        assert main([*words, "--out", str(out), *([] if part is None else ["--part", part])]) == 0

    return run


class Brightness:
    """A detector whose features are those of a video alone."""

    name, weights_sha256, resize, is_per_frame = "brightness", "ab" * 32, "none", True

    def __call__(self, frames: Tensor) -> Tensor:  # uint8 [T, H, W, 3] -> [T, 4]
        means = frames.double().mean((1, 2))
        return torch.cat((means, means[:, :1] ** 2 / 97), dim=1)


def compare(files: Path) -> Run:
    def run(out: Path, part: str | None) -> None:
        detectors = [Brightness()]
        which = None if part is None else Part.of(part)
        fidelity({"ours": files / "videos"}, files / "real", detectors, out, prefix_frames=2, part=which)

    return run


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five videos with commanded and recovered paths, and four others."""
    root = tmp_path_factory.mktemp("videos")
    for number in range(5):
        write_path(root / "commanded" / f"clip-{number}.json", curved_drive(7, yaw_step_rad=0.02 * number))
        write_path(root / "estimates" / f"clip-{number}.json", curved_drive(7, yaw_step_rad=0.021 * number))
        write_clip(root / "videos" / f"clip-{number}.mp4", 40 + 20 * number)
    for number in range(4):
        write_clip(root / "real" / f"real-{number}.mp4", 50 + 30 * number)
    return root


@pytest.fixture(scope="module")
def commands(tiny_files: Path, videos: Path) -> dict[str, Run]:
    small = ("--scenes", "4", "--frames", "3", "--size", "32", "64")
    paths = ("--commanded", str(videos / "commanded"), "--videos", str(videos / "videos"))
    recovered = ("--estimator", "precomputed", "--estimates", str(videos / "estimates"), "--workers", "1")
    return {
        "cache": command("data", "cache", str(tiny_files / "tiny.toml")),
        "curate": command("curate", "--config", str(tiny_files / "tiny.toml"), "--clusters", "2"),
        "synth nuscenes": command("data", "synth", *small),
        "synth videos": command("data", "synth", "--layout", "videos", *small),
        "evaluate": command("evaluate", *paths, *recovered),
        "fidelity": compare(videos),
    }


NAMES = ("cache", "curate", "synth nuscenes", "synth videos", "evaluate", "fidelity")


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_joined_to_the_files_of_one_run(
    commands: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """In any order, one of them lost, which is said; a part that is repeated changes nothing."""
    run = commands[name]
    run(tmp_path / "whole", None)
    expected = tree(tmp_path / "whole")
    for part in ("3/3", "1/3", "1/3"):
        run(tmp_path / "parts", part)
    assert not tree(tmp_path / "parts").keys() >= expected.keys()
    capsys.readouterr()
    run(tmp_path / "parts", None)
    assert "part 2/3 did not finish" in capsys.readouterr().err
    assert tree(tmp_path / "parts") == expected
    for part in ("1/2", "2/2"):
        run(tmp_path / "all", part)
    run(tmp_path / "all", None)
    assert "did not finish" not in capsys.readouterr().err
    assert tree(tmp_path / "all") == expected


KILLED_AT = {  # the function that writes the files of a clip, the room that calls it, and at which call
    "cache": (cache, "write_checked", 2),
    "curate": (path_tables, "replace_tensors", 1),  # a part writes one table of its paths
    "synth nuscenes": (synth, "write_image", 2),
    "synth videos": (synth, "write_video", 2),
    "evaluate": (record, "replace_text", 2),
    "fidelity": (fidelity_module, "replace_tensors", 2),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_part_that_is_killed_is_repeated_without_loss(
    commands: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, (module, function, fatal) = commands[name], KILLED_AT[name]
    run(tmp_path / "whole", None)
    write, calls = getattr(module, function), []

    def killed(*given: object, **named: object) -> None:
        calls.append(given)
        if len(calls) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, killed)
        child = get_context("fork").Process(target=run, args=(tmp_path / "parts", "1/2"))
        child.start()
        child.join(timeout=60)
    assert child.exitcode == -signal.SIGKILL
    for part in ("1/2", "2/2", None):
        run(tmp_path / "parts", part)
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


def test_paths_that_changed_since_a_part_read_them_are_read_again(tmp_path: Path) -> None:
    """Files of another scale, say, that were repaired before the parts were joined."""
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for number, file in enumerate(files):
        write_path(file, curved_drive(9, step_m=1.5 + number))
    run = command("curate", "--clusters", "1", "--poses", *map(str, files))
    for part in ("1/2", "2/2"):
        run(tmp_path / "parts", part)
    for number, file in enumerate(files):
        write_path(file, curved_drive(9, step_m=0.5 + number))
        os.utime(file, (1e9, 1e9))  # as if a while after the parts
    run(tmp_path / "parts", None)
    run(tmp_path / "whole", None)
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


def test_what_a_part_made_is_not_made_again(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = compare(videos), []
    for part in ("1/2", "2/2"):
        run(tmp_path, part)
    monkeypatch.setattr(Brightness, "__call__", lambda self, frames: seen.append(frames))
    run(tmp_path, None)
    assert seen == []


def test_a_part_of_other_paths_is_not_taken(tmp_path: Path) -> None:
    """And a damaged file of a part is read anew."""
    for number in range(3):
        write_path(tmp_path / f"{number}.json", curved_drive(7, yaw_step_rad=0.1 * number))
    files = [str(tmp_path / f"{number}.json") for number in range(3)]
    run = command("curate", "--poses", *files, "--clusters", "1")
    run(tmp_path / "whole", None)
    command("curate", "--poses", *files[1:], "--clusters", "1")(tmp_path / "out", "1/2")
    run(tmp_path / "out", "1/2")
    left = sorted((tmp_path / "out" / ".parts").glob("*.safetensors"))
    assert len(left) == 2
    (mine,) = [file for file in left if len(load_file(file)["rows"]) == 2]
    mine.write_bytes(mine.read_bytes()[:40])
    run(tmp_path / "out", None)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_another_data_set_is_not_mixed_in(commands: dict[str, Run], tmp_path: Path) -> None:
    commands["synth nuscenes"](tmp_path / "out", "1/2")
    assert main(["data", "synth", "--scenes", "5", "--out", str(tmp_path / "out")]) == 2


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "1/-2", "1/"])
def test_parts_are_written_as_two_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "synth", "--out", "nowhere", "--part", text])
    assert "part must be I/N with I from 1 to N" in capsys.readouterr().err


def test_every_item_is_in_one_part() -> None:
    items = list(range(11))
    parts = [Part(number, 3).own(items) for number in (1, 2, 3)]
    assert sorted(item for part in parts for item in part) == items
    assert own_or_all(items, None) == items
    assert Part(3, 3).own([1]) == []


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {3, 5}, raising=False)
    assert usable_cores() == 2
    monkeypatch.delattr("os.sched_getaffinity")  # as on a Mac
    assert usable_cores() == 64
