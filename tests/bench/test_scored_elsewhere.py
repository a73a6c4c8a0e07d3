"""Rows that are scored where nothing is but their videos: no weights, no log, no checkpoint."""

import shutil
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from merope.bench import rows
from merope.bench.generated import about_videos, check_generated, generated_file, is_generated
from merope.bench.rows import run_rows
from merope.bench.scorer import Scorer
from merope.cli import main
from merope.evaluate.workers import InThisProcess
from merope.train.config import TrainConfig
from merope.world.commanded import WorldTest
from tests.bench.test_latent_rows import latent_config
from tests.train.tiny_runs import TINY

TEST = WorldTest(worlds=1, steps=1)
LONGER = replace(TEST, stretch=2.0)


def in_folder(config: TrainConfig, folder: Path) -> TrainConfig:
    return replace(config, run=replace(config.run, out=folder / config.run.out.name))


def copy_videos(config: TrainConfig, folder: Path) -> TrainConfig:
    """The row on another machine: what is generated comes along, and no other file."""
    there = in_folder(config, folder)
    there.run.out.mkdir(parents=True)
    for file in config.run.out.glob("generated*.safetensors"):
        shutil.copy(file, there.run.out)
    return there


def scored(config: TrainConfig, tests: list[WorldTest], results: Path) -> dict[str, Any]:
    scorer = Scorer(InThisProcess(), results)
    assert run_rows([config], tests, scorer, score_only=True)
    return scorer.written[0]


def say(file: Path, **words: str | None) -> None:
    """Change what videos say of themselves; None: they do not say it."""
    about: dict[str, str | None] = about_videos(file) | words
    save_file(load_file(file), file, {key: word for key, word in about.items() if word is not None})


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A row that began with a trained model, as in the miniature; its videos are latents."""
    folder = tmp_path_factory.mktemp("generated")
    base = latent_config(folder)
    assert run_rows([base], [TEST], Scorer(InThisProcess(), None), until="trained")
    start = replace(base.model, pretrained=str(base.run.out / "trained"), architecture=None, vae=None)
    config = replace(in_folder(base, folder / "rows"), model=start)
    assert run_rows([config], [TEST, LONGER], Scorer(InThisProcess(), None), until="generated", rows_at_once=4)
    return config


def test_videos_alone_have_the_scores_of_the_whole_row(
    generated: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = copy_videos(generated, tmp_path / "elsewhere")
    for name in ("train_row", "generate_row"):
        monkeypatch.setattr(rows, name, None)
    first = scored(elsewhere, [TEST], tmp_path / "results")
    assert first["sweep"] == []
    both = scored(elsewhere, [TEST, LONGER], tmp_path / "results")  # more tests of the same weights
    assert {key: both[key] for key in first if key != "sweep"} == {key: first[key] for key in first if key != "sweep"}
    monkeypatch.undo()
    scorer = Scorer(InThisProcess(), tmp_path / "whole")
    assert run_rows([generated], [TEST, LONGER], scorer)
    assert both == scorer.written[0]
    assert both["rows_at_once"] == 4
    assert both["parameters"] > 10_000
    assert both["trained_s"] > 0
    assert (tmp_path / "results" / "stills" / "row-seed0.webp").exists()
    assert not (tmp_path / "results" / "attention").exists()  # needs weights
    assert (tmp_path / "whole" / "attention" / "row-seed0.json").exists()


def test_videos_that_are_not_there_or_not_of_this_row_are_refused(generated: TrainConfig, tmp_path: Path) -> None:
    def refused(config: TrainConfig, tests: list[WorldTest], why: str) -> None:
        with pytest.raises(ValueError, match=why):
            scored(config, tests, tmp_path / "results")

    there = copy_videos(generated, tmp_path / "there")
    refused(in_folder(generated, tmp_path / "nowhere"), [TEST], "must be what a row generated, got nothing")
    refused(there, [TEST, replace(TEST, stretch=4.0)], "generated-x4.safetensors must be")
    refused(there, [WorldTest(worlds=1, steps=2)], "test of .*generated.safetensors must be")
    refused(replace(there, run=replace(there.run, steps=7)), [TEST], "steps of .* must be 7, got 1")
    refused(replace(there, branch="none"), [TEST], "branch of .* must be none")
    vae = Path(str(there.model.pretrained)) / "vae" / "diffusion_pytorch_model.safetensors"
    before = vae.read_bytes()
    try:
        save_file({name: weight + 1.0 for name, weight in load_file(vae).items()}, vae)
        refused(there, [TEST], "vae of .*generated.safetensors must be")
    finally:
        vae.write_bytes(before)
    say(generated_file(there, LONGER), trained="another training")
    refused(there, [TEST, LONGER], "trained of .*generated-x2.safetensors must be")
    assert not (tmp_path / "nowhere").exists()
    say(generated_file(there, TEST), run=None)
    refused(there, [TEST], "videos that say of which run they are")
    assert not (tmp_path / "results" / "row-seed0.json").exists()


def test_videos_of_an_earlier_version_learn_what_they_lack_where_the_weights_are(
    generated: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = generated_file(generated, TEST)
    before = file.read_bytes(), about_videos(file)
    try:
        say(file, run=None, vae=None)
        assert not is_generated(generated, TEST)
        monkeypatch.setattr("merope.bench.generated.generate_clips", None)  # the clips stay as they are
        assert run_rows([generated], [TEST], Scorer(InThisProcess(), None), until="generated", rows_at_once=4)
        assert about_videos(file) == before[1]
        assert is_generated(generated, TEST)
        check_generated(copy_videos(generated, tmp_path), TEST)
    finally:
        file.write_bytes(before[0])


def test_scores_alone_end_with_the_time(generated: TrainConfig, tmp_path: Path) -> None:
    class Slow(Executor):
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            return Future()

    looks = iter([False, False, True])  # at the row, while it is scored, then
    scorer = Scorer(Slow(), tmp_path / "results")
    there = copy_videos(generated, tmp_path / "there")
    assert not run_rows([there], [TEST], scorer, score_only=True, is_over=lambda: next(looks))
    assert scorer.written == []
    assert next(looks, None) is None


def test_the_command_scores_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "world", str(TINY), "--set", f"run.out={tmp_path / 'x'}", "--workers", "1", "--score-only"]
    assert main(arguments) == 2
    assert "merope bench world CONFIG --until generated" in capsys.readouterr().err
    assert main([*arguments, "--until", "generated"]) == 2
    assert "--until must be scored, with --score-only" in capsys.readouterr().err
