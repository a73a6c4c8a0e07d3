"""Rows from start to finish: pieces, deadlines, what a results file says."""

import json
import os
import pickle
import signal
import time
import weakref
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from merope.bench import rows
from merope.bench import scorer as scorer_module
from merope.bench.generated import generate_row, generated_file
from merope.bench.measured_rows import Row
from merope.bench.result_files import is_scored
from merope.bench.rows import run_rows, time_limit, train_row
from merope.bench.scorer import Scorer
from merope.bench.scores import floor_file, with_seed
from merope.bench.scoring_pool import scoring_pool
from merope.bench.table import group_table, read_rows, tables
from merope.evaluate.workers import InThisProcess
from merope.train import provenance as source
from merope.train.build import world_clips
from merope.train.checkpoint import complete
from merope.train.config import TrainConfig
from merope.train.loop import NonFiniteLoss, stop_requests, train
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED, MANOEUVRES, WorldTest, clips_of_world
from tests.train.tiny_runs import tiny_config

CPU = torch.device("cpu")
CLIPS_OF_TINY = WorldClips(frames=4, height=72, width=128, prefix_frames=2)
TEST = WorldTest(worlds=1, steps=2)


def seen_config(folder: Path) -> TrainConfig:
    """A tiny run whose frames are large enough to recover poses from."""
    return with_seed(tiny_config(folder / "row", "run.steps=2", "data.height=72", "data.width=128"), 3)


def test_a_row_starts_from_a_model_of_its_own_seed(tmp_path: Path) -> None:
    config = with_seed(tiny_config(tmp_path / "row", "model.pretrained=none-seed{seed}/trained"), 3)
    assert config.model.pretrained == "none-seed3/trained"
    assert config.run.out == tmp_path / "row-seed3"


def test_a_row_is_trained_generated_and_scored(tmp_path: Path) -> None:
    config = seen_config(tmp_path)
    assert config.run.out == tmp_path / "row-seed3"
    assert config.run.seed == 3
    with pytest.raises(ValueError, match="train it first"):
        generate_row(config, TEST, CPU)
    tests, results = [TEST, replace(TEST, stretch=2.0)], tmp_path / "results"
    assert not is_scored(config, tests, results)
    scorer = Scorer(InThisProcess(), results)
    assert run_rows([config], tests, scorer)
    videos = load_file(config.run.out / "generated.safetensors")
    truth = {
        clip.name: clip.true
        for clip in clips_of_world(TEST.paths(CLIPS_OF_TINY, FIRST_TEST_SEED), CLIPS_OF_TINY, FIRST_TEST_SEED, CPU)
    }
    assert sorted(videos) == sorted(truth)
    for name, video in videos.items():
        assert torch.equal(video[:2], truth[name][:2])  # the prefix is kept
        assert not torch.equal(video[2:], truth[name][2:])
    (result,) = scorer.written
    assert result == json.loads((config.run.out / "scores.json").read_text())
    assert result == json.loads((results / "row-seed3.json").read_text())
    check_what_a_result_says(result)
    assert is_scored(config, tests, results)
    assert not is_scored(config, [*tests, replace(TEST, stretch=4.0)], results)
    assert not is_scored(replace(config, run=replace(config.run, steps=3)), tests, results)
    assert "row | one | 2 |" in group_table([Row("row", {3: result})], None)
    assert "×2" in tables(read_rows(results))
    check_true_videos_score_perfectly(config, truth)


def check_what_a_result_says(result: dict) -> None:
    assert (result["row"], result["seed"], result["steps"], result["batch_size"]) == ("row", 3, 2, 4)
    assert result["parameters"] > 10_000
    assert result["torch"] == torch.__version__
    assert result["gpu"] == ("CPU" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert result["commit"] == source.commit()
    assert result["trained_s"] > 0
    assert result["rows_at_once"] == 1
    assert result["branch"]["encoding"] == "merope"
    assert result["generated_s"] >= 0
    assert (result["generated_on"], result["generated_in"], result["scored_on"]) == ("CPU", "fp32", result["gpu"])
    assert result["final_loss"] > 0
    assert result["validation_loss"] is None  # the tiny run has no validation
    assert result["test"]["stretch"] == 1.0
    assert [part["test"]["stretch"] for part in result["sweep"]] == [2.0]
    clip = result["clips"][f"world-{FIRST_TEST_SEED}-left"]
    assert {"cammc", "rot_deg", "metric_tr_percent", "ate_m", "auc_10", "psnr_db", "failed_frames", "lens"} <= set(clip)
    assert result["rows"]["floor"]["all"]["clips"] == 3


def check_true_videos_score_perfectly(config: TrainConfig, truth: dict[str, torch.Tensor]) -> None:
    """And the floor comes from its file: it does not depend on the row."""
    file = floor_file(config, TEST)
    floor = json.loads(file.read_text()) | {"marked": True}
    file.write_text(json.dumps(floor))
    save_file(truth, generated_file(config, TEST))
    scorer = Scorer(InThisProcess(), None)
    scorer.add(config, [TEST])
    scorer.finish(wait=False)
    (result,) = scorer.written
    assert result["rows"]["floor"]["marked"]
    assert result["rows"]["generated"]["all"]["values"]["rot_deg"]["mean"] < 1e-6
    assert result["clips"][f"world-{FIRST_TEST_SEED}-right"]["psnr_db"] == 60.0
    assert {clip["manoeuvre"] for clip in result["clips"].values()} == set(MANOEUVRES)


def test_a_row_that_another_process_makes_is_left_to_it(tmp_path: Path) -> None:
    configs = [tiny_config(tmp_path / name, "run.steps=1") for name in ("theirs", "ours")]
    scorer = Scorer(InThisProcess(), None)
    configs[0].run.out.mkdir()
    with FileLock(configs[0].run.out / "row.lock"):
        assert not run_rows(configs, [TEST], scorer, until="trained")
    assert not (configs[0].run.out / "trained").exists()
    assert (configs[1].run.out / "trained").exists()
    assert run_rows(configs, [TEST], scorer, until="trained")  # nobody holds it any more


def test_a_row_that_has_results_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, results = tiny_config(tmp_path / "row", "run.steps=2"), tmp_path / "results"
    results.mkdir()
    result = {
        "test": asdict(TEST),
        "rows": {},
        "clips": {},
        "sweep": [],
        "steps": 2,
        "batch_size": config.run.batch_size,
    }
    (results / "row.json").write_text(json.dumps(result | {"data": asdict(world_clips(config))}))
    monkeypatch.setattr(rows, "train", None)
    scorer = Scorer(InThisProcess(), results)
    assert run_rows([config], [TEST], scorer, is_made=partial(is_scored, tests=[TEST], results=results))
    assert scorer.written == []
    more = [TEST, replace(TEST, stretch=2.0)]
    with pytest.raises(ValueError, match=r"got ×1 of 2 steps, while .*row has 0 of 2 steps"):
        run_rows([config], more, scorer, is_made=partial(is_scored, tests=more, results=results))
    assert not is_scored(replace(config, run=replace(config.run, batch_size=8)), [TEST], results)
    with pytest.raises(ValueError, match="move it away or name another results folder"):
        run_rows([config], [TEST], scorer)  # one row that was asked for by name


def test_the_floor_is_shared_by_rows_and_not_by_tests(tmp_path: Path) -> None:
    one, other = tiny_config(tmp_path / "one"), tiny_config(tmp_path / "other", "run.steps=9")
    assert floor_file(one, TEST) == floor_file(other, replace(TEST, steps=50))
    assert floor_file(one, TEST) != floor_file(one, replace(TEST, stretch=2.0))
    assert floor_file(one, replace(TEST, stretch=2)) == floor_file(one, replace(TEST, stretch=2.0))
    assert floor_file(one, TEST) != floor_file(one, replace(TEST, worlds=2))
    assert floor_file(one, TEST) != floor_file(tiny_config(tmp_path / "one", "data.frames=5"), TEST)


def test_pieces_of_training_are_added_up(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "row", "run.steps=1")
    assert train_row(config)
    longer = replace(config, run=replace(config.run, steps=3))
    assert train_row(longer)
    assert train_row(longer)  # finished: nothing is trained, nothing is recorded
    pieces = [json.loads(line) for line in (config.run.out / "pieces.jsonl").read_text().splitlines()]
    assert [(piece["from"], piece["to"]) for piece in pieces] == [(0, 1), (1, 3)]
    assert source.provenance(longer)["trained_s"] == pytest.approx(sum(piece["wall_s"] for piece in pieces))
    (config.run.out / "pieces.jsonl").write_text(json.dumps(pieces[1]) + "\n")  # the first piece was killed
    assert source.provenance(longer)["trained_s"] is None


def test_when_time_is_over_the_row_in_training_stops_with_a_checkpoint(tmp_path: Path) -> None:
    configs = [tiny_config(tmp_path / name, "run.steps=100000") for name in ("first", "second")]
    with time_limit(2.0) as is_over:
        assert not run_rows(configs, [TEST], Scorer(InThisProcess(), None), is_over=is_over)
        assert is_over()
        assert not run_rows(configs[1:], [TEST], Scorer(InThisProcess(), None), is_over=is_over)
    (place,) = complete(configs[0].run.out / "checkpoints")
    assert place.name > "step-00000000"
    assert not configs[1].run.out.exists()


def test_a_loop_that_begins_after_the_deadline_is_stopped_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with time_limit(0.05) as is_over:
        time.sleep(0.2)
        assert is_over()
        with stop_requests() as stop_wanted:
            until = time.monotonic() + 5.0
            while not stop_wanted() and time.monotonic() < until:
                time.sleep(0.05)
            assert stop_wanted()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_a_loop_that_does_not_listen_yet(number: signal.Signals) -> None:
    """Whatever else the process is doing then, such as generating or scoring, goes on; a second Ctrl-C ends it."""
    with time_limit(600.0) as is_over:
        assert not is_over()
        os.kill(os.getpid(), number)
        assert is_over()
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        with stop_requests() as stop_wanted:
            until = time.monotonic() + 5.0
            while not stop_wanted() and time.monotonic() < until:
                time.sleep(0.05)
            assert stop_wanted()


def test_a_row_whose_training_was_stopped_is_not_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path / "row", "run.steps=1")
    assert train_row(config)  # leaves a folder of trained weights, of a shorter run
    monkeypatch.setattr(rows, "train", lambda config: config.run.out)
    longer = replace(config, run=replace(config.run, steps=5))
    assert not run_rows([longer], [TEST], Scorer(InThisProcess(), None))
    assert not generated_file(longer, TEST).exists()


def test_a_row_that_diverges_keeps_no_other_from_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(config: TrainConfig) -> Path:
        if config.run.out.name == "first":
            raise NonFiniteLoss("step 7: the loss is not finite")
        return train(config)

    monkeypatch.setattr(rows, "train", diverging)
    configs = [tiny_config(tmp_path / name, "run.steps=1") for name in ("first", "second")]
    with pytest.raises(NonFiniteLoss, match="step 7"):
        run_rows(configs, [TEST], Scorer(InThisProcess(), None), until="trained")
    assert (tmp_path / "second" / "trained").is_dir()


def test_what_a_failed_row_held_is_free_when_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[weakref.ref[torch.nn.Module]] = []
    held = []

    def failing(config: TrainConfig) -> Path:
        held.extend(weight() is not None for weight in weights)
        module = torch.nn.Linear(1, 1)
        weights.append(weakref.ref(module))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rows, "train", failing)
    configs = [tiny_config(tmp_path / name) for name in ("first", "second")]
    with pytest.raises(RuntimeError, match="out of memory"):
        run_rows(configs, [TEST], Scorer(InThisProcess(), None))
    assert held == [False]


def test_a_gpu_that_is_lost_takes_no_further_row_and_leaves_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    finished: list[bool] = []
    scorer = Scorer(InThisProcess(), None)
    monkeypatch.setattr(scorer, "finish", lambda wait, is_over: finished.append(wait))
    monkeypatch.setattr(rows, "train", lost)
    monkeypatch.setattr(rows, "_free_model", lost)
    configs = [tiny_config(tmp_path / name) for name in ("first", "second")]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_rows(configs, [TEST], scorer)
    assert finished.count(True) == 1
    assert not configs[1].run.out.exists()


class FirstRowCannotBeScored(InThisProcess):
    def submit(self, call: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        job, future = arguments[0], Future[Any]()
        if job.videos is not None and job.videos.parent.name == "first":
            future.set_exception(OSError("a worker died"))
        else:
            future.set_result(pickle.dumps([]))
        return future


def test_a_row_that_cannot_be_scored_keeps_no_other_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "train_row", lambda config: True)
    monkeypatch.setattr(rows, "generate_row", lambda *_: None)
    monkeypatch.setattr(scorer_module, "summaries", lambda *_: {})
    monkeypatch.setattr(scorer_module, "scores_of_test", lambda *_: {})
    configs = [tiny_config(tmp_path / name) for name in ("first", "second", "third")]
    scorer = Scorer(FirstRowCannotBeScored(), None)
    with pytest.raises(OSError, match="a worker died"):
        run_rows(configs, [TEST], scorer)
    assert [result["row"] for result in scorer.written] == ["second", "third"]


def test_other_processes_work_and_leave_even_if_the_one_that_needs_them_is_killed() -> None:
    fork = get_context("fork")
    answers = fork.SimpleQueue()
    process = fork.Process(target=killed_while_others_work, args=(answers,))
    process.start()
    worker, threads = answers.get(), answers.get()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert worker != process.pid
    assert threads == 1
    until = time.monotonic() + 10.0
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def killed_while_others_work(answers: Any) -> None:
    with scoring_pool(2) as pool:
        answers.put(pool.submit(os.getpid).result())
        answers.put(pool.submit(torch.get_num_threads).result())
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_tree_says_its_commit_and_an_installation_what_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEROPE_COMMIT", "abc")
    monkeypatch.setattr(source, "__file__", str(tmp_path / "merope" / "train" / "provenance.py"))
    assert source.commit() == "abc"
