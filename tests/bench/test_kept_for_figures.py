"""What a row leaves behind for figures: stills of its clips, attention and amplitude of its branch."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from merope.bench import rows
from merope.bench.rows import run_rows
from merope.bench.scorer import Scorer
from merope.bench.scores import with_seed
from merope.bench.stills import keep_stills, read_stills, still_frames, stills_file, true_stills
from merope.bench.straight_drives import LENGTHS_M, attention_file, read_straight_drives
from merope.bench.table import read_rows, tables
from merope.evaluate.workers import InThisProcess
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED, WorldTest, clips_of_world
from tests.bench.grey_stills import HEIGHT, WIDTH, write_grey_stills
from tests.train.tiny_runs import tiny_config

TEST = WorldTest(worlds=2, steps=1)
CPU = torch.device("cpu")


def small_config(folder: Path, *changes: str) -> TrainConfig:
    return with_seed(
        tiny_config(folder / "row", "run.steps=1", f"data.height={HEIGHT}", f"data.width={WIDTH}", *changes), 0
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """A generated row, which nobody has scored."""
    folder = tmp_path_factory.mktemp("rows")
    config, results = small_config(folder), folder / "results"
    assert run_rows([config], [TEST], Scorer(InThisProcess(), results), until="generated")
    return config, results


def test_stills_are_cut_up_as_they_were_put_together(tmp_path: Path) -> None:
    greys = torch.arange(2 * 3 * 4).reshape(2, 3, 4) * 10
    stills = read_stills(write_grey_stills(tmp_path, "row", greys))
    assert stills.frames == [1, 2, 3]
    assert stills.pictures.shape == (2, 3, 3, HEIGHT, WIDTH, 3)
    assert (stills.pictures - greys[:, :, 1:, None, None, None]).abs().max() <= 2
    assert (stills.row, stills.test) == ("row", WorldTest(worlds=2, steps=1))
    assert stills.clips == WorldClips(frames=4, height=HEIGHT, width=WIDTH, prefix_frames=2)


def test_true_stills_are_rendered_from_what_the_file_says(made: tuple[TrainConfig, Path]) -> None:
    config, results = made
    stills, clips, seed = read_stills(stills_file(config, results)), world_clips(config), FIRST_TEST_SEED + 1
    commanded = clips_of_world(TEST.paths(clips, seed), clips, seed, CPU)
    seen = true_stills(stills, 1)
    for shown, clip in zip(seen, commanded, strict=True):
        assert (shown.float() - clip.true[stills.frames].float()).abs().max() <= 1.0
    assert (seen[:, 0].float() - stills.pictures[1, :, 0].float()).abs().mean() < 8.0  # the frame that was given


def test_drives_of_another_version_are_not_rendered(made: tuple[TrainConfig, Path]) -> None:
    stills = read_stills(stills_file(*made))
    older = replace(stills, about=stills.about | {"data": stills.about["data"] | {"drives": 1}})
    with pytest.raises(ValueError, match="drives of row must be of version 2"):
        true_stills(older, 0)


def test_stills_of_the_miniature_are_of_the_last_given_frame_and_three_generated_ones() -> None:
    assert still_frames(WorldClips(frames=49, height=144, width=256, prefix_frames=9)) == [8, 21, 35, 48]


def test_stills_that_are_kept_are_not_made_again(made: tuple[TrainConfig, Path], tmp_path: Path) -> None:
    config, results = made
    for file in (stills_file(config, results), stills_file(config, results).with_suffix(".json")):
        copy = tmp_path / "results" / "stills" / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    kept = stills_file(config, tmp_path / "results")
    kept.write_bytes(b"of another machine")
    assert keep_stills(config, TEST, tmp_path / "results", CPU) == kept
    assert kept.read_bytes() == b"of another machine"
    keep_stills(config, replace(TEST, worlds=1), tmp_path / "results", CPU)  # of another test they are made anew
    assert read_stills(kept).pictures.shape[0] == 1


def test_attention_and_amplitude_of_the_branch_are_kept(made: tuple[TrainConfig, Path]) -> None:
    config, results = made
    kept = json.loads(attention_file(config, results).read_text())
    assert (kept["row"], kept["seed"], kept["branch"]["encoding"]) == ("row", 0, "merope")
    assert kept["weights"] == read_stills(stills_file(config, results)).about["weights"]
    assert read_straight_drives(results) == {"row": [kept["drives"]]}
    assert [drive["length_m"] for drive in kept["drives"]] == list(LENGTHS_M)
    for drive in kept["drives"]:
        assert len(drive["mass"]) == 4
        assert sum(drive["mass"]) == pytest.approx(1.0, abs=1e-4)
        amplitudes = list(drive["amplitude_by_block"].values())
        assert drive["amplitude"] == pytest.approx(sum(amplitudes) / len(amplitudes))
        assert set(drive["amplitude_by_block"]) <= {str(block) for block in range(drive["layers"])}
        assert min(amplitudes) > 0.0  # one step has moved the branch away from nothing
    assert kept["drives"][0]["mass"] != kept["drives"][-1]["mass"]  # the metres are in the keys


def test_a_row_without_a_parallel_branch_leaves_stills_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(small_config(tmp_path), branch="none")
    assert run_rows([config], [TEST], Scorer(InThisProcess(), tmp_path / "results"), until="generated")
    assert stills_file(config, tmp_path / "results").exists()
    assert not attention_file(config, tmp_path / "results").exists()
    assert "failed" not in capsys.readouterr().err


def test_what_cannot_be_kept_costs_the_row_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*_: object) -> Path:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(rows, "keep_stills", break_down)
    monkeypatch.setattr(rows, "keep_straight_drives", break_down)
    scorer, results = Scorer(InThisProcess(), tmp_path / "results"), tmp_path / "results"
    assert run_rows([small_config(tmp_path)], [replace(TEST, worlds=1)], scorer)
    said = capsys.readouterr().err
    assert "stills of row-seed0 failed: RuntimeError: no memory is left" in said
    assert "straight drives of row-seed0 failed" in said
    assert [file.name for file in results.iterdir()] == ["row-seed0.json"]
    assert "row" in tables(read_rows(results))
