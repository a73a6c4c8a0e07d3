"""benchmarks/world.py and benchmarks/world_picture.py by their command lines, on a model that is as small as can be."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from merope.bench.groups import BENCHMARKS
from merope.bench.result_files import parts_of
from merope.bench.scoring_pool import make_ready, scoring_pool
from merope.train.checkpoint import complete
from tests.bench.made_up_results import write_result

ROOT = Path(__file__).parents[2]
WORLD, PICTURE = ROOT / "benchmarks" / "world.py", ROOT / "benchmarks" / "world_picture.py"
PART = ("weights", "scoring", "generated_s", "generated_on", "rows", "clips")
TAB_BLUE = (31, 119, 180)
SMALLEST = (
    "run.batch_size=1",
    "run.micro_batch=1",
    "run.validation_clips=0",
    "model.compile=false",
    "model.precision=fp32",
    "model.architecture.num_attention_heads=1",
    "model.architecture.ffn_dim=32",
    "model.architecture.num_layers=2",
    "data.frames=4",
    "objective.prefix_frames=2",
    "optimiser.decay_steps=0",  # so that a stopped run may go on to another step than it was begun for
)


def arguments(steps: int, *more: str) -> list[str]:
    changes = [word for change in (*SMALLEST, f"run.steps={steps}") for word in ("--set", change)]
    return [str(WORLD), "--seeds", "0", "--worlds", "1", "--workers", "1", "--results", "results", *changes, *more]


def run_script(monkeypatch: pytest.MonkeyPatch, script_and_words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", script_and_words)
    runpy.run_path(script_and_words[0], run_name="__main__")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def rows_in_training(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two rows that would train for hours, in two processes, started by one in a group of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments(10**6, "--rows", "none", "gta", "--at-once", "2")]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_rows_at_once_stop_by_one_signal_and_go_on(
    rows_in_training: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {name: tmp_path / "outputs" / "world" / f"{name}-seed0" for name in ("none", "gta")}
    wait_until(lambda: all(lines(folder / "log.jsonl") for folder in folders.values()), 120.0)
    rows_in_training.terminate()  # this one process, not its group
    assert rows_in_training.wait(60.0) == 0
    wait_until(lambda: not is_alive(rows_in_training.pid), 10.0)  # nobody of the group is left
    done = {}
    for name, folder in folders.items():
        steps = [line["step"] for line in lines(folder / "log.jsonl")]
        assert steps == list(range(1, len(steps) + 1))  # one process had the row: no step was made twice
        (place,) = complete(folder / "checkpoints")
        assert place.name == f"step-{steps[-1]:08d}"
        done[name] = steps[-1]
    monkeypatch.chdir(tmp_path)
    check_a_row_goes_on(done["gta"], folders["gta"], monkeypatch, capsys)
    check_a_row_is_scored_elsewhere(done["gta"] + 1, folders["gta"], monkeypatch, capsys)
    check_a_test_is_added(done["gta"] + 1, monkeypatch, capsys)


def check_a_row_goes_on(
    done: int,  # steps
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The row before it fails: its results are there, of a run that is not. That costs the other nothing."""
    lost = write_result(Path("results"), "ucpe", 0, 1.0)
    with pytest.raises(SystemExit, match=r"ucpe-seed0\.json must be absent"):
        run_script(monkeypatch, arguments(done + 1, "--rows", "ucpe", "gta"))
    said = capsys.readouterr()
    assert "wrote gta seed 0\n1 of 2 rows are left\n" in said.out
    assert "ucpe-seed0 failed" in said.err
    assert json.loads(Path("results/ucpe-seed0.json").read_text()) == lost
    pieces = lines(folder / "pieces.jsonl")
    assert [(piece["from"], piece["to"]) for piece in pieces] == [(0, done), (done, done + 1)]
    result = json.loads(Path("results/gta-seed0.json").read_text())
    assert (result["row"], result["steps"], len(result["clips"])) == ("gta", done + 1, 3)
    assert result["trained_s"] == pytest.approx(sum(piece["wall_s"] for piece in pieces), abs=0.1)


def check_a_row_is_scored_elsewhere(
    steps: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --rows, what is there is scored; rows that are not leave nothing behind."""
    here, elsewhere = Path.cwd(), Path.cwd() / "elsewhere"
    run_script(monkeypatch, arguments(steps, "--rows", "gta", "--until", "generated"))
    assert capsys.readouterr().out.endswith("0 of 1 rows are left\n")
    there = elsewhere / folder.relative_to(here)
    there.mkdir(parents=True)
    shutil.copy(folder / "generated.safetensors", there)
    monkeypatch.chdir(elsewhere)
    run_script(monkeypatch, arguments(steps, "--score-only"))
    assert "wrote gta seed 0\n0 of 1 rows are left\n" in capsys.readouterr().out
    results = [json.loads((folder / "results" / "gta-seed0.json").read_text()) for folder in (here, elsewhere)]
    assert results[0]["weights"] == results[1]["weights"]
    assert results[0]["clips"].keys() == results[1]["clips"].keys()
    assert [file.name for file in there.parent.iterdir() if file.is_dir()] == ["gta-seed0"]
    with pytest.raises(SystemExit, match="--at-once must be 1 with --score-only, got 2; give it more --workers"):
        run_script(monkeypatch, arguments(steps, "--score-only", "--at-once", "2", "--beside"))
    monkeypatch.chdir(here)


def check_a_test_is_added(steps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The others of its file stay as they are. What is there is not made again."""
    file = Path("results/gta-seed0.json")
    before = json.loads(file.read_text())
    before["sweep"] = [{key: before[key] for key in PART} | {"test": before["test"] | {"stretch": 2.0}}]
    file.write_text(json.dumps(before))
    run_script(monkeypatch, arguments(steps, "--rows", "gta", "--stretch", "4"))
    after = json.loads(file.read_text())
    assert [part["test"]["stretch"] for part in parts_of(after)] == [1.0, 2.0, 4.0]
    assert after["sweep"][0] == before["sweep"][0]
    assert after["clips"] == before["clips"]
    assert after["sweep"][1]["clips"] != before["clips"]
    assert "wrote gta seed 0\n0 of 1 rows are left\n" in capsys.readouterr().out
    run_script(monkeypatch, arguments(steps, "--rows", "gta", "--stretch", "2"))
    assert "wrote no row\n0 of 1 rows are left\n" in capsys.readouterr().out
    assert json.loads(file.read_text()) == after


def test_signals_do_not_break_a_pool_whose_workers_are_still_starting() -> None:
    """A terminal's Ctrl-C reaches them seconds before their first line runs."""
    with scoring_pool(2) as pool:
        future = pool.submit(abs, -3)
        workers = active_children()
        assert workers
        for worker in workers:
            assert worker.pid is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(worker.pid, number)
        assert future.result(60.0) == 3


def test_workers_read_their_libraries_before_the_first_clip_comes() -> None:
    with scoring_pool(2) as pool:
        assert not active_children()
        make_ready(pool)
        assert len(active_children()) == 2
        assert pool.submit(eval, "'merope.bench.scores' in __import__('sys').modules").result(60.0)
    with scoring_pool(1) as pool:
        make_ready(pool)
        assert not active_children()


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_pictures_are_drawn(
    benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "results", tmp_path / "images"
    out.mkdir()
    write_result(results, "none", 0, 8.0)
    write_result(results, "merope", 0, 2.0)
    command = [str(PICTURE), "--benchmark", benchmark, "--results", str(results), "--out", str(out)]
    run_script(monkeypatch, command)
    files = [out / f"{benchmark}-rows.png", out / f"{benchmark}-sweep.png"]
    assert list(out.iterdir()) == files[:1]  # there is no sweep to draw
    two_rows = pixels(files[0])
    write_result(results, "gta", 0, 3.0, stretches=(1.0, 2.0, 4.0))
    write_result(results, "merope", 0, 2.0, stretches=(1.0, 2.0, 4.0))
    run_script(monkeypatch, command)
    assert capsys.readouterr().out.splitlines()[-1] == "wrote " + ", ".join(map(str, files))
    three_rows, sweep = map(pixels, files)
    assert three_rows.shape[0] > two_rows.shape[0]
    for picture in (two_rows, three_rows, sweep):
        assert (picture == TAB_BLUE).all(axis=2).sum() > 100  # MeRoPE's dots, bars and lines
    own = "history-sa" if benchmark == "miniature" else "long-raynova"
    write_result(results, own, 0, 3.0)
    run_script(monkeypatch, command)
    assert pixels(files[0]).shape[0] > three_rows.shape[0]  # a row that the other benchmark does not have


def pixels(file: Path) -> np.ndarray:  # uint8 [H, W, 3]
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))
