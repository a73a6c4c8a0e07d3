"""`merope analyse` of other base models: two experts, joint text, tokens of two latent frames."""

import json
from pathlib import Path

import pytest
from adapters.wan_models import perturb, tiny_config
from family_folders import FOLDERS, TRAINABLE, write_folder
from scenes import curved_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH

import merope
from merope import formats
from merope.cli import main
from merope.formats.trajectory import Trajectory

STEPS = 8

REFUSED = dict.fromkeys(("i2v", "a14b_i2v", "skyreels_i2v", "cog_i2v"), "it wants an image") | {
    "vace": "it learns from control videos",
    "ltx_2": "it learns video together with its sound",
    "kandinsky": "its text has neither padding nor a mask",
    "cosmos_25": "its generations scale noise and latents in ways of their own",
}


def analyse(folder: Path, name: str) -> int:
    """The command, on a branch that acts."""
    pipe = FOLDERS[name]()
    for branch in merope.attach(pipe, tiny_config(blocks="every")).values():
        perturb(branch)
    branches = merope.detach(pipe)
    (branches if len(branches) > 1 else branches["transformer"]).save_pretrained(folder / "branch")
    path = Trajectory(curved_drive(20, step_m=0.4), is_metric=True, convention="a test", lens=LENS)
    formats.write(path, folder / "bend.json")
    line = ["analyse", "--model", folder / name, "--branch", folder / "branch", "--steps", STEPS]
    line += ["--trajectory", folder / "bend.json", "--frames", 9, "--size", HEIGHT, WIDTH, "--out", folder / "out"]
    return main([str(word) for word in line])


@pytest.mark.parametrize("name", TRAINABLE)
def test_numbers_of_every_transformer(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ("transformer", "transformer_2") if name == "a14b" else (".",)
    write_folder(tmp_path, name)
    assert analyse(tmp_path, name) == 0
    assert capsys.readouterr().out.count("block ") == 2 * len(places)
    forwards = 0
    for place in places:
        table = json.loads((tmp_path / "out" / place / "analysis.json").read_text())
        assert list(table["amplitude"]) == ["0", "1"]
        assert all(value > 0 for value in table["amplitude"].values())
        forwards += table["forwards"]
    assert forwards == STEPS


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_with_their_reason_before_weights_are_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in write_folder(tmp_path, name).rglob("*.safetensors"):
        file.unlink()
    assert analyse(tmp_path, name) == 2
    said = capsys.readouterr().err
    assert REFUSED[name] in said
    assert "merope.paper.analysis.recording(pipe.transformer)" in said
