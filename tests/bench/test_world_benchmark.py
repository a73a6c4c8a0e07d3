"""The world benchmark: what is commanded, what is generated, how it is scored."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merope.bench.world import FIRST_TEST_SEED, MANOEUVRES, WorldTest, clips_of_world, generate_row
from merope.bench.world_scores import psnr_db, score_clip, score_row, table, with_seed
from merope.cli import main
from merope.data.world_clips import HELD_OUT_SEEDS, WorldClips
from merope.train.checkpoint import complete
from merope.train.loop import train
from tests.train.tiny_runs import TINY, tiny_config

CPU = torch.device("cpu")
CLIPS = WorldClips(frames=5, height=72, width=128, prefix_frames=2)
CLIPS_OF_TINY = WorldClips(frames=4, height=72, width=128, prefix_frames=2)


def test_three_paths_share_prefix_and_world_and_then_part() -> None:
    test = WorldTest(worlds=1)
    original, left, right = clips_of_world(test, CLIPS, FIRST_TEST_SEED, CPU)
    assert [clip.manoeuvre for clip in (original, left, right)] == list(MANOEUVRES)
    assert torch.equal(original.true[:2], left.true[:2])
    assert torch.equal(original.cameras.world_from_camera[:2], right.cameras.world_from_camera[:2])
    heading = [float(clip.cameras.world_from_camera[-1, 0, 2]) for clip in (left, original, right)]
    assert heading == sorted(heading)
    assert heading[2] - heading[0] > 0.8  # sines of ±30° about the original
    assert (left.true[-1].int() - right.true[-1].int()).abs().float().mean() > 5
    assert max(test.seeds) < HELD_OUT_SEEDS


def test_a_true_video_scores_perfectly_and_a_wrong_one_does_not() -> None:
    clip, left, _ = clips_of_world(WorldTest(worlds=1), CLIPS, FIRST_TEST_SEED + 1, CPU)
    perfect = score_clip(clip, clip.true, 2)
    assert perfect.metrics.rot_deg < 0.05
    assert perfect.metrics.metric_tr_percent is not None
    assert perfect.metrics.metric_tr_percent < 0.2
    assert perfect.psnr_db == 60.0
    wrong = score_clip(clip, left.true, 2)  # went left instead
    assert wrong.psnr_db < 25
    assert wrong.metrics.valid_frames < 5 or wrong.metrics.rot_deg > 3


def test_a_clip_of_which_only_the_given_frames_are_right_has_failed() -> None:
    clip = clips_of_world(WorldTest(worlds=1), CLIPS, FIRST_TEST_SEED + 1, CPU)[0]
    noise = torch.randint(0, 256, clip.true.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    score = score_clip(clip, torch.cat((clip.true[:2], noise[2:])), 2)
    assert score.metrics.valid_frames == 0
    assert math.isnan(score.metrics.rot_deg)
    assert score.pairs.hits(10) == 0


def test_videos_of_another_test_or_of_other_weights_are_generated_anew(tmp_path: Path) -> None:
    config, test = tiny_config(tmp_path / "row", "run.steps=1"), WorldTest(worlds=1, steps=1)
    train(config)
    file = generate_row(config, test, CPU)
    first, written = load_file(file), file.stat().st_mtime_ns
    train(config)  # a finished run is written out again, to the same bytes
    assert generate_row(config, test, CPU).stat().st_mtime_ns == written
    more = replace(test, worlds=2)
    assert len(load_file(generate_row(config, more, CPU))) == 6
    file.write_bytes(file.read_bytes()[:1000])  # a run that was stopped while it wrote
    again = load_file(generate_row(config, test, CPU))
    assert all(torch.equal(first[name], video) for name, video in again.items())
    trained = next((config.run.out / "trained" / "transformer").glob("*.safetensors"))
    save_file({name: weight + 0.1 for name, weight in load_file(trained).items()}, trained)
    other = load_file(generate_row(config, test, CPU))
    assert any(not torch.equal(first[name], video) for name, video in other.items())


def test_a_number_of_one_clip_has_no_interval_in_the_table() -> None:
    row = {"values": {"rot_deg": {"mean": 1.5, "low": None, "high": None, "count": 1}}}
    row |= {"failed_frames": 3, "frames": 7, "psnr_db": 8.0}
    assert "1.50" in table({"row": {"rows": {"generated": {"all": row}}}})


def test_psnr_is_that_of_the_mean_square() -> None:
    true = torch.full((2, 4, 4, 3), 100, dtype=torch.uint8)
    off = true + torch.tensor([0, 10], dtype=torch.uint8)[:, None, None, None]
    assert psnr_db(off, true) == pytest.approx((60.0 + 20 * torch.log10(torch.tensor(25.5)).item()) / 2)


def test_a_row_is_trained_generated_and_scored(tmp_path: Path) -> None:
    config = with_seed(tiny_config(tmp_path / "row", "run.steps=1", "data.height=72", "data.width=128"), 3)
    assert config.run.out == tmp_path / "row-seed3"
    assert config.run.seed == 3
    test = WorldTest(worlds=1, steps=2, batch=2)
    with pytest.raises(ValueError, match="train it first"):
        generate_row(config, test, CPU)
    train(config)
    videos = load_file(generate_row(config, test, CPU))
    assert sorted(videos) == [f"world-{FIRST_TEST_SEED}-{name}" for name in sorted(MANOEUVRES)]
    truth = {clip.name: clip.true for clip in clips_of_world(test, CLIPS_OF_TINY, FIRST_TEST_SEED, CPU)}
    for name, video in videos.items():
        assert torch.equal(video[:2], truth[name][:2])  # the prefix is kept
        assert not torch.equal(video[2:], truth[name][2:])
    save_file(truth, config.run.out / "generated.safetensors")
    result = score_row(config, test, workers=1)
    assert result == json.loads((config.run.out / "scores.json").read_text())
    assert result["rows"]["generated"] == result["rows"]["floor"]
    assert result["rows"]["floor"]["all"]["clips"] == 3
    assert "row" in table({"row": result})


def test_the_command_runs_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "world", str(TINY), "--until", "trained", "--seed", "2", "--set", f"run.out={tmp_path / 'x'}"]
    arguments += ["--set", "run.steps=1", "--set", "run.validation_clips=0"]
    assert main(arguments) == 0
    assert (tmp_path / "x-seed2" / "trained" / "branch").is_dir()
    assert "x-seed2" in capsys.readouterr().out
    assert main([*arguments, "--set", "run.steps=2"]) == 0  # more training is done, not skipped
    assert [place.name for place in complete(tmp_path / "x-seed2" / "checkpoints")][-1] == "step-00000002"
    assert main([*arguments, "--set", "run.steps=2", "--set", "branch.encoding=ucpe"]) == 2
    assert "a run with the same settings" in capsys.readouterr().err
