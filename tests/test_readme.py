"""The README's code and commands run as they stand, and its first screen is true."""

import json
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapters.wan_models import tiny_config, tiny_wan
from tiny_pipelines import tiny_pipeline

import merope.demo.drive
from merope.adapters.attachment import attach, detach
from merope.cli import main
from merope.demo.drive import SHIPPED_MODEL
from merope.demo.given_paths import given_path
from merope.formats.video import write_video
from merope.train.checkpoint import complete
from merope.world.clips import WorldClips
from merope.world.clips_file import read_clips

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GOLDEN = ROOT / "tests" / "data" / "tiny_losses.json"
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def test_code_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    out, v, u = names["out"], names["v"], names["u"]
    assert isinstance(out, torch.Tensor)
    assert isinstance(v, torch.Tensor)
    assert isinstance(u, torch.Tensor)
    assert out.shape == v.shape
    assert (u.mT @ u - torch.eye(128)).abs().max() < 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place to run the commands in, with small stand-ins for what a user has: Wan, a trained branch, a video."""
    place = tmp_path_factory.mktemp("readme")
    generate = COMMANDS[-1]
    given = dict(zip(generate[2::2], generate[3::2], strict=True))
    transformer = tiny_wan(num_layers=2, patch_size=(1, 6, 8))  # 3 × 4 tokens a frame: there are 50 steps
    transformer.save_pretrained(place / given["--transformer"])  # all weights were trained
    attach(transformer, tiny_config()).save_pretrained(place / given["--branch"])
    detach(transformer)
    pipeline = tiny_pipeline(with_branch=False, transformer=transformer)
    pipeline.save_pretrained(place / given["--model"])
    write_video(torch.randint(256, (12, 288, 512, 3), dtype=torch.uint8), place / given["--prefix"], 12.0)
    return place


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=[" ".join(words[1:3]) for words in COMMANDS])
def test_commands_run_as_printed(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, each from what the ones before have written. The demo drives two blocks of its four."""
    assert COMMANDS[number][0] == "merope"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(merope.demo.drive, "read_clips", clips_of_two_blocks)
    started_s = time.process_time()
    assert main(COMMANDS[number][1:]) == 0, capsys.readouterr().err
    most_s = 60 if COMMANDS[number][1] == "train" else 130  # "about a minute on two cores"
    assert time.process_time() - started_s < most_s


def clips_of_two_blocks(model: Path) -> tuple[WorldClips, int]:
    clips, steps = read_clips(model)
    return replace(clips, frames=33), steps


def test_the_path_is_as_long_as_a_whole_demo(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path that the commands made. Nothing of it is cut, which would be said."""
    clips, _ = read_clips(SHIPPED_MODEL)
    assert len(given_path(folder / "path.json", clips, assume_metric=False)) == clips.frames > 33
    assert capsys.readouterr().err == ""


def test_the_tiny_run_has_learnt_along_the_golden_curve(folder: Path) -> None:
    """The run that the commands made."""
    out = folder / "outputs" / "tiny"
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    curve, golden = [row["loss"] for row in rows], json.loads(GOLDEN.read_text())
    assert len(curve) == 60
    assert sum(curve[-10:]) < 0.45 * sum(curve[:10])
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(golden), rtol=2e-3, atol=0)
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert validation == sorted(validation, reverse=True)
    assert len(validation) == 3
    assert [place.name for place in complete(out / "checkpoints")] == ["step-00000040", "step-00000060"]
    assert list((out / "tensorboard").iterdir())


def test_commands_and_pictures_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
